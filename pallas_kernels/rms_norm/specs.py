"""Named cases of RMS normalization, at the width of an 8B model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm.api import add_rms_norm
from pallas_kernels.specs import KernelSpec

D = 4096


def _arguments(T: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.ones((T, D), dtype), jnp.ones((T, D), dtype), jnp.ones(D, dtype)


def _run(x: Any, y: Any, scale: Any, *, implementation: str | None = None) -> Any:
    return add_rms_norm(x, y, scale, 1e-5, implementation=implementation)


def _spec(T: int, dtype: str = "bfloat16") -> KernelSpec:
    num_bytes = float(jnp.dtype(dtype).itemsize * (4 * T * D + D))
    arguments = functools.partial(_arguments, T, dtype)
    return KernelSpec(f"{T} tokens, {dtype}", _run, arguments, flops=5.0 * T * D, num_bytes=num_bytes)


SPECS: tuple[KernelSpec, ...] = (_spec(64), _spec(8192), _spec(64, "float32"))
