"""`jaxinfer info`: what a model is, without loading it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jaxinfer.cli.compile_check import TARGETS
from jaxinfer.cli.options import find_model
from jaxinfer.cli.sizes import parse_size
from jaxinfer.kv_spec import KVSpec

if TYPE_CHECKING:
    from jaxinfer.config import RopeScaling
    from jaxinfer.description import Description


@click.command()
@click.argument("model", required=False)
@click.option("--memory", help="Show how many tokens fit in so much memory beside the weights, such as 24GB.")
@click.option("--kv", "kv_dtype", help="Precision of keys and values to count with; by default that of the weights.")
@click.option("--kernels", is_flag=True, help="Show which kernels run on this machine, and why the others do not.")
@click.option("--target", type=click.Choice(TARGETS), help="With --kernels: for this device instead of this machine's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(
    model: str | None, memory: str | None, kv_dtype: str | None, kernels: bool, target: str | None, as_json: bool
) -> None:
    """Show shape, precision, context and memory of MODEL, or with --kernels what runs on this machine."""
    if target is not None and not kernels:
        raise click.UsageError("--target says for which device --kernels answers; give both")
    if memory is not None and model is None:
        raise click.UsageError("--memory is counted beside a model's weights; give a MODEL")
    if kv_dtype is not None and model is None:
        raise click.UsageError("--kv is counted for a model's cache; give a MODEL")
    if model is None and not kernels:
        raise click.UsageError("give a MODEL, or --kernels")
    if model is not None and kernels and as_json:
        raise click.UsageError("--json prints one thing: the MODEL or --kernels")
    if model is not None:
        budget = None if memory is None else parse_size(memory)
        path = find_model(model)
        from jaxinfer.description import describe

        rows = _rows(describe(path), kv_dtype or "auto", budget)
        if as_json:
            click.echo(json.dumps(dict(rows), indent=2))
        else:
            for name, value in rows:
                click.echo(f"{name:20}{value}")
    if kernels:
        from jaxinfer.cli.kernels import show_kernels

        show_kernels(target, as_json)


def _rows(d: "Description", kv_dtype: str, budget: int | None) -> list[tuple[str, str]]:
    c = d.config
    kvs = {bits: KVSpec.parse(kv_dtype, dtype) for bits, dtype in ((16, "bfloat16"), (32, "float32"))}  # by weights
    windows = {window for window in c.layer_windows if window is not None}
    windowed = sum(window is not None for window in c.layer_windows)
    rows = [
        ("path", str(d.path)),
        ("format", d.format),
        ("family", c.family),
        ("parameters", f"{c.num_parameters:,}"),
        ("stored as", ", ".join(f"{count} x {kind}" for kind, count in d.stored_types.items())),
        ("size on disk", _size(d.num_bytes)),
        ("layers", str(c.num_layers)),
        ("hidden, MLP", f"{c.hidden_size}, {c.intermediate_size}"),
        ("heads, KV heads", f"{c.num_heads}, {c.num_kv_heads} of size {c.head_dim}"),
        ("vocabulary", f"{c.vocab_size:,} ({'tied' if c.tie_word_embeddings else 'untied'} head)"),
        ("context", f"{c.max_position_embeddings:,} tokens"),
        ("RoPE", f"theta {c.rope_theta:g}, scaling {_scaling(c.rope_scaling)}"),
        (
            "sliding window",
            f"{', '.join(map(str, sorted(windows)))} tokens in {windowed} layers" if windows else "none",
        ),
        ("tokenizer", _tokenizer_kind(d.path)),
        ("chat template", "yes" if d.has_chat_template else "no"),
        ("ends with", ", ".join(d.eos_tokens) or "nothing"),
        (
            "KV cache",
            ", ".join(f"{_size(kv.bytes_per_token(c))} a token in {kv}" for kv in dict.fromkeys(kvs.values())),
        ),
    ]
    if budget is not None:
        for bits, kv in kvs.items():
            itemsize = bits // 8
            tokens = (budget - c.num_parameters * itemsize) // kv.bytes_per_token(c)
            text = (
                f"{tokens:,} tokens" if tokens > 0 else f"the weights alone take {_size(c.num_parameters * itemsize)}"
            )
            rows.append((f"fits in {bits} bits", text))
    return rows


def _scaling(scaling: "RopeScaling | None") -> str:
    if scaling is None:
        return "none"
    if scaling.kind == "factors":
        return f"{len(scaling.factors)} factors up to {max(scaling.factors):g}"
    original = scaling.original_max_position_embeddings
    return f"{scaling.kind} x {scaling.factor:g}" + (f" of {original:,} tokens" if original else "")


def _tokenizer_kind(path: Path) -> str:
    if path.is_file():
        from checkpoints.gguf_io import GGUFFile

        with GGUFFile(path) as file:
            kind, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        return f"{kind}, pre-tokenizer {pre}" if pre else str(kind)
    stored = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    return str(stored["model"].get("type", "unknown"))


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
