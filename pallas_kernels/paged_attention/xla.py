"""Ragged paged attention as XLA loops: exact, O(T) memory, work bounded by the real lengths.

Two loops with data-dependent trip counts share one online softmax (FlashAttention, Dao et al. 2022, Algorithm 1):
- decode rows are taken `block_rows` at a time, each key block gathered for the whole group;
- all other rows are cut into tiles of `block_q` query tokens, one tile after another.
Both gather `block_k` keys a time through the page table, so no row's cache is ever copied whole.

FLOPs: 4 * N * H per visible (query, key) pair. Bytes: 2 * K * H * itemsize per key and tile or decode row.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BLOCK_ROWS = 8  # decode rows of one group
BLOCK_Q = 128  # query tokens of one prefill tile
BLOCK_K = 256  # keys of one step of the inner loop, rounded down to whole pages


class _Softmax(NamedTuple):
    """Running state of the online softmax, names as in the paper."""

    m: Float[Array, "... q"]  # maximum of the scores so far
    l: Float[Array, "... q"]  # sum of exp(score - m)
    acc: Float[Array, "... q H"]  # sum of exp(score - m) * v


def ragged_paged_attention_xla(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "K P page_size H"],
    v_pages: Float[Array, "K P page_size H"],
    page_indices: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""],
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "T N H"]:
    """See `ragged_paged_attention`."""
    T, N, H = q.shape
    K, _, page_size, _ = k_pages.shape
    S = kv_lens.shape[0]
    pages_per_block = max(1, min(BLOCK_K // page_size, page_indices.shape[1]))
    block_rows, block_q = min(BLOCK_ROWS, S, T), min(BLOCK_Q, T)
    # A block never reads past the table or q: the clamping of dynamic_slice would shift it silently.
    page_indices = jnp.pad(page_indices, ((0, block_rows), (0, pages_per_block)))
    kv_lens = jnp.pad(kv_lens, (0, block_rows))
    tail = max(block_rows, block_q)
    q = jnp.pad((q * scale).reshape(T, K, N // K, H), ((0, tail), (0, 0), (0, 0), (0, 0)))
    attend = partial(_attend, k_pages=k_pages, v_pages=v_pages, pages_per_block=pages_per_block, window=sliding_window)

    def decode_group(group: jax.Array, out: jax.Array) -> jax.Array:
        first = group * block_rows
        valid = first + jnp.arange(block_rows, dtype=jnp.int32) < num_decode_rows
        lens = jnp.where(valid, lax.dynamic_slice_in_dim(kv_lens, first, block_rows), 0)
        pages = lax.dynamic_slice_in_dim(page_indices, first, block_rows)
        group_q = lax.dynamic_slice_in_dim(q, first, block_rows)  # token s is row s among the decode rows
        result = attend(group_q[:, None], pages, lens[:, None] - 1)
        return _write_rows(out, result[:, 0], first, valid)

    tiles = _prefill_tiles(cu_q_lens, num_decode_rows, block_q)

    def prefill_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(tiles.ends <= tile).astype(jnp.int32)
        first = cu_q_lens[row] + (tile - tiles.ends[row] + tiles.counts[row]) * block_q
        token = first + jnp.arange(block_q, dtype=jnp.int32)
        valid = token < cu_q_lens[row + 1]
        positions = jnp.where(valid, kv_lens[row] - cu_q_lens[row + 1] + token, -1)
        tile_q = lax.dynamic_slice_in_dim(q, first, block_q)
        result = attend(tile_q[None], page_indices[row][None], positions[None])
        return _write_rows(out, result[0], first, valid)

    out = jnp.zeros_like(q)
    out = lax.fori_loop(0, (num_decode_rows + block_rows - 1) // block_rows, decode_group, out)
    out = lax.fori_loop(0, tiles.ends[-1], prefill_tile, out)
    return out[:T].reshape(T, N, H)


class _Tiles(NamedTuple):
    counts: Int[Array, " S"]  # query tiles of each row
    ends: Int[Array, " S"]  # prefix sum of counts


def _prefill_tiles(cu_q_lens: jax.Array, num_decode_rows: jax.Array, block_q: int) -> _Tiles:
    q_lens = jnp.diff(cu_q_lens)
    is_decode = jnp.arange(q_lens.shape[0], dtype=jnp.int32) < num_decode_rows
    counts = jnp.where(is_decode, 0, (q_lens + block_q - 1) // block_q)
    return _Tiles(counts, jnp.cumsum(counts, dtype=jnp.int32))


def _attend(
    q: Float[Array, "R Q K G H"],
    pages: Int[Array, "R M"],
    positions: Int[Array, "R Q"],
    *,
    k_pages: Float[Array, "K P page_size H"],
    v_pages: Float[Array, "K P page_size H"],
    pages_per_block: int,
    window: int | None,
) -> Float[Array, "R Q K G H"]:
    """Returns attention of Q tokens in each of R rows; a token at position -1 sees nothing and gets zeros."""
    R, Q, K, G, H = q.shape
    block_k = pages_per_block * k_pages.shape[2]
    q = q.transpose(2, 0, 1, 3, 4).reshape(K, R, Q * G, H)
    q_position = jnp.repeat(positions, G, axis=1)  # [R, Q * G]

    def block(index: jax.Array, state: _Softmax) -> _Softmax:
        ids = lax.dynamic_slice_in_dim(pages, index * pages_per_block, pages_per_block, axis=1)
        k = k_pages.at[:, ids].get(mode="promise_in_bounds").reshape(K, R, block_k, H)
        v = v_pages.at[:, ids].get(mode="promise_in_bounds").reshape(K, R, block_k, H)
        k_position = index * block_k + jnp.arange(block_k, dtype=jnp.int32)
        mask = k_position[None, None, :] <= q_position[:, :, None]
        if window is not None:
            mask &= k_position[None, None, :] > q_position[:, :, None] - window
        return _online_softmax(state, q, k, v, mask)

    last = jnp.max(positions)
    first = jnp.zeros_like(last)
    if window is not None:  # blocks that no token of the group sees any more are not read
        seen_from = jnp.where(positions < 0, last, positions - window + 1)
        first = jnp.maximum(jnp.min(seen_from), 0) // block_k
    state = _Softmax(
        jnp.full((K, R, Q * G), -jnp.inf, jnp.float32),
        jnp.zeros((K, R, Q * G), jnp.float32),
        jnp.zeros((K, R, Q * G, H), jnp.float32),
    )
    state = lax.fori_loop(first, last // block_k + 1, block, state)
    out = state.acc / jnp.where(state.l == 0.0, 1.0, state.l)[..., None]
    return out.reshape(K, R, Q, G, H).transpose(1, 2, 0, 3, 4).astype(q.dtype)


def _online_softmax(
    state: _Softmax,
    q: Float[Array, "K R q H"],
    k: Float[Array, "K R s H"],
    v: Float[Array, "K R s H"],
    mask: Bool[Array, "R q s"],
) -> _Softmax:
    scores = jnp.einsum("krqh,krsh->krqs", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[None], scores, -jnp.inf)
    m = jnp.maximum(state.m, jnp.max(scores, axis=-1))
    finite_m = jnp.where(jnp.isneginf(m), 0.0, m)  # a row that has seen no key yet: exp(-inf - 0) = 0
    p = jnp.exp(scores - finite_m[..., None])
    correction = jnp.exp(state.m - finite_m)
    v = jnp.where(mask.any(axis=1)[None, :, :, None], v, jnp.zeros_like(v))  # 0 * NaN is NaN: unwritten slots
    pv = jnp.einsum("krqs,krsh->krqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Softmax(m, state.l * correction + jnp.sum(p, axis=-1), state.acc * correction[..., None] + pv)


def _write_rows(out: jax.Array, rows: jax.Array, first: jax.Array, valid: jax.Array) -> jax.Array:
    """Writes the valid ones of `rows` into `out` from index `first` on, leaving what lies under the others."""
    old = lax.dynamic_slice_in_dim(out, first, rows.shape[0])
    return lax.dynamic_update_slice_in_dim(out, jnp.where(valid[:, None, None, None], rows, old), first, axis=0)
