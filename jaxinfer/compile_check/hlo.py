"""What can be read from the text of a compiled program: collectives, kernels, their VMEM. Imports no jax."""

import math
import re
from collections import Counter

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16}
_BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_KERNEL = re.compile(r'custom_call_target="(mosaic_gpu\w*|tpu_custom_call)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_VMEM = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Returns kind -> {"count", "bytes"}, bytes of the results on one device.

    A collective inside a loop is counted once: what the text says, not how often it runs.
    """
    found: dict[str, dict[str, int]] = {}
    for line in text.splitlines():
        if not (match := _COLLECTIVE.search(line)):
            continue
        result, kind, start = match.groups()
        arrays = [_num_bytes(*array) for array in _ARRAY.findall(result)]
        # The result of an asynchronous start is (operands..., results...) except for all-reduce.
        size = sum(arrays[len(arrays) // 2 :]) if start and kind != "all-reduce" else sum(arrays)
        entry = found.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += size
    return found


def kernel_calls(text: str) -> dict[str, int]:
    """Returns how often each Pallas kernel is called, by the path of the call without layer numbers."""
    names: Counter[str] = Counter()
    for line in text.splitlines():
        if _KERNEL.search(line) and "custom-call(" in line:
            path = _OP_NAME.search(line)
            names[_short(path.group(1)) if path else "kernel"] += 1
    return dict(names.most_common())


def vmem_bytes(text: str) -> dict[str, int]:
    """Returns the most VMEM that each TPU kernel uses, by the same names as `kernel_calls`."""
    most: dict[str, int] = {}
    for line in text.splitlines():
        if not (_KERNEL.search(line) and "custom-call(" in line):
            continue
        path, scoped = _OP_NAME.search(line), _SCOPED.search(line)
        sizes = [int(size) for size in _VMEM.findall(scoped.group(1))] if scoped else []
        name = _short(path.group(1)) if path else "kernel"
        most[name] = max(most.get(name, 0), sum(sizes))
    return most


def _short(path: str) -> str:
    """jit(model_step)/layer_3/attention/jit(f)/kernel -> attention/f/kernel."""
    parts = [re.sub(r"^\w*jit\((.*)\)$", r"\1", part) for part in path.split("/")]
    loops = {"while", "body", "cond", "mpmd_map", "pallas_call", "closed_call", "model_step", "Decoder", ""}
    kept = [part for part in parts if part not in loops and not re.fullmatch(r"layers?_\d+|branch_\d+_fun", part)]
    return "/".join(kept[-3:]) or path


def _num_bytes(kind: str, dims: str) -> int:
    bits = _BITS.get(kind, 8)  # the float8 types
    return math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8
