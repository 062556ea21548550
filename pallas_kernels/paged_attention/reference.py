"""The semantic of ragged paged attention in plain jnp, written to be read; memory O(T * M * page_size)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.schedule import Schedule


def ragged_paged_attention_reference(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "K P page_size H"],
    v_pages: Float[Array, "K P page_size H"],
    page_indices: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""] | None,
    *,
    scale: float,
    sliding_window: int | None = None,
    schedule: Schedule | None = None,
) -> Float[Array, "T N H"]:
    """Returns what `ragged_paged_attention` means; `num_decode_rows` and `schedule` do not matter here."""
    del num_decode_rows, schedule
    T, N, H = q.shape
    K, S = k_pages.shape[0], kv_lens.shape[0]
    token = jnp.arange(T, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens, token, side="right") - 1
    is_padding = row >= S
    row = jnp.minimum(row, S - 1)

    k = k_pages[:, page_indices[row]].reshape(K, T, -1, H).astype(jnp.float32)
    v = v_pages[:, page_indices[row]].reshape(K, T, -1, H).astype(jnp.float32)
    q_position = kv_lens[row] - cu_q_lens[row + 1] + token
    k_position = jnp.arange(k.shape[2], dtype=jnp.int32)
    mask = (k_position[None, :] <= q_position[:, None]) & ~is_padding[:, None]
    if sliding_window is not None:
        mask &= k_position[None, :] > q_position[:, None] - sliding_window

    scores = jnp.einsum("tkgh,ktsh->ktgs", q.reshape(T, K, N // K, H).astype(jnp.float32) * scale, k)
    scores = jnp.where(mask[None, :, None, :], scores, -jnp.inf)
    weights = jnp.where(is_padding[None, :, None, None], 0.0, jax.nn.softmax(scores, axis=-1))
    v = jnp.where(mask[None, :, :, None], v, 0.0)  # 0 * NaN is NaN: unwritten slots may hold anything
    out = jnp.einsum("ktgs,ktsh->tkgh", weights, v)
    return out.reshape(T, N, H).astype(q.dtype)
