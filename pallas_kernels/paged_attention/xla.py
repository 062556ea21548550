"""Ragged paged attention as XLA loops: exact, O(T) memory, work bounded by the real lengths.

One loop over the key blocks of decode rows, `block_rows` rows at once, and one over those of all other rows, cut
into tiles of `block_q` query tokens. Both gather `block_k` keys a time through the page table, so no row's cache is
ever copied whole, and keep an online softmax (FlashAttention, Dao et al. 2022, Algorithm 1).

FLOPs: 4 * N * H per visible (query, key) pair. Bytes: 2 * K * H * itemsize per key and work item.

Quantized pages are dequantized a block at a time, after the gather.

The body is written for few HLO instructions, since it is compiled once a layer: flat loops, unsigned indices (which
need no handling of negative values), a finite mask value (which needs no handling of empty rows).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.paged_attention.masks import row_starts, tree_visible
from pallas_kernels.paged_attention.schedule import (
    BLOCK_BASE,
    BLOCK_END,
    BLOCK_START,
    ROW,
    TOKEN_END,
    TOKEN_START,
    Schedule,
    make_schedule,
)
from pallas_kernels.pages import Pages, dequantize

MASK_VALUE = -1e30  # exp(MASK_VALUE - m) is 0 for every m of a score


class _Loop(NamedTuple):
    m: jax.Array  # f32[K, R, Q * G]     maximum of the scores so far
    l: jax.Array  # f32[K, R, Q * G]     sum of exp(score - m)
    acc: jax.Array  # f32[K, R, Q * G, H]  sum of exp(score - m) * v
    out: jax.Array  # f[T + tail, K, G, H]
    lse: jax.Array | None  # f32[T + tail, K, G], if wanted


def ragged_paged_attention_xla(
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
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"] | None]:
    """See `ragged_paged_attention`; the log-sum-exp costs a little and is None unless `with_lse`."""
    T, N, H = q.shape
    K, _, page_size, _ = k_pages.shape
    if schedule is None:
        schedule = make_schedule(
            T, page_size, page_indices.shape[1], kv_lens, cu_q_lens, num_decode_rows, sliding_window
        )
    s = schedule
    # An item never reads past the table or q: the clamping of dynamic_slice would shift it silently.
    tail = max(s.block_rows, s.block_q)
    pages = jnp.pad(page_indices, ((0, s.block_rows), (0, s.pages_per_block))).astype(jnp.uint32)
    positions = jnp.pad(s.positions, (0, tail), constant_values=-1)
    q = jnp.pad((q * scale).reshape(T, K, N // K, H), ((0, tail), (0, 0), (0, 0), (0, 0)))

    if tree_mask is not None:
        tree_mask = jnp.pad(tree_mask, ((0, tail), (0, 0)))
        starts = jnp.pad(row_starts(T, kv_lens, cu_q_lens), (0, tail))

    def run(
        items: jax.Array, rows: int, num_q: int, results: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Runs all work items of `rows` rows with `num_q` query tokens each."""
        state = _Loop(*_empty(K, rows, num_q * (N // K), H), *results)

        def block(index: jax.Array, state: _Loop) -> _Loop:
            item = lax.dynamic_index_in_dim(
                items, jnp.sum(items[:, BLOCK_END] <= index, dtype=jnp.uint32), keepdims=False
            )
            tokens = item[TOKEN_START].astype(jnp.uint32)
            key_block = (index - item[BLOCK_BASE]).astype(jnp.uint32)
            slot = lax.dynamic_slice(
                pages, (item[ROW].astype(jnp.uint32), key_block * s.pages_per_block), (rows, s.pages_per_block)
            )
            k, v = (_gather(x, slot).reshape(K, rows, -1, H).astype(q.dtype) for x in (k_pages, v_pages))
            size = rows * num_q
            valid = tokens + jnp.arange(size, dtype=jnp.uint32) < item[TOKEN_END].astype(jnp.uint32)
            q_position = jnp.where(valid, lax.dynamic_slice_in_dim(positions, tokens, size), -1).reshape(rows, num_q)
            tile = lax.dynamic_slice_in_dim(q, tokens, size).reshape(rows, num_q, K, N // K, H)
            tile = tile.transpose(2, 0, 1, 3, 4).reshape(K, rows, -1, H)

            k_position = key_block.astype(jnp.int32) * k.shape[2] + jnp.arange(k.shape[2], dtype=jnp.int32)
            end = lax.div(q_position, jnp.int32(page_size)) * page_size if before_own_page else q_position + 1
            mask = k_position[None, None] < end[:, :, None]
            if sliding_window is not None:
                mask &= k_position[None, None] > q_position[:, :, None] - sliding_window
            if tree_mask is not None and rows == 1:  # a decode row has no tree: its only token sees all
                words, start = (lax.dynamic_slice_in_dim(x, tokens, size) for x in (tree_mask, starts))
                mask &= tree_visible(words, start, q_position[0], k_position)[None]
            mask = jnp.repeat(mask, N // K, axis=1)
            is_written = k_position[None] < jnp.max(end, axis=1, keepdims=True)
            v = jnp.where(is_written[None, :, :, None], v, jnp.zeros_like(v))  # 0 * NaN is NaN: unwritten slots

            fresh = index == item[BLOCK_START]
            m, l, acc = (jnp.where(fresh, a, b) for a, b in zip(_empty(K, rows, num_q * (N // K), H), state[:3]))
            scores = jnp.einsum("krqh,krsh->krqs", tile, k, preferred_element_type=jnp.float32)
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(mask[None], scores, MASK_VALUE)
            m_new = jnp.maximum(m, jnp.max(scores, axis=-1))
            p = jnp.exp(scores - m_new[..., None])
            correction = jnp.exp(m - m_new)
            l = l * correction + jnp.sum(p, axis=-1)
            pv = jnp.einsum("krqs,krsh->krqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            acc = acc * correction[..., None] + pv

            # Written after every block: what the item's last block writes is what stays.
            def put(old: jax.Array, result: jax.Array) -> jax.Array:
                result = result.reshape(K, rows, num_q, N // K, *result.shape[3:])
                result = jnp.moveaxis(result, 0, 2).reshape(size, *old.shape[1:]).astype(old.dtype)
                is_valid = valid.reshape(size, *(1,) * (old.ndim - 1))
                result = jnp.where(is_valid, result, lax.dynamic_slice_in_dim(old, tokens, size))
                return lax.dynamic_update_slice_in_dim(old, result, tokens, axis=0)

            lse = None if state.lse is None else put(state.lse, m_new + jnp.log(l))
            return _Loop(m_new, l, acc, put(state.out, acc / l[..., None]), lse)

        done = lax.fori_loop(0, items[-1, BLOCK_END], block, state)
        return done.out, done.lse

    lse = jnp.full(q.shape[:-1], -jnp.inf, jnp.float32) if with_lse else None
    out, lse = run(s.decode_items, s.block_rows, 1, (jnp.zeros_like(q), lse))
    if s.prefill_items is not None:
        out, lse = run(s.prefill_items, 1, s.block_q, (out, lse))
    return out[:T].reshape(T, N, H), None if lse is None else lse[:T].reshape(T, N)


def _gather(pages: Pages, index: jax.Array) -> jax.Array:
    """Returns the pages `index` as f[K, *index.shape, page_size, H]."""
    return dequantize(jax.tree.map(lambda x: x.at[:, index].get(mode="promise_in_bounds"), pages))


def _empty(*shape: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns m, l and acc before the first block."""
    row = shape[:-1]
    return jnp.full(row, MASK_VALUE, jnp.float32), jnp.zeros(row, jnp.float32), jnp.zeros(shape, jnp.float32)
