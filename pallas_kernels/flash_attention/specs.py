"""Realistic cases of flash attention for compile checks and benchmarks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.flash_attention.float8 import quantize_for_flash
from pallas_kernels.flash_attention.visibility import Visibility
from pallas_kernels.specs import KernelSpec


def _attend(*arguments: jax.Array, names: tuple[str, ...], implementation: str | None = None, **options: Any) -> Any:
    return flash_attention(**dict(zip(names, arguments)), implementation=implementation, **options)


def _gradients(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
    """Returns the gradients of the output's sum: the forward pass runs first, as in training."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(_attend(q, k, v, names=("q", "k", "v"), **options).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def _inputs(B: int, T: int, S: int, N: int, K: int, H: int, segment: int | None, float8: bool) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))
    if float8:
        return tuple(quantize_for_flash(q, k, v))
    if segment is None:
        return q, k, v
    ids = (jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32) // segment, (B, n)) for n in (T, S))
    return q, k, v, *ids


def _spec(
    name: str, T: int, S: int, N: int, K: int, H: int, *, B: int = 1, backward: bool = False, float8: bool = False,
    segment: int | None = None, **options: Any,
) -> KernelSpec:  # fmt: skip
    """Counts 4 * N * H operations a visible pair forward and 10 backward; every array once.

    Args:
        name: of the case.
        T: queries.
        S: keys.
        N: query heads.
        K: KV heads.
        H: head dimension.
        B: batch.
        backward: whether forward and backward are run.
        float8: whether q, k and v are float8.
        segment: length of the packed sequences; None for one that fills the row.
        **options: of `flash_attention`.
    """
    pairs = Visibility(T, S, options.get("causal", True), options.get("sliding_window")).num_pairs
    if segment is not None:
        pairs = -(-T // segment) * Visibility(segment, segment, True, options.get("sliding_window")).num_pairs
    q_size, kv_size = B * T * N * H, B * S * K * H
    size = 1 if float8 else 2
    num_bytes = (size + 2) * q_size + 2 * size * kv_size
    if backward:  # reads q, out, d_out, k, v and lse, writes dq, dk, dv
        num_bytes += 2 * (4 * q_size + 4 * kv_size) + 2 * 4 * B * N * T
    names = ("q", "k", "v")
    names += ("q_scale", "k_scale", "v_scale") if float8 else ("q_segment_ids", "kv_segment_ids") if segment else ()
    function: Callable[..., Any] = functools.partial(_gradients, **options)
    if not backward:
        function = functools.partial(_attend, names=names, **options)
    flops = float((14 if backward else 4) * B * N * H * pairs)
    arguments = functools.partial(_inputs, B, T, S, N, K, H, segment, float8)
    return KernelSpec(f"{name}", function, arguments, flops, num_bytes, "fp8" if float8 else "bf16")


SPECS = (
    _spec("llama3_8b_4k", 4096, 4096, 32, 8, 128),
    _spec("llama3_8b_16k", 16384, 16384, 32, 8, 128),
    _spec("llama3_8b_4k_float8", 4096, 4096, 32, 8, 128, float8=True),
    _spec("llama3_8b_chunk_2k_of_32k", 2048, 32768, 32, 8, 128),
    _spec("llama3_8b_packed_8k", 8192, 8192, 32, 8, 128, segment=1024),
    _spec("llama3_70b_4k", 4096, 4096, 64, 8, 128),
    _spec("mha_head_dim_64_4k", 4096, 4096, 32, 32, 64, B=2),
    _spec("gemma2_9b_8k_window_soft_cap", 8192, 8192, 16, 8, 256, sliding_window=4096, soft_cap=50.0),
    _spec("mistral_7b_16k_window", 16384, 16384, 32, 8, 128, sliding_window=4096),
    _spec("encoder_head_dim_80_1k", 1024, 1024, 16, 16, 80, B=8, causal=False),
    _spec("smollm2_135m_2k", 2048, 2048, 9, 3, 64),
    _spec("llama3_8b_4k_gradients", 4096, 4096, 32, 8, 128, backward=True),
    _spec("mha_head_dim_64_4k_gradients", 4096, 4096, 32, 32, 64, B=2, backward=True),
)
