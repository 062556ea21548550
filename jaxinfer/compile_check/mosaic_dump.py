"""Registers, spills, shared memory, code size and occupancy of Mosaic GPU kernels, from its dumps. Imports no jax.

With `MOSAIC_GPU_DUMP_TO=DIR MOSAIC_GPU_DUMP_PTXAS=1` the compiler leaves NAME.ptx, NAME.ptxas (what the assembler said)
and NAME.mlir-passes.log (in which the launch says how much shared memory it asks for) of every kernel. Its
NAME.resources.txt is not read: Python and the compiler number kernels each for itself, and differ where some are equal.
"""

import dataclasses
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from jaxinfer.compile_check.devices import Device

REGISTERS_PER_CORE = 65536
THREADS_PER_CORE = 2048
BLOCKS_PER_CORE = 32
WARP = 32
RESERVED_SHARED_MEMORY = 1024  # bytes a block that CUDA takes for itself


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel needs.

    Attributes:
        name: of the kernel.
        registers: of each thread at launch.
        spill_stores: bytes.
        spill_loads: bytes.
        stack: bytes.
        shared_memory: bytes of a block, static and dynamic; None where the dump does not say.
        threads: of a block.
        blocks_per_core: blocks that fit on a multiprocessor at once.
        limited_by: what allows no further one: "registers", "shared memory", "threads" or "blocks".
        code_bytes: machine code; None where no assembler was found to make it again.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared_memory: int | None
    threads: int
    blocks_per_core: int
    limited_by: str
    code_bytes: int | None


def read_dump(folder: Path, device: Device) -> list[KernelResources]:
    """Returns the kernels dumped into a folder."""
    return [_read_kernel(path, device) for path in sorted(folder.glob("*.ptxas"))]


def occupancy(registers: int, shared_memory: int, threads: int, device: Device) -> tuple[int, str]:
    """Returns how many blocks fit on a multiprocessor, and what limits them.

    Registers are given to warps in units of 256 (CUDA C++ Best Practices Guide, "Calculating Occupancy").
    """
    warps = -(-threads // WARP)
    per_warp = -(-registers * WARP // 256) * 256
    limits = {
        "registers": REGISTERS_PER_CORE // max(per_warp * warps, 1),
        "shared memory": device.shared_memory_per_core // (shared_memory + RESERVED_SHARED_MEMORY),
        "threads": THREADS_PER_CORE // max(threads, 1),
        "blocks": BLOCKS_PER_CORE,
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def _read_kernel(path: Path, device: Device) -> KernelResources:
    said, ptx = path.read_text(), path.with_suffix(".ptx").read_text()
    registers = _number(r"Used (\d+) registers", said)
    shared_memory = _dynamic_shared_memory(path.with_suffix(".mlir-passes.log"))
    if shared_memory is not None:
        shared_memory += _number(r"(\d+) bytes smem", said)
    threads = [int(n) for n in re.findall(r"\.(?:maxntid|reqntid) (\d+)", ptx)]
    blocks, limit = occupancy(registers, shared_memory or 0, max(threads, default=0), device)
    return KernelResources(
        path.stem, registers, _number(r"(\d+) bytes spill stores", said), _number(r"(\d+) bytes spill loads", said),
        _number(r"(\d+) bytes stack frame", said), shared_memory, max(threads, default=0), blocks, limit,
        _code_bytes(path.with_suffix(".ptx"), ptx),
    )  # fmt: skip


def _dynamic_shared_memory(log: Path) -> int | None:
    """What the launch asks for: scratch, barriers and alignment."""
    with log.open() as lines:
        found = (re.search(r"dynamic_shared_memory_size %c(\d+)_i32", line) for line in lines)
        return next((int(match.group(1)) for match in found if match), None)


def _number(pattern: str, text: str) -> int:
    return max((int(found) for found in re.findall(pattern, text)), default=0)


def _code_bytes(path: Path, ptx: str) -> int | None:
    assembler, architecture = _assembler(), re.search(r"\.target (sm_\w+)", ptx)
    if assembler is None or architecture is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = [assembler, f"-arch={architecture.group(1)}", str(path), "-o", str(cubin)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            return None
        return elf_code_bytes(cubin.read_bytes())


def _assembler() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = os.pathsep.join(str(Path(home) / "bin") for home in homes if home)
    return shutil.which("ptxas") or shutil.which("ptxas", path=folders)


def elf_code_bytes(data: bytes) -> int:
    """Returns the size of the sections `.text.*` of a 64-bit little-endian ELF file, such as a cubin."""
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)

    def section(index: int) -> tuple[int, int, int]:
        name, _, _, _, start, length = struct.unpack_from("<IIQQQQ", data, offset + index * size)
        return name, start, length

    _, names, _ = section(names_index)
    total = 0
    for index in range(count):
        name, _, length = section(index)
        if data.startswith(b".text.", names + name):
            total += length
    return total
