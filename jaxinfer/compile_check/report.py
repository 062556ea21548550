"""The answer of a compile check as lines of text and as plain data."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxinfer.compile_check.plan import Plan
from jaxinfer.compile_check.roofline import Roofline, decode_roofline, prefill_roofline

GIB = 2**30
_MESH_NOTE = (
    "the engine itself does not run on several devices yet: this is its step with weights and KV heads split by the "
    "rules of `sharding`, partitioned by XLA, with XLA attention"
)


def rooflines(plan: Plan) -> dict[str, Roofline]:
    """Returns the bounds of both steps."""
    return {"decode": decode_roofline(plan), "prefill": prefill_roofline(plan)}


def as_data(plan: Plan, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns everything, for JSON."""
    bounds = {
        name: dataclasses.asdict(bound) | {"bound": bound.bound, "seconds": bound.seconds}
        for name, bound in rooflines(plan).items()
    }
    return {"plan": dataclasses.asdict(plan), **answer, "roofline": bounds}


def as_lines(plan: Plan, answer: dict[str, Any]) -> Iterator[str]:
    """Yields the report."""
    device, n, engine = plan.device, plan.num_devices, plan.engine
    yield _row("target", f"{n} x {device.kind}" if n > 1 else device.kind)
    yield _row("compiled with", f"jax {answer['jax']}" + (", lowering only" if plan.lower_only else ""))
    yield _row("weights", f"{_size(answer['weight_bytes'])} a device, {plan.dtype}")
    yield _row(
        "KV cache",
        f"{answer['num_pages']:,} pages of {engine.page_size}, "
        f"{_size(answer['num_pages'] * plan.kv.page_bytes(plan.model, engine.page_size) // n)} a device",
    )
    if n > 1:
        yield _row("note", _MESH_NOTE)
    for name, bound in rooflines(plan).items():
        yield ""
        yield from _step(plan, name, answer["steps"][name], bound)


def _step(plan: Plan, name: str, found: dict[str, Any], bound: Roofline) -> Iterator[str]:
    yield f"{name}: {found['num_tokens']} tokens in {found['num_rows']} rows"
    if "memory" in found:
        yield _row("  compiled in", f"{found['compile_s']:.1f} s, lowered in {found['lower_s']:.1f} s")
        yield from _memory(plan, found["memory"])
    else:
        yield _row("  lowered in", f"{found['lower_s']:.1f} s")
    yield from _kernels(plan, found)
    if found.get("collectives"):
        kinds = (f"{c['count']} {kind} of {_size(c['bytes'])}" for kind, c in found["collectives"].items())
        yield _row("  collectives", ", ".join(kinds) + " in the program's text, a loop's once")
    elif plan.num_devices > 1 and "memory" in found:
        yield _row("  collectives", "none")
    if counts := found.get("xla_counts"):
        flops, size = counts.get("flops", 0), counts.get("bytes accessed", 0)
        yield _row("  XLA counts", f"{flops / 1e9:,.1f} GFLOP, {_size(size)} accessed, a loop's body once")
    yield from _roofline(plan, name, bound)


def _memory(plan: Plan, memory: dict[str, int]) -> Iterator[str]:
    usable = plan.device.memory_bytes * plan.device.usable_share
    parts = {"arguments": "argument", "temporaries": "temp", "output": "output", "donated": "alias"}
    yield _row("  memory", ", ".join(f"{label} {_size(memory[key])}" for label, key in parts.items()))
    verdict = "" if memory["total"] <= usable else ": TOO MUCH"
    yield _row(
        "  in all",
        f"{_size(memory['total'])} of {_size(usable)} that jax can use of {_size(plan.device.memory_bytes)}{verdict}",
    )


def _kernels(plan: Plan, found: dict[str, Any]) -> Iterator[str]:
    if "kernel_custom_calls" in found:
        yield _row("  Pallas kernels", f"{found['kernel_custom_calls']} in the lowered program")
        return
    calls = found["kernel_calls"]
    text = ", ".join(f"{count} x {name}" for name, count in calls.items())
    yield _row(
        "  Pallas kernels", text or "none: every operation is XLA's (`jaxinfer info --kernels --target` says why)"
    )
    for kernel in found["kernels"]:
        spills = kernel["spill_stores"] + kernel["spill_loads"]
        shared = "unknown" if kernel["shared_memory"] is None else _size(kernel["shared_memory"])
        code = "" if kernel["code_bytes"] is None else f", code {_size(kernel['code_bytes'])}"
        yield _row(
            f"    {kernel['name']}",
            f"{kernel['registers']} registers, {f'{spills} bytes SPILLED' if spills else 'no spills'}, shared memory "
            f"{shared} of {_size(plan.device.shared_memory_per_block)}, {kernel['threads']} "
            f"threads, {kernel['blocks_per_core']} blocks an SM (limited by {kernel['limited_by']}){code}",
        )
    for name, size in found["vmem_bytes"].items():
        yield _row(f"    {name}", f"VMEM {_size(size)}")


def _roofline(plan: Plan, name: str, bound: Roofline) -> Iterator[str]:
    total = sum(bound.num_bytes.values())
    parts = ", ".join(f"{label} {_size(size)}" for label, size in bound.num_bytes.items() if size >= total / 100)
    what = (
        f"one step, {plan.context:,} keys a row" if name == "decode" else f"one prompt's first {bound.tokens:,} tokens"
    )
    yield _row("  least work", f"{bound.flops / 1e9:,.1f} GFLOP, {_size(total)} ({parts}) a device: {what}")
    yield _row(
        "  roofline",
        f"{bound.seconds * 1e3:.3g} ms, bound by {bound.bound} (compute {bound.compute_s * 1e3:.3g} ms, memory "
        f"{bound.memory_s * 1e3:.3g} ms): at most {bound.tokens / bound.seconds:,.0f} tok/s; not measured",
    )


def _row(name: str, value: str) -> str:
    return f"{name:20}{value}" if len(name) < 20 else f"{name}  {value}"


def _size(num_bytes: float) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"
