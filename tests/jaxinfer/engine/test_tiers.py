"""Pages that go to host memory and to disk, and come back: the engine says what it says without them."""

import asyncio
import logging
import os

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.async_engine import AsyncEngine
from jaxinfer.engine.engine import Engine
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.conftest import MAX_LEN

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(3, 320, 40).tolist() for _ in range(4)]
ENOUGH = 1 << 24


def make_engine(model, **options):
    defaults = {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": MAX_LEN, "page_size": 4, "seed": 1,
        "num_pages": 1 + MAX_LEN // 4, "host_cache_bytes": ENOUGH,
    }  # fmt: skip
    return Engine(model, EngineConfig(**defaults | options))


def serve(engine, prompts, params=GREEDY):
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while not all(engine.is_finished(str(i)) for i in range(len(prompts))):
        engine.step()
        engine.scheduler.check_integrity()
        if engine.scheduler.tier is not None:
            engine.scheduler.tier.check_integrity()
    outputs = [engine.pop_output(str(i)) for i in range(len(prompts))]
    return [output.outputs[0].token_ids for output in outputs]


def serve_in_turn(engine, prompts):
    return [serve(engine, [prompt])[0] for prompt in prompts]


def test_conversations_larger_than_the_pool_come_back(model, naive):
    engine = make_engine(model)
    wanted = [naive.run(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert serve_in_turn(engine, PROMPTS) == wanted
    computed = engine.stats().num_prefill_tokens
    assert engine.stats().tiers.num_pages_out > 0
    second = [[*prompt, *output, 5] for prompt, output in zip(PROMPTS, wanted)]
    assert serve_in_turn(engine, second) == [naive.run(prompt, GREEDY)[0] for prompt in second]
    stats = engine.stats()
    found = [12 * 4] * 4  # 12 pages of 51 computed tokens, in the pool or in host memory
    assert stats.num_prefill_tokens - computed == sum(len(p) for p in second) - sum(found)
    assert stats.tiers.num_host_hits == stats.tiers.num_pages_in >= 3 * 12


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "page_size"), [("int8", 4), ("int4", 32)])
def test_quantized_pages_come_back_as_they_were(model, kv_dtype, page_size):
    engine = make_engine(model, kv_dtype=kv_dtype, page_size=page_size, num_pages=1 + MAX_LEN // page_size)
    first = serve_in_turn(engine, PROMPTS)
    second = [[*prompt, *output, 5] for prompt, output in zip(PROMPTS, first)]
    found = serve_in_turn(engine, second)
    assert engine.stats().tiers.num_host_hits > 0
    anew = []
    for prompt in second:
        engine.reset_prefix_cache()
        anew += serve(engine, [prompt])
    assert found == anew


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_requests_get_their_pages_back(model, naive, preemption):
    engine = make_engine(model, preemption=preemption)
    assert serve(engine, PROMPTS, LONG) == [naive.run(prompt, LONG)[0] for prompt in PROMPTS]
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.tiers.num_pages_in > 0) == (preemption == "swap")


def test_auto_takes_what_is_cheaper(model):
    engine = make_engine(model)
    cost = engine.scheduler.cost
    assert cost.bytes_per_s > 0
    serve(engine, PROMPTS[:1])
    assert cost.tokens_per_s > 0
    cost.record_step = lambda *_: None
    for cost.bytes_per_s, cost.tokens_per_s, swaps in ((1.0, 1e9, False), (1e12, 1.0, True)):
        engine.reset_prefix_cache()
        before = engine.stats().tiers.num_pages_in
        serve(engine, PROMPTS, LONG)
        assert (engine.stats().tiers.num_pages_in > before) == swaps


def test_a_new_process_finds_the_pages_on_disk_that_are_whole(model, naive, tmp_path):
    engine = make_engine(model, disk_cache_dir=str(tmp_path), host_cache_bytes=8 * 2048 + 200)
    wanted = [naive.run(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert serve_in_turn(engine, PROMPTS) == wanted
    engine.close()
    assert engine.stats().tiers.num_disk_pages == 4 * 12
    (tmp_path / "0000000000000000-of-another-model.kvpage").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("not ours")
    second = make_engine(model, disk_cache_dir=str(tmp_path), host_cache_bytes=8 * 2048 + 200)
    assert serve_in_turn(second, PROMPTS) == wanted
    stats = second.stats()
    assert stats.tiers.num_skipped_files == 1
    assert stats.tiers.num_disk_hits == 4 * 9  # of 40 tokens, the last is computed
    assert stats.num_prefill_tokens == 4 * 4
    for i, path in enumerate(sorted(tmp_path.glob("*.kvpage"))):
        damage(path, i)
    third = make_engine(model, disk_cache_dir=str(tmp_path))
    assert serve(third, PROMPTS) == wanted
    stats = third.stats()
    assert stats.tiers.num_disk_hits == 0
    assert stats.tiers.num_skipped_files > 4
    assert (tmp_path / "notes.txt").exists()


def damage(path, kind):
    content = path.read_bytes()
    damaged = (content[: len(content) // 2], b"", content[:-1] + bytes([content[-1] ^ 1]), content + b"x", b"y" * 5000)
    path.write_bytes(damaged[kind % len(damaged)])


def test_requests_go_on_when_the_disk_is_full(model, naive, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    engine = make_engine(model, disk_cache_dir=str(tmp_path), host_cache_bytes=2 * 2048 + 200)
    with caplog.at_level(logging.WARNING):
        assert serve_in_turn(engine, PROMPTS) == [naive.run(prompt, GREEDY)[0] for prompt in PROMPTS]
        engine.close()
    assert [record.message for record in caplog.records if "No space left" in record.message] == [
        f"KV pages are no longer written to {tmp_path}: [Errno 28] No space left on device"
    ]
    assert list(tmp_path.iterdir()) == []


def test_tiers_that_hold_no_page_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="host_cache_bytes=100 holds no page, which takes"):
        make_engine(model, host_cache_bytes=100)
    with pytest.raises(ValueError, match="disk_cache_bytes=100 holds no page, which takes"):
        make_engine(model, disk_cache_dir=str(tmp_path), disk_cache_bytes=100)


def test_the_end_of_a_served_engine_keeps_its_pages(model, tmp_path):
    engine = make_engine(model, disk_cache_dir=str(tmp_path))

    async def main():
        async with AsyncEngine(engine) as served:
            return [chunk async for chunk in served.generate(PROMPTS[0], GREEDY)]

    asyncio.run(main())
    assert len(list(tmp_path.glob("*.kvpage"))) == 12
