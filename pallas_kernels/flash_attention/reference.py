"""The semantic of flash attention in plain jnp, written to be read; memory O(T * S), differentiable by JAX itself."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.float8 import dequantize_blocks


def flash_attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: Float[Array, "B N q_blocks"] | None = None,
    k_scale: Float[Array, "B K k_blocks"] | None = None,
    v_scale: Float[Array, "B K k_blocks"] | None = None,
    interpret: Any = False,
    tiles: None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Returns what `flash_attention` means, and the log-sum-exp; `interpret` and `tiles` do not matter here."""
    del interpret, tiles
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    dtype = q.dtype if q_scale is None else jnp.bfloat16
    q, k, v = (dequantize_blocks(x, s) for x, s in ((q, q_scale), (k, k_scale), (v, v_scale)))

    position = jnp.arange(T, dtype=jnp.int32)[:, None] + (S - T)
    j = jnp.arange(S, dtype=jnp.int32)[None, :]
    visible = jnp.ones((B, T, S), bool)
    if causal:
        visible &= (j <= position)[None]
    if sliding_window is not None:
        visible &= (j > position - sliding_window)[None]
    if q_segment_ids is not None and kv_segment_ids is not None:
        visible &= q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]

    # What takes part in nothing may hold anything: 0 * NaN is NaN.
    q = jnp.where(jnp.any(visible, axis=2)[:, :, None, None], q, 0.0)
    k, v = (jnp.where(jnp.any(visible, axis=1)[:, :, None, None], x, 0.0) for x in (k, v))

    q = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = visible[:, None, None]
    sees_any = jnp.any(mask, axis=-1)
    m = jnp.max(scores, axis=-1, where=mask, initial=-jnp.inf)
    m = jax.lax.stop_gradient(jnp.where(sees_any, m, 0.0))
    e = jnp.where(mask, jnp.exp(jnp.where(mask, scores - m[..., None], 0.0)), 0.0)
    l = jnp.where(sees_any, jnp.sum(e, axis=-1), 1.0)
    out = jnp.einsum("bkgts,bskh->bkgth", e / l[..., None], v, precision="highest")
    out = jnp.where(sees_any[..., None], out, 0.0).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    lse = jnp.where(sees_any, m + jnp.log(l), -jnp.inf).reshape(B, N, T)
    return out.astype(dtype), lse
