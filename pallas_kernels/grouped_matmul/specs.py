"""Named cases of the grouped product: the experts of Mixtral 8x7B."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.specs import KernelSpec


def _arguments(rows: int, experts: int, n: int, k: int, used: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    sizes = jnp.where(jnp.arange(experts) < used, rows // used, 0).astype(jnp.int32)
    x = jax.random.normal(keys[0], (rows, k), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (experts, n, k), jnp.bfloat16) * jnp.bfloat16(k**-0.5), sizes


def _spec(rows: int, experts: int, n: int, k: int, used: int) -> KernelSpec:
    return KernelSpec(
        name=f"T{rows}-E{experts}-used{used}-N{n}-K{k}",
        function=grouped_matmul,
        arguments=functools.partial(_arguments, rows, experts, n, k, used),
        flops=2.0 * rows * n * k,
        num_bytes=2.0 * (rows * (n + k) + used * n * k),
    )


SPECS: tuple[KernelSpec, ...] = (
    _spec(2, 8, 14336, 4096, 2),
    _spec(16, 8, 14336, 4096, 8),
    _spec(256, 8, 14336, 4096, 8),
    _spec(4096, 8, 14336, 4096, 8),
    _spec(4096, 8, 4096, 14336, 8),
    _spec(4096, 8, 14336, 4096, 1),
)
