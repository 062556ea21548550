import pytest

from jaxinfer.bench.metrics import Trace, over_runs, percentile, summarize


def test_latencies_of_one_request():
    trace = Trace(arrival=10.0, num_prompt_tokens=4, tokens=[10.5, 10.7, 10.7, 11.3])
    assert trace.ttft == pytest.approx(0.5)
    assert trace.tpot == pytest.approx(0.8 / 3)
    assert trace.itl == pytest.approx([0.2, 0.0, 0.6])
    assert trace.e2e == pytest.approx(1.3)


def test_a_single_token_has_no_time_per_output_token():
    trace = Trace(0.0, 4, [0.5])
    assert trace.tpot is None
    assert trace.itl == []
    summary = summarize([trace])
    assert summary["ttft_p50_s"] == 0.5
    assert not any(name.startswith(("tpot", "itl", "decode")) for name in summary)


@pytest.mark.parametrize(("q", "want"), [(0, 1.0), (50, 2.5), (99, 3.97), (100, 4.0)])
def test_percentile_interpolates_between_ranks(q, want):
    assert percentile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(want)


def test_summary_of_two_requests():
    # The second has its first token at 2.0: from there on 3 tokens in 2 s are decoding alone.
    traces = [Trace(0.0, 10, [1.0, 2.0, 3.0, 4.0]), Trace(0.5, 30, [2.0, 4.0])]
    summary = summarize(traces)
    assert summary["total_s"] == 4.0
    assert summary["output_tok_s"] == 6 / 4
    assert summary["prompt_tok_s"] == 40 / 2
    assert summary["decode_tok_s"] == 3 / 2
    assert summary["ttft_p50_s"] == pytest.approx((1.0 + 1.5) / 2)
    assert summary["tpot_p50_s"] == pytest.approx((1.0 + 2.0) / 2)
    assert summary["itl_p50_s"] == pytest.approx(1.0)  # over the gaps 1, 1, 1 and 2
    assert summary["itl_p99_s"] == pytest.approx(1.97)
    assert summary["e2e_p99_s"] == pytest.approx(3.5 + 0.5 * 0.99)
    assert (summary["requests"], summary["prompt_tokens"], summary["output_tokens"]) == (2, 40, 6)


def one_token_traces(*ttfts):
    return [Trace(0.0, 4, [ttft]) for ttft in ttfts]


def test_percentiles_of_single_streams_are_over_all_runs():
    figures = over_runs([one_token_traces(1.0), one_token_traces(2.0), one_token_traces(4.0)])
    assert (figures["ttft_p50_s"], figures["total_s"], figures["spread"]) == (2.0, 2.0, 1.5)
    assert figures["ttft_p90_s"] == pytest.approx(3.6)


def test_percentiles_of_many_requests_are_medians_over_runs():
    figures = over_runs([one_token_traces(1.0, 1.0), one_token_traces(2.0, 2.0), one_token_traces(3.0, 9.0)])
    assert (figures["ttft_p99_s"], figures["requests"]) == (2.0, 2)
