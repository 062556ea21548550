"""What a compiled program says of itself."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from jaxinfer.compile_check import hlo
from jaxinfer.compile_check.devices import Device
from jaxinfer.compile_check.mosaic_dump import read_dump

_COSTS = ("flops", "bytes accessed", "transcendentals")


def measure(lowered: jax.stages.Lowered, device: Device, dump: Path | None) -> dict[str, Any]:
    """Compiles and returns plain data: seconds, memory, collectives, kernels and what XLA counts.

    Args:
        lowered: of a step or a kernel.
        device: compiled for.
        dump: folder that Mosaic GPU writes to, None where it does not.
    """
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text() or ""
    vmem = hlo.vmem_bytes(text) if device.platform == "tpu" else {}
    return {
        "compile_s": seconds,
        "memory": _memory(compiled),
        "collectives": hlo.collectives(text),
        "kernel_calls": hlo.kernel_calls(text),
        "vmem_bytes": {name: size for name, size in vmem.items() if size},
        "kernels": [dataclasses.asdict(kernel) for kernel in read_dump(dump, device)] if dump else [],
        "xla_counts": _costs(compiled),
    }


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    m: Any = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    sizes = {name: int(getattr(m, f"{name}_size_in_bytes")) for name in names}
    sizes["total"] = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"] + sizes["generated_code"]
    return sizes


def _costs(compiled: jax.stages.Compiled) -> dict[str, float]:
    """XLA's own counts, which the GPU compiler does not give; a loop's body is counted once."""
    costs: Any = None
    with contextlib.suppress(NotImplementedError):
        costs = compiled.cost_analysis()
    return {name: float(costs[name]) for name in _COSTS if name in costs} if costs else {}
