"""Latency metrics from the times at which tokens arrived. Imports no jax."""

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass
class Trace:
    """What was seen of one request; times in seconds of one clock.

    `tokens` holds the arrival time of every output token; tokens that arrive together have the same time.
    """

    arrival: float
    num_prompt_tokens: int
    tokens: list[float] = dataclasses.field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        count = len(self.tokens) - 1
        return (self.tokens[-1] - self.tokens[0]) / count if count else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: every gap between two tokens."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:])]

    @property
    def e2e(self) -> float:
        """End-to-end latency."""
        return self.tokens[-1] - self.arrival


def percentile(values: Sequence[float], q: float) -> float:
    """Returns the q-th percentile (0 to 100) by linear interpolation between the nearest ranks."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarize(traces: Sequence[Trace]) -> dict[str, float]:
    """Returns the figures of a run, in seconds and tokens per second.

    `total_s` goes from the first arrival to the last token and `output_tok_s` is taken over it. `prompt_tok_s` ends
    when the last request has its first token (other requests may decode meanwhile), `decode_tok_s` begins there; it
    is missing when nothing was decoded alone. `ttft`, `tpot`, `itl` and `e2e` have `_p50_s`, `_p90_s` and `_p99_s`:
    percentiles over requests, of `itl` over all gaps.
    """
    start, end = min(t.arrival for t in traces), max(t.tokens[-1] for t in traces)
    first = last_first_token(traces)
    tail = sum(len(tail_tokens(t, first)) for t in traces)
    summary = {
        "requests": len(traces),
        "prompt_tokens": sum(t.num_prompt_tokens for t in traces),
        "output_tokens": sum(len(t.tokens) for t in traces),
        "total_s": end - start,
        "output_tok_s": sum(len(t.tokens) for t in traces) / (end - start),
        "prompt_tok_s": sum(t.num_prompt_tokens for t in traces) / (first - start),
    }
    if end > first:
        summary["decode_tok_s"] = tail / (end - first)
    columns = {
        "ttft": [t.ttft for t in traces],
        "tpot": [t.tpot for t in traces if t.tpot is not None],
        "itl": [gap for t in traces for gap in t.itl],
        "e2e": [t.e2e for t in traces],
    }
    for name, values in columns.items():
        if values:
            summary |= {f"{name}_p{q}_s": percentile(values, q) for q in (50, 90, 99)}
    return summary


def last_first_token(traces: Sequence[Trace]) -> float:
    """Returns when the last request got its first token: from then on nothing but decoding."""
    return max(trace.tokens[0] for trace in traces)


def tail_tokens(trace: Trace, after: float) -> range:
    """Returns the indices of the output tokens that arrived later than `after`."""
    return range(sum(time <= after for time in trace.tokens), len(trace.tokens))


def over_runs(runs: Sequence[Sequence[Trace]]) -> dict[str, float]:
    """Returns the figures of repeated runs of a workload.

    Single streams are pooled: percentiles are over all runs. Of several requests each run has percentiles of its
    own, and their medians are taken. Totals and rates are medians. `spread` is (max - min) / median of the total.
    """
    summaries = [summarize(run) for run in runs]
    result = {name: statistics.median(run[name] for run in summaries) for name in summaries[0]}
    if all(len(run) == 1 for run in runs):
        pooled = summarize([trace for run in runs for trace in run])
        result |= {name: value for name, value in pooled.items() if "_p" in name}
    totals = [run["total_s"] for run in summaries]
    return result | {"spread": (max(totals) - min(totals)) / result["total_s"]}
