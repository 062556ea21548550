"""Tables of benchmark results."""

from collections.abc import Mapping

COLUMNS = (  # heading, figure, factor
    ("total s", "total_s", 1),
    ("TTFT p50 ms", "ttft_p50_s", 1e3),
    ("TTFT p99 ms", "ttft_p99_s", 1e3),
    ("TPOT p50 ms", "tpot_p50_s", 1e3),
    ("ITL p99 ms", "itl_p99_s", 1e3),
    ("prompt tok/s", "prompt_tok_s", 1),
    ("decode tok/s", "decode_tok_s", 1),
    ("output tok/s", "output_tok_s", 1),
    ("spread %", "spread", 1e2),
)


def markdown_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Returns results by name as a Markdown table; figures that a run does not have are left blank."""

    def cell(figures: Mapping[str, float], name: str, factor: float) -> str:
        return f"{figures[name] * factor:,.1f}" if name in figures else ""

    lines = ["| | " + " | ".join(heading for heading, _, _ in COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name, figures in results.items():
        lines.append(f"| {name} | " + " | ".join(cell(figures, key, factor) for _, key, factor in COLUMNS) + " |")
    return "\n".join(lines)


def ratio_table(ours: Mapping[str, Mapping[str, float]], peer: Mapping[str, Mapping[str, float]]) -> str:
    """Returns, for the workloads that both have, how many times faster we are (above 1: faster)."""
    faster_if_less = {"ttft_p50_s": "TTFT", "tpot_p50_s": "TPOT", "total_s": "total"}
    lines = ["| | " + " | ".join(faster_if_less.values()) + " |", "|---|" + "---|" * len(faster_if_less)]
    for name in [name for name in ours if name in peer]:
        cells = [
            f"{peer[name][k] / ours[name][k]:.2f}x" if k in peer[name] and k in ours[name] else ""
            for k in faster_if_less
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
