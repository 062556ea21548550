"""Pages that go to host memory and to disk, and come back: the engine says what it says without them."""

import logging
import os

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
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
