"""`jaxinfer compile-check`: the engine's steps compiled for a device that is not there."""

import json
from typing import TYPE_CHECKING

import click

from jaxinfer.cli.options import find_config

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig

TARGETS = ("h200", "h100", "b200", "a100", "v5e", "v6e", "v5p")


@click.command("compile-check")
@click.option("--target", required=True, type=click.Choice(TARGETS), help="The device.")
@click.option("-m", "--model", required=True, help="What `info` takes, or a shape without weights such as llama-3-8b.")
@click.option("--mesh", default="", help="Devices that share each matrix, such as model=8.")
@click.option("--max-num-seqs", default=64, show_default=True, help="Rows of the decode step.")
@click.option("--max-tokens", default=512, show_default=True, help="Tokens of the prefill step.")
@click.option("--max-model-len", type=int, help="Longest request; by default the model's limit, at most 8192.")
@click.option("--context", type=int, help="Keys of each row in the decode roofline; by default half of the longest.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--kv", "kv_dtype", default="auto", show_default=True, help="Precision of keys and values, as for `run`.")
@click.option("--page-size", default=16, show_default=True, help="Tokens of a KV page.")
@click.option("--num-pages", type=int, help="KV pages; by default what fits beside the weights.")
@click.option("--decode-steps", default=4, show_default=True, help="Most decode steps of one dispatch.")
@click.option("--layers", type=int, help="Compile only so many layers, which is quicker; the roofline follows.")
@click.option("--python", help="Interpreter of an environment with the compiler plugin; by default this one.")
@click.option("--timeout", type=float, help="Seconds after which to give up.")
@click.option("--lower-only", is_flag=True, help="Stop before the compiler: quick, needs no plugin.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def compile_check(
    target: str, model: str, mesh: str, max_num_seqs: int, max_tokens: int, max_model_len: int | None,
    context: int | None, dtype: str, kv_dtype: str, page_size: int, num_pages: int | None, decode_steps: int,
    layers: int | None, python: str | None, timeout: float | None, lower_only: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compile the engine's decode and prefill steps for hardware that is not there, and show what they would cost."""
    from jaxinfer.cli.progress import spinner
    from jaxinfer.compile_check.devices import parse_mesh
    from jaxinfer.compile_check.launch import run_check
    from jaxinfer.compile_check.plan import make_plan
    from jaxinfer.compile_check.report import as_data, as_lines

    axes = parse_mesh(mesh)
    if axes["data"] > 1:
        raise ValueError(
            "nothing in the engine's step is split over the axis 'data': replicas are engines of their own. Check one, "
            "with --mesh model=N"
        )
    plan = make_plan(
        _config(model, layers), target, num_devices=axes["model"], dtype=dtype, context=context,
        max_model_len=max_model_len, lower_only=lower_only, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens, kv_dtype=kv_dtype, page_size=page_size, num_pages=num_pages,
        decode_steps=decode_steps,
    )  # fmt: skip
    with spinner(f"{'Lowering' if lower_only else 'Compiling'} for {target} (a minute or more)"):
        answer = run_check(plan, python, timeout)
    if as_json:
        click.echo(json.dumps(as_data(plan, answer), indent=2))
        return
    for line in as_lines(plan, answer):
        click.echo(line)


def _config(model: str, layers: int | None) -> "ModelConfig":
    import dataclasses

    config, _ = find_config(model)
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise ValueError(f"layers must be between 1 and the model's {config.num_layers}, got {layers}")
    windows, rope = config.layer_windows[:layers], config.layer_rope[:layers]
    return dataclasses.replace(config, num_layers=layers, layer_windows=windows, layer_rope=rope)
