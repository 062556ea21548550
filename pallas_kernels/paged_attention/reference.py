"""The semantic of ragged paged attention in plain jnp, written to be read; memory O(T * M * page_size)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.paged_attention.masks import row_starts, tree_visible
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.pages import Pages, dequantize


def ragged_paged_attention_reference(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_indices: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""] | None,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tree_mask: UInt32[Array, "T W"] | None,
    before_own_page: bool = False,
    schedule: Schedule | None,
    with_lse: bool,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Returns what `ragged_paged_attention` means; `num_decode_rows` and `schedule` do not matter here."""
    del num_decode_rows, schedule, with_lse
    T, N, H = q.shape
    K, S = k_pages.shape[0], kv_lens.shape[0]
    token = jnp.arange(T, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens, token, side="right") - 1
    is_padding = row >= S
    row = jnp.minimum(row, S - 1)

    k, v = (
        dequantize(pages)[:, page_indices[row]].reshape(K, T, -1, H).astype(jnp.float32) for pages in (k_pages, v_pages)
    )
    q_position = kv_lens[row] - cu_q_lens[row + 1] + token
    k_position = jnp.arange(k.shape[2], dtype=jnp.int32)
    end = q_position // k_pages.shape[2] * k_pages.shape[2] if before_own_page else q_position + 1
    mask = (k_position[None, :] < end[:, None]) & ~is_padding[:, None]
    if sliding_window is not None:
        mask &= k_position[None, :] > q_position[:, None] - sliding_window
    if tree_mask is not None:
        mask &= tree_visible(tree_mask, row_starts(T, kv_lens, cu_q_lens), q_position, k_position)

    scores = jnp.einsum("tkgh,ktsh->ktgs", q.reshape(T, K, N // K, H).astype(jnp.float32) * scale, k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[None, :, None, :], scores, -jnp.inf)
    weights = jnp.where(mask.any(axis=1)[None, :, None, None], jax.nn.softmax(scores, axis=-1), 0.0)
    v = jnp.where(mask[None, :, :, None], v, 0.0)  # 0 * NaN is NaN: unwritten slots may hold anything
    out = jnp.einsum("ktgs,ktsh->tkgh", weights, v)
    lse = jax.nn.logsumexp(scores, axis=-1).transpose(1, 0, 2)
    return out.reshape(T, N, H).astype(q.dtype), lse.reshape(T, N)
