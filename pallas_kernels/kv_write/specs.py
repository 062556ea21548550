"""Named cases of the KV write, at the shapes of an 8B model with 8 KV heads of 128."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.pages import Pages, quantize
from pallas_kernels.specs import KernelSpec

K, H, PAGE_SIZE = 8, 128, 16
STORED_BYTES = {"bf16": 2 * H, "int8": H + 4, "fp8": H + 4, "int4": H // 2 + 8, "int2": H // 4 + 8}  # of a row


def _pages(kind: str, num_pages: int) -> Pages:
    zeros = jnp.zeros((K, num_pages, PAGE_SIZE, H), jnp.bfloat16)
    if kind == "bf16":
        return zeros
    return quantize(zeros, {"int4": 4, "int2": 2}.get(kind, 8), float8=kind == "fp8")


def _arguments(T: int, k: str, v: str) -> tuple[Any, ...]:
    num_pages = 1 + math.ceil(T / PAGE_SIZE)
    new = jax.random.normal(jax.random.key(0), (2, T, K, H)).astype(jnp.bfloat16)
    angles = jax.random.uniform(jax.random.key(1), (T, H // 2), maxval=6.0)
    slots = PAGE_SIZE + jnp.arange(T, dtype=jnp.int32)
    return _pages(k, num_pages), _pages(v, num_pages), new[0], new[1], slots, jnp.cos(angles), jnp.sin(angles)


def _write(
    k_pages: Pages, v_pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array, cos: jax.Array, sin: jax.Array, *,
    implementation: str | None = None,
) -> tuple[Pages, Pages]:  # fmt: skip
    return write_kv(k_pages, v_pages, k, v, slots, rope=(cos, sin), implementation=implementation)


def _spec(T: int, k: str, v: str) -> KernelSpec:
    rows = T * K
    num_bytes = rows * (4 * H + STORED_BYTES[k] + STORED_BYTES[v]) + T * H * 4 + T * 4
    flops = rows * H * (3 + 4 * (k != "bf16") + 4 * (v != "bf16"))
    return KernelSpec(
        f"{T} tokens, k {k}, v {v}", _write, functools.partial(_arguments, T, k, v), float(flops), float(num_bytes)
    )


SPECS: tuple[KernelSpec, ...] = (
    _spec(64, "bf16", "bf16"),
    _spec(64, "int8", "int4"),
    _spec(64, "fp8", "int2"),
    _spec(8192, "bf16", "bf16"),
    _spec(8192, "int8", "int8"),
)
