"""Perplexity and memory along a long text: StreamingLLM, a window without sinks, and attention to everything.

python scripts/streaming.py measure docs/streaming.csv --mode sinks --mode window
python scripts/streaming.py measure docs/streaming.csv --mode dense --tokens 16384
python scripts/streaming.py plot docs/streaming.csv docs/streaming.png       (needs matplotlib: pip install ".[plots]")

Every mode is one request over the engine's own steps. Each row of the CSV is a block of the text: the mean loss of its
tokens, and the KV pages that the text up to there needs: those that the request holds, or fewer, since it holds pages
for the rest of a prompt, or of a window, from the start. Rows of modes that are measured again are replaced.
"""

import argparse
import csv
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

BLOCK = 1024  # tokens of a row
MODES = {
    "sinks": ("4 sinks + 1,020 recent", {"attention_sinks": 4, "attention_window": 1020}),
    "window": ("1,024 recent", {"attention_window": 1024}),
    "dense": ("all", {}),
}
FIELDS: tuple[str, ...] = ("mode", "end", "loss", "perplexity", "pages", "kv_mib")


def measure(mode: str, num_tokens: int, model_name: str) -> Iterator[dict[str, str]]:
    """Yields the rows of a mode as they are known."""
    from jaxinfer import LLM, SamplingParams, load
    from jaxinfer.cli.bench.accuracy import find_text

    model = load(model_name)
    tokens = model.tokenizer.encode(find_text().read_text(encoding="utf-8"))
    if len(tokens) < num_tokens:
        raise SystemExit(f"the text has {len(tokens):,} tokens, {num_tokens:,} are wanted")
    config = dataclasses.replace(
        model.config, max_position_embeddings=max(model.config.max_position_embeddings, num_tokens + 1)
    )
    if mode == "dense":  # beyond what the model was trained on, which the engine would refuse
        model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, config=config))
    llm = LLM(model, max_num_seqs=1, max_model_len=num_tokens + 1, prefix_cache=False, **MODES[mode][1])
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    engine.add_request("text", tokens[:num_tokens], params)
    [request] = engine.scheduler.waiting
    held, done, page_size = 0, 0, engine.config.page_size
    while engine.has_work:
        engine.step()
        held = engine.stats().num_used_pages or held
        while len(request.prompt_logprobs) >= done + BLOCK:
            scored = [
                entry[token].logprob
                for entry, token in zip(request.prompt_logprobs[done : done + BLOCK], tokens[done:])
                if entry is not None  # the first token of all is given
            ]
            loss, done = -sum(scored) / len(scored), done + BLOCK
            pages = min(held, -(-done // page_size))
            kv = pages * page_size * engine.stats().kv_bytes_per_token / 2**20
            yield dict(zip(FIELDS, (mode, str(done), f"{loss:.4f}", f"{math.exp(loss):.3f}", str(pages), f"{kv:.1f}")))


def read(path: Path) -> list[dict[str, str]]:
    """Returns the rows of the CSV, none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Writes the CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Draws loss and memory along the text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained")
    for mode, (label, _) in MODES.items():
        mine = [row for row in rows if row["mode"] == mode]
        ends = [int(row["end"]) for row in mine]
        above.plot(ends, [float(row["perplexity"]) for row in mine], label=label, marker=".")
        below.plot(ends, [float(row["kv_mib"]) for row in mine], marker=".")
    above.axvline(8192, color="gray", linestyle=":", linewidth=1)
    above.text(8192, above.get_ylim()[1], " trained length", va="top", color="gray", fontsize=8)
    above.set(yscale="log", ylabel=f"perplexity of {BLOCK:,} tokens")
    above.legend(title="keys that a token sees")
    below.set(xlabel="tokens of text", ylabel="KV cache, MiB", ylim=(0, None))
    figure.savefig(path, dpi=100)


def main() -> None:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("csv", type=Path)
    measuring.add_argument("--mode", action="append", required=True, choices=MODES)
    measuring.add_argument("--tokens", type=int, default=40960)
    measuring.add_argument("--model", default="smollm2-135m")
    drawing = commands.add_parser("plot")
    drawing.add_argument("csv", type=Path)
    drawing.add_argument("png", type=Path)
    options = parser.parse_args()
    if options.command == "plot":
        return plot(read(options.csv), options.png)
    for mode in options.mode:
        mine: list[dict[str, str]] = []
        for row in measure(mode, options.tokens, options.model):
            print(*row.values(), sep="\t", flush=True)
            mine.append(row)
        write(options.csv, sorted([row for row in read(options.csv) if row["mode"] != mode] + mine, key=order))
    return None


def order(row: dict[str, str]) -> tuple[int, int]:
    """Returns what rows are sorted by."""
    return list(MODES).index(row["mode"]), int(row["end"])


if __name__ == "__main__":
    main()
