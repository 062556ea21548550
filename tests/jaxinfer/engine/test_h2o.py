"""H2O in the engine keeps what a plain simulation keeps, whatever else runs; and nobody else notices."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.sampling.h2o import H2O
from jaxinfer.sampling.params import SamplingParams
from tests.h2o_reference import H2OReference

LIMIT = 80
TIGHT = {
    "h2o": True, "max_num_seqs": 4, "max_num_batched_tokens": 7, "max_model_len": LIMIT, "page_size": 4,
    "num_pages": 1 + LIMIT // 4, "decode_steps": 4,
}  # fmt: skip
ROOMY = TIGHT | {"num_pages": 100}
SLOW_CONFIGS = {
    "synchronous_steps_of_1": {"async_scheduling": False, "decode_steps": 1},
    "chunks_of_1": {"max_num_batched_tokens": 1, "max_num_seqs": 1, "decode_steps": 1},
    "chunks_of_32": {"max_num_batched_tokens": 32, "page_size": 8},
    "pages_of_1": {"page_size": 1, "num_pages": 400, "decode_steps": 3},
    "pages_larger_than_a_budget": {"page_size": 64, "num_pages": 10},
    "reference_kernels": {"attention_implementation": "reference"},
}


def greedy(h2o=None, max_tokens=20, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, h2o=h2o, **options)


def prompts(rng, *lengths):
    return [rng.integers(3, 320, n).tolist() for n in lengths]


def kept_positions(engine, request):
    """Positions that each layer and KV head holds for a running request."""
    count = request.num_places(request.num_computed_tokens)
    if request.needs_compaction:  # the next step begins with it
        count = request.num_computed_tokens
    layers = [np.asarray(log.positions)[:, request.pages] for log in engine.runner._key_logs.layers]
    return [[sorted(head.ravel()[:count].tolist()) for head in layer] for layer in layers]


def run(engine, requests, stagger=1):
    """Runs the requests, a new one every `stagger` steps; returns outputs, and what was kept after how many tokens."""
    seen, waiting = [{} for _ in requests], list(range(len(requests)))
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % stagger == 0:
            i = waiting.pop(0)
            engine.add_request(str(i), *requests[i])
        engine.step()
        steps += 1
        engine.scheduler.check_integrity()
        for request in engine.scheduler.running:
            if request.params.h2o and request.num_computed_tokens:
                i = int(request.request_id.partition("#")[0])
                seen[i].setdefault(request.num_computed_tokens, []).append(kept_positions(engine, request))
    return [engine.pop_output(str(i)) for i in range(len(requests))], seen


def make_engine(model, config):
    """An engine that pads all decode steps to one size, of which fewer need to be compiled."""
    engine = Engine(model, EngineConfig(**config))
    buckets = engine.runner.buckets
    engine.runner.buckets = dataclasses.replace(buckets, decode_rows=buckets.decode_rows[-1:])
    return engine


def check_equal(model, naive, config, requests, stagger=1):
    engine = make_engine(model, config)
    reference = H2OReference(model)
    outputs, seen = run(engine, requests, stagger)
    for (prompt, params), whole, snapshots in zip(requests, outputs, seen, strict=True):
        output = whole.outputs[0]
        if params.h2o is None or params.h2o.budget >= len(prompt) + params.max_tokens:  # nothing is forgotten
            assert output.token_ids == naive.run(prompt, params)[0]
        if params.h2o is None:
            continue
        scores, kept = reference.run(prompt, output.token_ids[:-1], params.h2o)
        assert output.token_ids == scores.argmax(1).tolist()
        for token, entry, row in zip(output.token_ids, output.logprobs, scores, strict=True):
            assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
        assert snapshots
        for count, several in snapshots.items():
            assert all(snapshot == kept[count - 1] for snapshot in several), (params.h2o, count)
    forgetful = [output.metrics for output, (_, params) in zip(outputs, requests, strict=True) if params.h2o]
    return engine.stats(), sum(metrics.num_preemptions for metrics in forgetful)


def mixture(rng):
    """Budgets of every kind: less and more than the prompt, and more than prompt and output."""
    lengths = (5, 40, 18, 30, 9, 50, 12)
    budgets = (H2O(4, 8), None, H2O(5, 6), H2O(0, 6), H2O(11, 9), H2O(7, 1), H2O(20, 20))
    return [(p, greedy(h2o, 22, logprobs=0)) for p, h2o in zip(prompts(rng, *lengths), budgets, strict=True)]


def test_keeps_what_the_reference_keeps_in_chunks_in_batches_and_after_preemption(model, naive, rng):
    first, *others = mixture(rng)
    first = (first[0], greedy(H2O(4, 8), LIMIT - 5, logprobs=0))  # all the time there is a row with H2O
    stats, num_preemptions = check_equal(model, naive, TIGHT, [first, *others])
    assert num_preemptions > 0
    assert stats.compile.num_compiled == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CONFIGS)
def test_keeps_what_the_reference_keeps_in_every_configuration(name, model, naive, rng):
    requests = [*mixture(rng), *mixture(rng)]
    check_equal(model, naive, ROOMY | SLOW_CONFIGS[name], requests, stagger=3)  # TIGHT, above, is for preemption


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8", "bfloat16,int8"])
def test_a_quantized_cache_moves_as_it_is_stored(kv_dtype, model, rng):
    """One request at a time in one piece, against all in chunks with preemption."""
    requests = [(prompt, params) for prompt, params in mixture(rng) if params.h2o]
    tight = make_engine(model, TIGHT | {"kv_dtype": kv_dtype})
    alone = make_engine(model, ROOMY | {"kv_dtype": kv_dtype, "max_num_seqs": 1, "max_num_batched_tokens": LIMIT})
    (first, _), (second, _) = run(tight, requests), run(alone, requests, stagger=100)
    assert [x.outputs[0].token_ids for x in first] == [x.outputs[0].token_ids for x in second]


def test_each_of_n_computes_its_prompt_and_nobody_shares(model):
    engine = Engine(model, EngineConfig(**ROOMY))
    prompt = list(range(3, 30))
    engine.add_request("a", prompt, greedy(H2O(4, 4), n=3))
    group = [sequence.request for sequence in engine._groups["a"]]
    assert [request.source for request in group] == [None] * 3
    engine.scheduler.schedule()
    assert engine.scheduler.pool.num_shared == 0
    with pytest.raises(ValueError, match="neither be forked nor be a fork"):
        engine.fork("a", "b")
    engine.add_request("c", prompt, greedy())
    with pytest.raises(ValueError, match="neither be forked nor be a fork"):
        engine.fork("c", "d", greedy(H2O(4, 4)))


def test_what_can_not_work_is_refused(model):
    with pytest.raises(ValueError, match="start the engine with h2o=True"):
        Engine(model, EngineConfig(**ROOMY | {"h2o": False})).add_request("a", [3], greedy(H2O(4, 4)))
    with pytest.raises(ValueError, match="h2o moves single tokens, which kv_dtype='int4' packs a page at a time"):
        EngineConfig(h2o=True, kv_dtype="int4", page_size=64)
    windows = dataclasses.replace(model.config, layer_windows=(8, None))
    spec = dataclasses.replace(model.spec, config=windows)
    with pytest.raises(ValueError, match="h2o needs layers that see all keys"):
        Engine(dataclasses.replace(model, spec=spec), EngineConfig(**ROOMY))


def test_pages_are_given_back_when_the_prompt_is_done(model):
    engine = make_engine(model, TIGHT)
    engine.add_request("a", list(range(3, 53)), greedy(H2O(5, 6), 4))
    held = []
    while engine.has_work:
        engine.step()
        held += [len(request.pages) for request in engine.scheduler.running]
    assert (max(held), held[-1]) == (13, 3)
    assert engine.stats().num_cached_pages == 0  # none of them can be found
    bytes_a_place = 2 * model.config.num_kv_heads * (2 * model.config.head_dim * 4 + 8)
    assert engine.stats().kv_bytes_per_token == bytes_a_place


@pytest.mark.slow
def test_warmup_compiles_every_step_and_compaction(model):
    config = ROOMY | {"max_num_seqs": 1, "max_model_len": 20, "page_size": 4}
    engine = make_engine(model, config)
    engine.warmup()
    compactions = engine.runner._key_logs._compact_layer._cache_size()
    for i, length in enumerate((3, 9, 14, 17)):
        engine.add_request(str(i), list(range(3, 3 + length)), greedy(H2O(1, 1), 3))
    while engine.has_work:
        engine.step()
    assert engine.stats().compile.num_after_warmup == 0
    assert engine.runner._key_logs._compact_layer._cache_size() == compactions
