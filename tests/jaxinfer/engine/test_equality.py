"""The engine gives the tokens of the naive loop, under any page size, chunking, pressure and order of arrival."""

import random

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.conftest import MAX_LEN
from tests.naive import NaiveLoop

BASE = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": MAX_LEN, "decode_steps": 4}
CONFIGS = {
    "tiny_pool": {
        "page_size": 4,
        "num_pages": 1 + MAX_LEN // 4,
        "max_num_batched_tokens": 16,
    },  # holds one full request: preemption all the time
}
SLOW_CONFIGS = {
    "base": {},
    "page_size_1_synchronous": {"page_size": 1, "async_scheduling": False, "decode_steps": 1},
    "page_size_64_chunks_of_7": {"page_size": 64, "max_num_batched_tokens": 7},
    "chunks_of_1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "no_prefix_cache": {"prefix_cache": False, "page_size": 4, "num_pages": 30},
    "priority": {"policy": "priority", "decode_steps": 3, "page_size": 8, "num_pages": 20},
}


def random_prompt(rng):
    """Up to 60 tokens, of which the first are often those of other prompts."""
    prompt = rng.integers(3, 320, int(rng.integers(1, 60)))
    common = int(rng.integers(0, len(prompt) + 1)) if rng.random() < 0.5 else 0
    prompt[:common] = np.random.default_rng(0).integers(3, 320, common)
    return prompt.tolist()


def random_params(rng):
    """Parameters of all kinds; the seed makes sampled requests repeatable."""
    pick = random.Random(int(rng.integers(1 << 30)))
    options = {
        "temperature": pick.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "top_k": pick.choice([0, 0, 1, 5, 40]),
        "top_p": pick.choice([1.0, 1.0, 0.9, 0.5]),
        "min_p": pick.choice([0.0, 0.0, 0.1]),
        "typical_p": pick.choice([1.0, 1.0, 1.0, 0.8]),
        "repetition_penalty": pick.choice([1.0, 1.0, 1.3]),
        "presence_penalty": pick.choice([0.0, 0.0, 0.5]),
        "frequency_penalty": pick.choice([0.0, 0.0, -0.5]),
        "logit_bias": pick.choice([None, None, {7: 5.0, 300: -20.0}]),
        "allowed_token_ids": pick.choice([None, None, None, tuple(range(2, 200))]),
        "bad_words": pick.choice([(), (), ("the", "hello there")]),
        "stop": pick.choice([(), (), ("e",), ("th", "o w")]),
        "stop_token_ids": pick.choice([(), (), (165, 177)]),
        "ignore_eos": pick.choice([False, True]),
        "min_tokens": pick.choice([0, 0, 4]),
        "logprobs": pick.choice([None, None, 3]),
        "max_tokens": int(rng.integers(5, 30)),
        "seed": int(rng.integers(1 << 62)),
    }
    return SamplingParams(**options)


def run(engine, requests, rng, abort=()):
    """Runs requests added in random order at random moments; returns their outputs by index."""
    waiting = rng.permutation(len(requests)).tolist()
    while waiting or engine.has_work:
        count = int(rng.integers(0, 4))
        for i in waiting[:count]:
            engine.add_request(str(i), *requests[i], priority=i % 3)
        waiting = waiting[count:]
        for i in abort:
            if i not in waiting and rng.random() < 0.2:
                engine.abort(str(i))
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_used == 0
    return [engine.pop_output(str(i)) for i in range(len(requests))]


def check_equal(engine, naive, num_requests, seed, abort=(), atol=1e-4):
    rng = np.random.default_rng(seed)
    requests = [(random_prompt(rng), random_params(rng)) for _ in range(num_requests)]
    outputs = run(engine, requests, rng, abort)
    for i, ((prompt, params), output) in enumerate(zip(requests, outputs)):
        tokens, text, scores = naive.run(prompt, params)
        completion = output.outputs[0]
        if i in abort:
            assert completion.token_ids == tokens[: len(completion.token_ids)]
            continue
        assert completion.token_ids == tokens, (i, params)
        assert completion.text == text, (i, params)
        assert completion.finish_reason is not None
        if params.logprobs is not None:
            assert len(completion.logprobs) == len(tokens)
            for token, entry, score in zip(tokens, completion.logprobs, scores):
                assert entry[token].logprob == pytest.approx(score[token], abs=atol)
                assert len(entry) in (params.logprobs, params.logprobs + 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_naive_loop(name, model, naive):
    engine = Engine(model, EngineConfig(**BASE | CONFIGS[name]))
    check_equal(engine, naive, 30, seed=1)
    if name == "tiny_pool":
        assert engine.stats().num_preemptions > 5
        assert engine.stats().num_evictions > 5
        assert engine.stats().prefix_cache.num_hit_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8,float8", "int8", "float8", "bfloat16"])
def test_a_quantized_cache_gives_the_same_tokens_in_chunks_in_batches_and_after_preemption(kv_dtype, model):
    """A token is stored the same way wherever it is computed: the naive loop on such a cache is the oracle."""
    engine = Engine(model, EngineConfig(**BASE | CONFIGS["tiny_pool"], kv_dtype=kv_dtype))
    # A last bit of a key may round it to its neighbour: tokens hold, log-probabilities move a little.
    check_equal(engine, NaiveLoop(model, MAX_LEN, kv_dtype), 15, seed=4, atol=2e-3)
    assert engine.stats().num_preemptions > 0


@pytest.mark.slow  # two kinds of engines to compile
@pytest.mark.parametrize("kv_dtype", ["int4", "int4,int2", "int8,int4"])
def test_pages_packed_when_full_give_the_same_tokens_in_chunks_in_batches_and_after_preemption(kv_dtype, model):
    """One request at a time in one piece, against many in chunks, with preemption all the time."""
    options = BASE | {"page_size": 32, "kv_dtype": kv_dtype}
    alone = Engine(model, EngineConfig(**options | {"max_num_seqs": 1, "max_num_batched_tokens": MAX_LEN}))
    tight = Engine(model, EngineConfig(**options | {"num_pages": 4, "max_num_batched_tokens": 13}))
    rng = np.random.default_rng(5)
    requests = [
        (random_prompt(rng), SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True))
        for n in rng.integers(5, 37, 12)
    ]
    first, second = (run(engine, requests, np.random.default_rng(6)) for engine in (alone, tight))
    assert [x.outputs[0].token_ids for x in first] == [x.outputs[0].token_ids for x in second]
    assert tight.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CONFIGS)
def test_equals_naive_loop_in_every_configuration(name, model, naive):
    check_equal(Engine(model, EngineConfig(**BASE | SLOW_CONFIGS[name])), naive, 30, seed=2)


@pytest.mark.slow
def test_a_hundred_requests_with_aborts(model, naive):
    engine = Engine(model, EngineConfig(**BASE | {"page_size": 4, "num_pages": 40}))
    check_equal(engine, naive, 100, seed=3, abort=range(0, 100, 7))
