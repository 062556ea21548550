"""The instruction sets that the C++ kernels are compiled for, best first."""

import dataclasses
import functools
import platform
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ISA:
    """Compiler options of an instruction set, and the names of its parts in Linux's /proc/cpuinfo."""

    name: str
    options: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


# The sources have AVX512 and VNNI forms too, which compile. They have never run, as no machine with them was at hand,
# and are not offered until they have.
ISAS = (
    ISA("avx2", ("-march=x86-64-v3",), frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})),
    ISA("generic"),  # whatever the compiler's default is: SSE2, or NEON on ARM
)


def available_isas(flags: frozenset[str] | None = None) -> tuple[ISA, ...]:
    """Returns what a CPU with these flags (None: this one) can run, best first; the last is always "generic"."""
    flags = cpu_flags() if flags is None else flags
    return tuple(isa for isa in ISAS if isa.needs <= flags)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Returns this CPU's features by their Linux names; nothing where they are not known."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
