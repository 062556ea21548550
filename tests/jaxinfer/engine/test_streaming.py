"""Engines that give pages back behind a window say what engines say that keep them, with and without sinks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import generate
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.conftest import MAX_LEN
from tests.jaxinfer.engine.test_equality import BASE, check_equal, random_prompt, run
from tests.jaxinfer.engine.test_sharing import finish, serve, tokens
from tests.naive import NaiveLoop

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LENGTH = 320
STREAM = {"attention_sinks": 3, "attention_window": 9}
TIGHT = BASE | {"page_size": 4, "max_num_batched_tokens": 16, "num_pages": 1 + 1 + 1 + (9 + 16 + 2) // 4}
PROMPT = np.random.default_rng(8).integers(3, 320, 50).tolist()


def with_config(model, config):
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, config=config))


@pytest.fixture(scope="module")
def engine(model):
    """One engine of two slots, whose requests may be longer than the model's 256 tokens."""
    return Engine(model, EngineConfig(**TIGHT | STREAM | {"max_num_seqs": 2, "num_pages": 20, "max_model_len": LENGTH}))


@pytest.fixture(scope="module")
def text(model):
    """A prompt and what the model says to it, from `generate`, which keeps every page."""
    decoder = model.decoder.clone(config=model.config.streaming(3, 9))
    count = LENGTH - len(PROMPT)
    wanted = generate(decoder, model.params, jnp.asarray([PROMPT]), max_new_tokens=count, stop_token_ids=())
    return PROMPT + wanted.token_ids[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "options"),
    [
        ((None, None), STREAM),
        ((8, 8), {}),  # Mistral
        ((8, 5), {"num_pages": 30, "prefix_cache": False}),
        ((8, None), {"num_pages": 1 + MAX_LEN // 4}),  # nothing is given back
        ((1, 1), {"async_scheduling": False, "page_size": 1, "num_pages": 20}),
        ((None, None), STREAM | {"attention_sinks": 0}),
        ((None, None), STREAM | {"attention_sinks": 6, "attention_window": 2, "decode_steps": 8}),
        ((None, 5), STREAM | {"page_size": 16, "num_pages": None}),
        ((None, None), STREAM | {"kv_dtype": "int8"}),
    ],
)
def test_every_kind_of_window_equals_the_naive_loop(model, windows, options):
    windowed = with_config(model, dataclasses.replace(model.config, layer_windows=windows))
    config = EngineConfig(**TIGHT | {"num_pages": 14} | options)
    oracle = NaiveLoop(with_config(model, config.seen_by(windowed.config)), MAX_LEN, config.kv_dtype)
    engine = Engine(windowed, config)  # with chunks, batches, preemption and prefix hits
    check_equal(engine, oracle, 20, seed=2, atol=2e-3 if config.kv_dtype == "int8" else 1e-4)
    assert (engine.stats().num_dead_pages > 0) == (None not in config.seen_by(windowed.config).layer_windows)


def test_a_stream_goes_on_beyond_the_models_limit_in_constant_memory(engine, text):
    engine.reset_prefix_cache()
    engine.add_request("r", PROMPT, dataclasses.replace(GREEDY, max_tokens=None))
    held, before = [], engine.stats().num_dead_pages
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        held += [len(request.pages) for request in engine.scheduler.running]
    assert [*PROMPT, *engine.pop_output("r").outputs[0].token_ids] == text
    assert max(held) <= engine.runner.buckets.pages_per_row == 1 + 1 + (9 + 16 + 2) // 4
    assert max(held[10:]) <= 1 + 1 + (9 + 4 + 2) // 4  # while it decodes: no room for a chunk
    assert engine.stats().num_dead_pages - before >= LENGTH // 4 - 6


@pytest.mark.slow
def test_packed_pages_behind_a_window(model):
    """int4: one request at a time in one piece, against many in chunks and in a pool for one."""
    options = BASE | {"page_size": 32, "kv_dtype": "int4", "max_model_len": 256}
    options |= {"attention_sinks": 3, "attention_window": 40}
    alone = Engine(model, EngineConfig(**options | {"max_num_seqs": 1, "max_num_batched_tokens": 256}))
    tight = Engine(model, EngineConfig(**options | {"num_pages": 5, "max_num_batched_tokens": 13}))
    rng = np.random.default_rng(5)
    requests = [(random_prompt(rng), dataclasses.replace(GREEDY, max_tokens=int(n))) for n in rng.integers(60, 140, 6)]
    first, second = (run(engine, requests, np.random.default_rng(6)) for engine in (alone, tight))
    assert [tokens(x) for x in first] == [tokens(x) for x in second]
    assert tight.stats().num_dead_pages > 0
    assert tight.stats().num_preemptions > 0


def test_forks_and_conversations_of_a_stream(engine, text):
    engine.reset_prefix_cache()
    answer, begin = text[len(PROMPT) : len(PROMPT) + 20], engine.stats().num_prefill_tokens
    assert tokens(serve(engine, PROMPT, dataclasses.replace(GREEDY, n=2))) == [answer] * 2
    # The fork computes the last token of the prompt again, for which the window is still there.
    assert engine.stats().num_prefill_tokens - begin == len(PROMPT) + 1

    again = serve(engine, text[:75], GREEDY)  # the sinks and the last window of what was said are enough
    assert tokens(again) == [text[75:95]]
    assert again.metrics.num_cached_tokens == 68  # the full pages of 69 computed tokens

    engine.add_request("a", PROMPT, GREEDY)
    while engine.scheduler.waiting or engine.scheduler.running[0].num_known_tokens < len(PROMPT) + 7:
        engine.step()
    engine.fork("a", "b")
    assert tokens(finish(engine, "b")[0]) == tokens(finish(engine, "a")[0]) == [answer]
