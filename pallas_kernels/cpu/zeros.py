"""Large arrays of zeros of which only what is written takes memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.library import Library, require_cpu


def zeros_on_demand(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros on the default device; on a CPU with the C++ library they take memory page by page, as written.

    That holds for an array that is only ever donated: a copy of it is as large as it looks.
    """
    try:
        library = require_cpu()
    except NotImplementedError:
        return jnp.zeros(shape, dtype)
    return _jitted(library, shape, jnp.dtype(dtype))()


@functools.cache
def _jitted(library: Library, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.jit(jax.ffi.ffi_call(library.target("zeros_on_demand"), jax.ShapeDtypeStruct(shape, dtype)))
