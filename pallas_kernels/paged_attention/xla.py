"""Ragged paged attention as XLA loops: exact, O(T) memory, work bounded by the real lengths.

One loop over the key blocks of decode rows, `block_rows` rows at once, and one over those of all other rows, cut
into tiles of `block_q` query tokens. Both gather `block_k` keys a time through the page table, so no row's cache is
ever copied whole, and keep an online softmax (FlashAttention, Dao et al. 2022, Algorithm 1).

FLOPs: 4 * N * H per visible (query, key) pair. Bytes: 2 * K * H * itemsize per key and work item.

The body is written for few HLO instructions, since it is compiled once a layer: flat loops, unsigned indices (which
need no handling of negative values), a finite mask value (which needs no handling of empty rows).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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

MASK_VALUE = -1e30  # exp(MASK_VALUE - m) is 0 for every m of a score


class _Loop(NamedTuple):
    m: jax.Array  # f32[K, R, Q * G]     maximum of the scores so far
    l: jax.Array  # f32[K, R, Q * G]     sum of exp(score - m)
    acc: jax.Array  # f32[K, R, Q * G, H]  sum of exp(score - m) * v
    out: jax.Array  # f[T + tail, K, G, H]


def ragged_paged_attention_xla(
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
    """See `ragged_paged_attention`."""
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

    def run(items: jax.Array, rows: int, num_q: int, out: jax.Array) -> jax.Array:
        """Runs all work items of `rows` rows with `num_q` query tokens each."""
        state = _Loop(*_empty(K, rows, num_q * (N // K), H), out)

        def block(index: jax.Array, state: _Loop) -> _Loop:
            item = lax.dynamic_index_in_dim(
                items, jnp.sum(items[:, BLOCK_END] <= index, dtype=jnp.uint32), keepdims=False
            )
            tokens = item[TOKEN_START].astype(jnp.uint32)
            key_block = (index - item[BLOCK_BASE]).astype(jnp.uint32)
            slot = lax.dynamic_slice(
                pages, (item[ROW].astype(jnp.uint32), key_block * s.pages_per_block), (rows, s.pages_per_block)
            )
            k, v = (x.at[:, slot].get(mode="promise_in_bounds").reshape(K, rows, -1, H) for x in (k_pages, v_pages))
            size = rows * num_q
            valid = tokens + jnp.arange(size, dtype=jnp.uint32) < item[TOKEN_END].astype(jnp.uint32)
            q_position = jnp.where(valid, lax.dynamic_slice_in_dim(positions, tokens, size), -1).reshape(rows, num_q)
            tile = lax.dynamic_slice_in_dim(q, tokens, size).reshape(rows, num_q, K, N // K, H)
            tile = tile.transpose(2, 0, 1, 3, 4).reshape(K, rows, -1, H)

            k_position = key_block.astype(jnp.int32) * k.shape[2] + jnp.arange(k.shape[2], dtype=jnp.int32)
            mask = k_position[None, None] <= q_position[:, :, None]
            if sliding_window is not None:
                mask &= k_position[None, None] > q_position[:, :, None] - sliding_window
            mask = jnp.repeat(mask, N // K, axis=1)
            is_written = k_position[None] <= jnp.max(q_position, axis=1, keepdims=True)
            v = jnp.where(is_written[None, :, :, None], v, jnp.zeros_like(v))  # 0 * NaN is NaN: unwritten slots

            fresh = index == item[BLOCK_START]
            m, l, acc = (jnp.where(fresh, a, b) for a, b in zip(_empty(K, rows, num_q * (N // K), H), state))
            scores = jnp.einsum("krqh,krsh->krqs", tile, k, preferred_element_type=jnp.float32)
            scores = jnp.where(mask[None], scores, MASK_VALUE)
            m_new = jnp.maximum(m, jnp.max(scores, axis=-1))
            p = jnp.exp(scores - m_new[..., None])
            correction = jnp.exp(m - m_new)
            l = l * correction + jnp.sum(p, axis=-1)
            pv = jnp.einsum("krqs,krsh->krqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            acc = acc * correction[..., None] + pv

            # Written after every block: what the item's last block writes is what stays.
            result = (acc / l[..., None]).reshape(K, rows, num_q, N // K, H).transpose(1, 2, 0, 3, 4)
            old = lax.dynamic_slice_in_dim(state.out, tokens, size)
            result = jnp.where(valid[:, None, None, None], result.reshape(old.shape).astype(old.dtype), old)
            return _Loop(m_new, l, acc, lax.dynamic_update_slice_in_dim(state.out, result, tokens, axis=0))

        return lax.fori_loop(0, items[-1, BLOCK_END], block, state).out

    out = run(s.decode_items, s.block_rows, 1, jnp.zeros_like(q))
    if s.prefill_items is not None:
        out = run(s.prefill_items, 1, s.block_q, out)
    return out[:T].reshape(T, N, H)


def _empty(*shape: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns m, l and acc before the first block."""
    row = shape[:-1]
    return jnp.full(row, MASK_VALUE, jnp.float32), jnp.zeros(row, jnp.float32), jnp.zeros(shape, jnp.float32)
