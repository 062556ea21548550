"""The C++ kernels for CPUs: built with the user's compiler on first use, called through `jax.ffi`."""

from pallas_kernels.cpu.library import Library, cpu_library, require_cpu
from pallas_kernels.cpu.zeros import zeros_on_demand

__all__ = ["Library", "cpu_library", "require_cpu", "zeros_on_demand"]
