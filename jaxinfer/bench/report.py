"""Tables of benchmark results, in Markdown."""

from collections.abc import Mapping, Sequence

COLUMNS = (  # heading, figure, factor
    ("total s", "total_s", 1),
    ("TTFT ms", "ttft_p50_s", 1e3),
    ("p90", "ttft_p90_s", 1e3),
    ("p99", "ttft_p99_s", 1e3),
    ("TPOT ms", "tpot_p50_s", 1e3),
    ("p90", "tpot_p90_s", 1e3),
    ("p99", "tpot_p99_s", 1e3),
    ("prompt tok/s", "prompt_tok_s", 1),
    ("decode tok/s", "decode_tok_s", 1),
    ("output tok/s", "output_tok_s", 1),
    ("spread %", "spread", 1e2),
)
PHASE_COLUMNS = (
    ("tok/s", "tok_s", 1),
    ("MFLOP/token", "token_flops", 1e-6),
    ("MB/token", "token_bytes", 1e-6),
    ("of FLOP/s %", "flop_share", 1e2),
    ("of bytes/s %", "byte_share", 1e2),
    ("of roofline %", "roofline_share", 1e2),
)
RATIO_COLUMNS = tuple(
    (name, name, 1) for name in ("TTFT", "TPOT", "prompt tok/s", "decode tok/s", "output tok/s", "total")
)
STARTUP_COLUMNS = (
    ("start to first token s", "first_token_s", 1),
    ("loaded s", "loaded_s", 1),
    ("peak memory MiB", "peak_memory_mib", 1),
)


def table(
    rows: Mapping[str, Mapping[str, float]], columns: Sequence[tuple[str, str, float]] = COLUMNS, digits: int = 1
) -> str:
    """Returns rows by name; figures that a row does not have are left blank, and columns that no row has left out."""
    columns = [column for column in columns if any(column[1] in row for row in rows.values())]
    lines = ["| | " + " | ".join(heading for heading, _, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in rows.items():
        cells = (f"{row[key] * factor:,.{digits}f}" if key in row else "" for _, key, factor in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
