"""Float8 queries, keys and values, with one scale a block of 128 tokens and head."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pages import FLOAT8, FLOAT8_MAX

SCALE_BLOCK = 128  # tokens that share a scale


class Float8Attention(NamedTuple):
    """The float8 arguments of `flash_attention`: `flash_attention(**quantized._asdict(), causal=True)`."""

    q: jax.Array  # e4m3[B, T, N, H]
    k: jax.Array  # e4m3[B, S, K, H]
    v: jax.Array  # e4m3[B, S, K, H]
    q_scale: jax.Array  # f32[B, N, ceil(T / 128)]
    k_scale: jax.Array  # f32[B, K, ceil(S / 128)]
    v_scale: jax.Array  # f32[B, K, ceil(S / 128)]


def quantize_for_flash(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
) -> Float8Attention:
    """Returns q, k and v in float8 (e4m3), the largest magnitude of each block of 128 tokens of a head mapped to 448.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.flash_attention import flash_attention, quantize_for_flash
        >>> x = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
        >>> flash_attention(**quantize_for_flash(x, x, x)._asdict()).dtype
        dtype(bfloat16)
    """
    data, scales = zip(*(_quantize_blocks(x) for x in (q, k, v)))
    return Float8Attention(*data, *scales)


def dequantize_blocks(x: Float[Array, "B T N H"], scale: Float[Array, "B N blocks"] | None) -> Float[Array, "B T N H"]:
    """Returns `x * scale` in f32; `x` itself in f32 if scale is None."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * token_scale(scale, x.shape[1]).transpose(0, 2, 1)[..., None]


def token_scale(scale: Float[Array, "B N blocks"], num_tokens: int) -> Float[Array, "B N T"]:
    """Returns the scale of each token."""
    return jnp.repeat(scale, SCALE_BLOCK, axis=2)[..., :num_tokens]


def _quantize_blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    B, T, N, H = x.shape
    x = x.astype(jnp.float32)
    blocks = jnp.pad(x, ((0, 0), (0, -T % SCALE_BLOCK), (0, 0), (0, 0))).reshape(B, -1, SCALE_BLOCK, N, H)
    largest = jnp.max(jnp.abs(blocks), axis=(2, 4)).transpose(0, 2, 1)
    scale = jnp.where(largest == 0, 1.0, largest / FLOAT8_MAX)
    x = x / token_scale(scale, T).transpose(0, 2, 1)[..., None]
    return jnp.clip(x, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8), scale
