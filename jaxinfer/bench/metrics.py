"""Latency metrics from the times at which tokens arrived."""

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
    """Returns totals and percentiles of a run, in seconds and tokens per second."""
    start, end = min(t.arrival for t in traces), max(t.tokens[-1] for t in traces)
    first = max(t.tokens[0] for t in traces)  # from here on nothing but decoding
    tail = sum(sum(time > first for time in t.tokens) for t in traces)
    summary = {
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
            summary |= {f"{name}_p50_s": percentile(values, 50), f"{name}_p99_s": percentile(values, 99)}
    return summary


def median_of(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median of every figure over repeated runs, and the spread (max - min) / median of the total."""
    result = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    totals = [run["total_s"] for run in runs]
    return result | {"spread": (max(totals) - min(totals)) / result["total_s"]}
