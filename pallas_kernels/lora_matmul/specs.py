"""Named cases of the LoRA product: adapters of an 8B Llama."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lora_matmul.api import lora_matmul
from pallas_kernels.specs import KernelSpec


def _arguments(tokens: int, adapters: int, used: int, rank: int, d_in: int, d_out: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (tokens, d_in), jnp.bfloat16)
    a = jax.random.normal(keys[1], (adapters, rank, d_in), jnp.bfloat16) * jnp.bfloat16(d_in**-0.5)
    b = jax.random.normal(keys[2], (adapters, d_out, rank), jnp.bfloat16) * jnp.bfloat16(rank**-0.5)
    indices = jax.random.permutation(keys[3], jnp.arange(tokens, dtype=jnp.int32) % used)
    return x, a, b, indices, jnp.full(adapters, 2.0), jax.random.normal(keys[4], (tokens, d_out), jnp.bfloat16)


def _run(
    x: jax.Array, a: jax.Array, b: jax.Array, indices: jax.Array, scales: jax.Array, base: jax.Array, **kwargs: Any
) -> jax.Array:
    return lora_matmul(x, a, b, indices, scales=scales, base=base, **kwargs)


def _spec(tokens: int, adapters: int, used: int, rank: int, d_in: int, d_out: int) -> KernelSpec:
    return KernelSpec(
        name=f"T{tokens}-A{adapters}-used{used}-R{rank}-{d_in}to{d_out}",
        function=_run,
        arguments=functools.partial(_arguments, tokens, adapters, used, rank, d_in, d_out),
        flops=2.0 * tokens * rank * (d_in + d_out),
        num_bytes=2.0 * (tokens * (d_in + 2 * d_out) + used * rank * (d_in + d_out)),
    )


SPECS: tuple[KernelSpec, ...] = (
    _spec(1, 64, 1, 16, 4096, 4096),
    _spec(16, 64, 16, 16, 4096, 4096),
    _spec(16, 64, 16, 64, 4096, 14336),
    _spec(256, 64, 64, 16, 4096, 4096),
    _spec(256, 64, 1, 64, 4096, 14336),
    _spec(4096, 64, 8, 16, 4096, 4096),
    _spec(4096, 64, 64, 64, 4096, 14336),
)
