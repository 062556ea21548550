"""`jaxinfer plan`: how a model, its KV cache and the work of a step would share the memory of a device."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.options import find_config, storage_options
from jaxinfer.cli.sizes import format_size, parse_size
from jaxinfer.config import EngineConfig

if TYPE_CHECKING:
    from jaxinfer.engine.memory_plan import MemoryPlan

DEFAULTS = EngineConfig()


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--memory", required=True, help="What jax may use of one device, such as 80GB or 24GiB.")
@storage_options
@click.option("--max-model-len", type=int, help="Longest request; by default the model's limit, or what fits.")
@click.option("--length", type=int, help="Tokens of the requests that are counted; by default the longest.")
@click.option("--max-num-seqs", default=DEFAULTS.max_num_seqs, show_default=True, help="Rows that run at once.")
@click.option("--max-tokens", default=DEFAULTS.max_num_batched_tokens, show_default=True, help="Tokens of a step.")
@click.option("--page-size", type=int, help="Tokens of a KV page; by default what suits the precision.")
@click.option("--memory-fraction", default=DEFAULTS.memory_fraction, show_default=True,
              help="Share of the memory beside weights and workspace that is for KV pages.")  # fmt: skip
@click.option("--cpu", is_flag=True, help="For a CPU: float32 by default, and a smaller cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
def plan(
    model: str, memory: str, dtype: str | None, quantize: str | None, kv_dtype: str, max_model_len: int | None,
    length: int | None, max_num_seqs: int, max_tokens: int, page_size: int | None, memory_fraction: float, cpu: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Show how weights and KV pages would share a device's memory, and what fits; no weights are read.

    MODEL is a known name, a GGUF file, a model directory, a config.json, a hub id or a shape such as llama-3-8b.
    """
    budget = parse_size(memory)
    options: dict[str, Any] = {
        "max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_tokens,
        "page_size": page_size, "memory_fraction": memory_fraction,
    }  # fmt: skip
    planner = _Planner(model, dtype or ("float32" if cpu else "bfloat16"), cpu, options)
    found = planner.plan(budget, quantize, kv_dtype)
    length = length or found.max_model_len
    if not 1 <= length <= found.max_model_len:
        raise ValueError(f"length must be between 1 and the longest request of {found.max_model_len} tokens")
    if as_json:
        numbers = {"left": found.left, "num_tokens": found.num_tokens, "length": length}
        answer = dataclasses.asdict(found) | numbers | {"num_requests": found.num_requests(length)}
        click.echo(json.dumps(answer, indent=2))
        return
    for name, value in _rows(found, length, planner.kv(kv_dtype)):
        click.echo(f"{name:20}{value}")


class _Planner:
    """Plans for one model and one kind of device."""

    def __init__(self, model: str, dtype: str, cpu: bool, options: dict[str, Any]):
        self.config, self._gguf = find_config(model)
        self._dtype = dtype
        self._cpu = cpu
        self._options = options

    def kv(self, kv_dtype: str) -> Any:
        from jaxinfer.kv_spec import KVSpec

        return KVSpec.parse(kv_dtype, self._dtype)

    def plan(self, memory: int, quantize: str | None, kv_dtype: str) -> "MemoryPlan":
        """Returns the plan.

        Raises:
            ValueError: it does not fit; with how much it would, and what else would make it fit.
        """
        from jaxinfer.engine.memory_plan import least_memory

        try:
            return self._try(memory, quantize, kv_dtype)
        except ValueError as error:
            try:
                self._try(1 << 62, quantize, kv_dtype)
            except ValueError:
                raise error from None  # no memory mends that
            engine, kv = self._engine(kv_dtype), self.kv(kv_dtype)
            least = least_memory(self.config, engine, kv, self._weights(quantize))
            fitting = [text for text, *other in self._alternatives(quantize, kv_dtype) if self._fits(memory, other)]
            advice = f"; or use {' or '.join(fitting)}" if fitting else ""
            raise ValueError(f"{error}\nit would fit into {format_size(least)}{advice}") from None

    def _try(self, memory: int, quantize: str | None, kv_dtype: str, **changes: Any) -> "MemoryPlan":
        from jaxinfer.engine.memory_plan import plan_memory

        return plan_memory(
            self.config, self._engine(kv_dtype, **changes), self.kv(kv_dtype), weights=self._weights(quantize),
            memory=memory, is_cpu=self._cpu,
        )  # fmt: skip

    def _fits(self, memory: int, alternative: list[Any]) -> bool:
        quantize, kv_dtype, changes = alternative
        try:
            self._try(memory, quantize, kv_dtype, **changes)
        except ValueError:
            return False
        return True

    def _alternatives(self, quantize: str | None, kv_dtype: str) -> list[tuple[str, str | None, str, dict[str, Any]]]:
        large = {"memory_fraction": 0.9}
        return [
            ("--memory-fraction 0.9", quantize, kv_dtype, large),
            ("--kv int8", quantize, "int8", {}),
            ("--kv int4", quantize, "int4", {}),
            ("--quantize int8", "int8", kv_dtype, {}),
            ("--quantize int4", "int4", kv_dtype, {}),
            ("--quantize int4 --kv int4 --memory-fraction 0.9", "int4", "int4", large),
        ]

    def _engine(self, kv_dtype: str, **changes: Any) -> EngineConfig:
        options: dict[str, Any] = self._options | {"kv_dtype": kv_dtype} | changes
        options["page_size"] = options["page_size"] or self.kv(kv_dtype).page_size
        return EngineConfig(**options)

    def _weights(self, quantize: str | None) -> int:
        import contextlib

        import jax.numpy as jnp

        from checkpoints.gguf_io import GGUFFile
        from jaxinfer.model.weight_sizes import weight_bytes
        from jaxinfer.quantization.layouts import Layout

        layout = Layout.CPU if self._cpu else Layout.PLANES
        with GGUFFile(self._gguf) if self._gguf else contextlib.nullcontext() as file:
            return weight_bytes(self.config, jnp.dtype(self._dtype), quantize, layout, file)


def _rows(plan: "MemoryPlan", length: int, kv: Any) -> list[tuple[str, str]]:
    parts = [("weights", plan.weights, ""), ("workspace", plan.workspace, " at most, in a step")]
    if plan.open_pages:
        parts.append(("open pages", plan.open_pages, f" of {plan.max_num_seqs} rows, in {kv.open}"))
    about = f" {plan.num_pages:,} of {plan.page_size} tokens, in {kv}"
    parts += [("KV pages", plan.kv_pages, about), ("left", plan.left, "")]
    rows = [("memory", format_size(plan.memory))]
    rows += [(name, f"{format_size(size):>10} {100 * size / plan.memory:5.1f} %{more}") for name, size, more in parts]
    requests = plan.num_requests(length)
    full = plan.num_pages - 1 == plan.max_num_seqs * -(-plan.max_model_len // plan.page_size)
    return [
        *rows,
        ("a token", format_size(round(plan.bytes_per_token))),
        ("tokens", f"{plan.num_tokens:,}{', all that --max-num-seqs requests can use' if full else ''}"),
        ("longest request", f"{plan.max_model_len:,} tokens"),
        ("requests at once", f"{requests:,} of {length:,} tokens, when they share no prefix"),
    ]
