"""The C++ kernels for CPUs: built with the user's compiler on first use, called through `jax.ffi`."""

from pallas_kernels.cpu.library import Library, cpu_library, require_cpu

__all__ = ["Library", "cpu_library", "require_cpu"]
