"""Engines that share pages say what engines say that do not; forks go on as if they had been alone."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.kv_spec import KVSpec
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.conftest import MAX_LEN

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
PROMPT = np.random.default_rng(7).integers(3, 320, 22).tolist()  # with pages of 4: five full ones and two tokens


def make_engine(model, **options):
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": MAX_LEN, "page_size": 4, "seed": 1}
    return Engine(model, EngineConfig(**defaults | options))


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model)


def finish(engine, *ids):
    while not all(engine.is_finished(i) for i in ids):
        engine.step()
        engine.scheduler.check_integrity()
    return [engine.pop_output(i) for i in ids]


def tokens(output):
    return [completion.token_ids for completion in output.outputs]


def serve(engine, prompt, params, **options):
    engine.add_request("r", prompt, params, **options)
    return finish(engine, "r")[0]


@pytest.mark.parametrize("params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
def test_a_conversation_finds_its_own_answers(engine, naive, params):
    prompt, found = PROMPT, []
    engine.reset_prefix_cache()
    for _ in range(3):
        output = serve(engine, prompt, params)
        assert tokens(output) == [naive.run(prompt, params)[0]]
        found.append((output.metrics.num_cached_tokens, len(prompt)))
        prompt = [*prompt, *output.outputs[0].token_ids, 5, 6, 7]
    assert found == [(0, 22), (32, 37), (48, 52)]  # all full pages of what was computed: 33 and 48 tokens


def test_salts_and_prompt_logprobs(engine, naive):
    engine.reset_prefix_cache()
    wanted = naive.run(PROMPT, GREEDY)[0]
    scored = dataclasses.replace(GREEDY, prompt_logprobs=1)
    runs = [("x", GREEDY, 0), ("y", GREEDY, 0), ("x", GREEDY, 20), (None, GREEDY, 0), ("x", scored, 0)]
    for salt, params, found in runs:
        output = serve(engine, PROMPT, params, cache_salt=salt)
        assert (tokens(output), output.metrics.num_cached_tokens) == ([wanted], found)
    assert len(output.prompt_logprobs) == len(PROMPT)
    with pytest.raises(ValueError, match="cache_salt must be a string that is not empty, or None, got ''"):
        engine.add_request("bad", PROMPT, cache_salt="")


@pytest.mark.parametrize("cache", [True, False])
def test_n_samples_compute_their_prompt_once_and_are_those_of_their_seeds(model, naive, cache):
    engine = make_engine(model, prefix_cache=cache)
    output = serve(engine, PROMPT, dataclasses.replace(SAMPLED, n=4))
    alone = [naive.run(PROMPT, dataclasses.replace(SAMPLED, seed=5 + i))[0] for i in range(4)]
    assert tokens(output) == alone
    assert len({*map(tuple, alone)}) == 4
    stats = engine.stats()
    assert stats.num_prefill_tokens == len(PROMPT) + 3  # of each fork its last token
    assert stats.num_page_copies == 3
    assert stats.num_used_pages == 0


def test_the_best_of_several_samples_are_those_of_the_highest_probability(engine, naive):
    before = engine.stats()
    engine.reset_prefix_cache()
    alone = [naive.run(PROMPT, dataclasses.replace(SAMPLED, seed=5 + i)) for i in range(4)]
    totals = [sum(float(s[t]) for t, s in zip(output, scores)) for output, _, scores in alone]
    best = sorted(range(4), key=lambda i: -totals[i])[:2]
    assert best != [0, 1]
    for logprobs in (None, 1):
        output = serve(engine, PROMPT, dataclasses.replace(SAMPLED, n=2, best_of=4, logprobs=logprobs))
        assert tokens(output) == [alone[i][0] for i in best]
        assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([totals[i] for i in best], abs=1e-3)
        assert [c.index for c in output.outputs] == [0, 1]
        assert all((c.logprobs is None) == (logprobs is None) for c in output.outputs)
    computed = engine.stats().num_prefill_tokens - before.num_prefill_tokens
    assert computed == len(PROMPT) + 3 + (len(PROMPT) - 20) + 3  # the prompt once, then its last page


@pytest.mark.slow
def test_n_samples_with_logprobs_in_a_pool_for_one(model, naive):
    """Sources are preempted before and after their forks have started."""
    engine = make_engine(model, num_pages=1 + MAX_LEN // 4, max_num_batched_tokens=8)
    params = dataclasses.replace(SAMPLED, n=3, logprobs=1, prompt_logprobs=1, max_tokens=40)
    engine.add_request("a", PROMPT, params)
    engine.add_request("b", PROMPT, params)
    outputs = finish(engine, "a", "b")
    assert engine.stats().num_preemptions > 2
    alone = [naive.run(PROMPT, dataclasses.replace(SAMPLED, seed=5 + i, max_tokens=40))[0] for i in range(3)]
    for output in outputs:
        assert tokens(output) == alone
        assert len(output.prompt_logprobs) == len(PROMPT)
        assert [len(completion.logprobs) for completion in output.outputs] == [40] * 3


def test_a_fork_goes_on_from_where_its_source_is(engine, naive):
    engine.add_request("a", PROMPT, GREEDY)
    streamed = []
    while len(streamed) < 5:
        streamed += [token for chunk in engine.step() for token in chunk.token_ids]
    before = engine.stats()
    engine.fork("a", "b", dataclasses.replace(GREEDY, max_tokens=30))
    engine.fork("a", "c", dataclasses.replace(SAMPLED, n=2))
    engine.fork("b", "d")  # of a fork that has not started
    chunks = [chunk for _ in range(3) for chunk in engine.step()]
    assert next(chunk for chunk in chunks if chunk.request_id == "b").token_ids[: len(streamed)] == streamed
    assert engine.stats().num_shared_pages > 0
    a, b, c, d = finish(engine, "a", "b", "c", "d")
    wanted = naive.run(PROMPT, dataclasses.replace(GREEDY, max_tokens=30))[0]
    assert tokens(a) == [wanted[:12]]
    assert tokens(b) == tokens(d) == [wanted]
    for i, output in enumerate(tokens(c)):
        rest = dataclasses.replace(SAMPLED, seed=5 + i, max_tokens=12 - len(streamed))
        assert output == streamed + naive.run(PROMPT + streamed, rest)[0]
    after = engine.stats()
    assert after.num_prefill_tokens - before.num_prefill_tokens == 4  # each fork's last token
    assert after.num_page_copies - before.num_page_copies in (0, 4)  # none if the last page was full


def test_a_fork_has_logprobs_of_the_common_tokens(engine):
    params = dataclasses.replace(GREEDY, logprobs=2)
    engine.add_request("a", PROMPT, params)
    while not engine.step():
        pass
    engine.fork("a", "b", dataclasses.replace(params, max_tokens=20))
    a, b = finish(engine, "a", "b")
    assert [entry.keys() for entry in b.outputs[0].logprobs[:12]] == [e.keys() for e in a.outputs[0].logprobs]
    assert len(b.outputs[0].logprobs) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "a"), "request id 'a' is in use"),
        (("b", "c"), "no completion 0 of a request 'b' to fork"),
        (("done", "c"), "done#0 has ended and can not be forked: start a new request"),
        (("a", "c", dataclasses.replace(GREEDY, prompt_logprobs=1)), "prompt_logprobs of a fork"),
        (("a", "c", dataclasses.replace(GREEDY, logprobs=1)), "its tokens so far have none"),
        (("a", "c", dataclasses.replace(GREEDY, max_tokens=1)), r"counts its source's \d output tokens: give more"),
        (("a", "c", {"n": 2}), "params must be SamplingParams"),
        (("a", "c", dataclasses.replace(SAMPLED, best_of=2)), "best_of chooses among completions that begin together"),
    ],
    ids=["id in use", "unknown", "ended", "prompt_logprobs", "logprobs", "max_tokens", "no params", "best_of"],
)
def test_forks_that_are_refused(engine, arguments, message):
    engine.add_request("done", PROMPT, dataclasses.replace(GREEDY, max_tokens=1))
    engine.add_request("a", PROMPT, GREEDY)
    while not engine.is_finished("done"):
        engine.step()
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.fork(*arguments)
    finish(engine, "done", "a")


def test_stats_of_pages(model):
    engine = make_engine(model, page_size=8)
    prompts = [PROMPT, [*PROMPT[:16], 9]]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    engine.step()
    stats = engine.stats()
    assert (stats.num_used_pages, stats.num_shared_pages, stats.num_cached_pages) == (4, 2, 0)
    tokens = 22 + 1 + 17 + 1  # each with one in flight
    assert stats.kv_waste == (3 * 8 + 3 * 8 - tokens) / (4 * 8)
    assert stats.kv_bytes_per_token == KVSpec("float32", "float32").bytes_per_token(model.config)
    assert stats.prefix_cache.num_hit_tokens == 16
    finish(engine, "0", "1")
    stats = engine.stats()
    assert stats.num_used_pages == 0
    assert stats.num_cached_pages == 4 + 1  # 33 tokens of the first; of the second (28) a third page of its own
    assert stats.num_free_pages == engine.scheduler.pool.num_pages - 1


def test_warmup_compiles_page_copies(model):
    engine = make_engine(model, max_num_seqs=2, max_num_batched_tokens=4)
    compiled = engine.runner._copy_pages._cache_size
    engine.runner.compile = lambda *_: None  # the steps are tested elsewhere
    engine.warmup()
    assert compiled() == 1
