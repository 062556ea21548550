"""Our engine on the tiny model against a peer that is no engine."""

import os
import sys
from pathlib import Path

import pytest

from jaxinfer.bench.contestants import RUNNERS, Ours, open_process, task_for
from jaxinfer.bench.cost import forward_flops, kv_read_bytes
from jaxinfer.bench.metrics import Trace, summarize
from jaxinfer.bench.phases import phases, streamed_bytes
from jaxinfer.bench.race import race, ratios
from jaxinfer.bench.roofline import Roofline, measure_roofline
from jaxinfer.bench.workloads import BenchRequest

REQUESTS = [BenchRequest([5, 6, 7], 6), BenchRequest([8, 9, 10, 11], 3)]
FAKE = Path(__file__).with_name("fake_peer.py")


@pytest.fixture
def open_fake(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(RUNNERS))

    def open_fake(model="m"):
        command = [sys.executable, str(FAKE)]
        return open_process("fake", command, task_for(Path(model), [REQUESTS], 64, 1))

    return open_fake


def test_engines_run_in_turn_after_a_warm_up(llm, open_fake):
    seen = []
    with open_fake() as peer:
        assert peer.facts["rows"] == 2
        runs = race([Ours("ours", llm), peer], "W3", REQUESTS, 2, lambda i, who, traces: seen.append((i, who)))
        assert peer.facts["peak_memory_mib"] > 1
    assert seen == [(1, "ours"), (1, "fake"), (2, "ours"), (2, "fake")]
    for repeats in runs.values():
        for traces in repeats:
            assert [(trace.num_prompt_tokens, len(trace.tokens)) for trace in traces] == [(3, 6), (4, 3)]
            assert all(trace.arrival < trace.tokens[0] and trace.tokens == sorted(trace.tokens) for trace in traces)
    assert not llm.engine.has_work


def test_a_peer_that_fails_is_quoted(open_fake):
    with pytest.raises(RuntimeError, match=r"(?s)fake failed with code 1; .*\n  no such file\n  the model is broken$"):
        open_fake("broken").__enter__()
    missing = open_process("fake", [os.devnull + "/python"], {})
    with pytest.raises(RuntimeError, match=r"fake: cannot run .*; give its interpreter"):
        missing.__enter__()


def test_tokens_that_do_not_come_are_an_error(llm, open_fake):
    with open_fake("short") as peer, pytest.raises(RuntimeError, match="W3: fake gave 5 tokens of request 0, wanted 6"):
        race([peer], "W3", REQUESTS, 1)
    with pytest.raises(RuntimeError, match="W1: ours gave 6 tokens of request 0, wanted 50"):
        race([Ours("ours", llm)], "W1", [BenchRequest([5] * 90, 50)], 1)  # 96 is the longest request


def test_compiling_in_a_timed_run_is_an_error(llm, monkeypatch):
    stats, ours = llm.engine.runner.stats, Ours("ours", llm)
    monkeypatch.setattr(stats, "num_compiled", stats.num_compiled)  # put back afterwards
    run = ours.run

    def compiling(requests):
        stats.num_compiled += 1
        return run(requests)

    monkeypatch.setattr(ours, "run", compiling)
    with pytest.raises(RuntimeError, match="W1: ours compiled a step in a timed run"):
        race([ours], "W1", REQUESTS[:1], 1)


def test_repeats_below_one_are_refused():
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        race([], "W1", REQUESTS, 0)


def test_ratios_are_above_one_where_we_are_faster_and_different_work_is_refused():
    ours, peer = summarize([Trace(0.0, 8, [0.5, 1.0])]), summarize([Trace(0.0, 8, [1.0, 1.25])])
    assert ratios(ours, peer) == {
        "TTFT": 2.0, "TPOT": 0.5, "total": 1.25, "prompt tok/s": 2.0, "decode tok/s": 0.5, "output tok/s": 1.25,
    }  # fmt: skip
    with pytest.raises(ValueError, match="different work cannot be compared: ours has 8 prompt_tokens, the peer 9"):
        ratios(ours, summarize([Trace(0.0, 9, [1.0, 1.25])]))


def test_a_single_stream_has_two_phases(llm):
    found = phases(llm.engine, [Trace(0.0, 40, [2.0, 3.0])])  # prefilled in chunks of 32
    config, weights = llm.model.config, streamed_bytes(llm.model)
    prefill, decode = found["prefill"], found["decode"]
    assert (prefill.tokens, prefill.seconds, prefill.flops) == (40, 2.0, forward_flops(config, 0, 40, 1))
    assert prefill.bytes == 2 * weights + kv_read_bytes(config, 32, 4) + kv_read_bytes(config, 40, 4)
    assert (decode.tokens, decode.flops) == (1, forward_flops(config, 40, 41, 1))
    figures = prefill.figures(Roofline(prefill.flops, 1e18))
    assert figures["flop_share"] == figures["roofline_share"] == pytest.approx(0.5)
    assert figures["tok_s"] == 20


def test_decoding_is_counted_after_the_last_first_token(llm):
    # After 2.0: two tokens of the first request, made from 3 + 2 and 3 + 3 tokens, and one of the second.
    found = phases(llm.engine, [Trace(0.0, 3, [1.0, 2.0, 3.0, 4.0]), Trace(0.0, 8, [2.0, 3.0])])
    config, lengths = llm.model.config, [5, 6, 9]
    assert list(found) == ["decode"]
    assert (found["decode"].tokens, found["decode"].seconds) == (3, 2.0)
    assert found["decode"].flops == sum(forward_flops(config, n - 1, n, 1) for n in lengths)
    assert found["decode"].bytes == 2 * streamed_bytes(llm.model) + sum(kv_read_bytes(config, n, 4) for n in lengths)
    assert phases(llm.engine, [Trace(0.0, 3, [1.0]), Trace(0.0, 3, [2.0])]) == {}


def test_roofline_is_the_slower_of_arithmetic_and_memory():
    assert Roofline(10.0, 100.0).seconds(50, 100) == 5.0
    assert Roofline(10.0, 100.0).seconds(5, 400) == 4.0
    assert Roofline(1.0, 4.0).best(Roofline(3.0, 2.0)) == Roofline(3.0, 4.0)
    measured = measure_roofline(size=64, read_mib=1, repeats=1)
    assert measured.flop_s > 0
    assert measured.byte_s > 0
