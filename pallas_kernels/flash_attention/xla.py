"""Flash attention as XLA loops: exact, memory O(T), blocks that no query sees are skipped.

FlashAttention-2 (Dao 2023): forward Algorithm 1, one loop over blocks of queries and inside it one over the key
blocks they see; backward Algorithm 2, which recomputes the weights from `lse`, one loop over blocks of keys and
inside it one over the query blocks that see them. The G query heads of a KV head are rows of the same products.

FLOPs: 4 * N * H per visible (query, key) pair forward, 10 * N * H backward (five products).
Bytes: q, out and lse once, K and V once a query block (forward); K, V and their gradients once, q, d_out and
the f32 gradient of q once a key block (backward).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.blocks import (
    from_row_vector,
    from_rows,
    row_delta,
    row_queries,
    segment_blocks,
    segment_rows,
    to_row_vector,
    to_rows,
)
from pallas_kernels.flash_attention.float8 import token_scale
from pallas_kernels.flash_attention.visibility import Visibility

BLOCK_Q = 128  # queries; one product has BLOCK_Q * G rows
BLOCK_K = 256  # keys
LOWEST = -1e30  # where the running maximum starts: finite, so that exp(-inf - maximum) is 0 and never NaN


def flash_attention_xla(
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
    tiles: tuple[int, int] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Returns (out, lse); see `flash_attention`. `tiles` is (block_q, block_k); `interpret` does not matter."""
    del interpret
    (_, T, N, H), (S, K) = q.shape, k.shape[1:3]
    block_q, block_k = _tiles(tiles, T, S)
    visibility = Visibility(T, S, causal, sliding_window)
    out_dtype = q.dtype if q_scale is None else jnp.bfloat16
    if q_scale is not None:  # e4m3 is exact in bfloat16; the scales meet the f32 scores and weights
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    keys, values = (_to_keys(x, block_k) for x in (k, v))
    segments = _Segments(q_segment_ids, kv_segment_ids, N // K, block_q, block_k)
    queries = row_queries(N // K, block_q)
    scales = None
    if q_scale is not None and k_scale is not None and v_scale is not None:
        rows = to_row_vector(token_scale(q_scale, T), K, block_q)
        scales = rows, *(_to_key_vector(token_scale(x, S), block_k) for x in (k_scale, v_scale))

    def query_block(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, q_rows = args

        def key_block(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            m, l, acc = state
            scores = _dot("bkrh,bkjh->bkrj", q_rows, keys[j]) * scale
            if scales is not None:
                scores = scores * (scales[0][i][..., :, None] * scales[1][j][..., None, :])
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(segments.mask(visibility, queries, i, j), scores, -jnp.inf)
            m_new = jnp.maximum(m, jnp.max(scores, axis=-1))
            p = jnp.exp(scores - m_new[..., None])
            correction = jnp.exp(m - m_new)
            l = l * correction + jnp.sum(p, axis=-1)
            if scales is not None:
                p = p * scales[2][j][..., None, :]
            acc = acc * correction[..., None] + _dot("bkrj,bkjh->bkrh", p.astype(values.dtype), values[j])
            return m_new, l, acc

        row = q_rows.shape[:-1]
        state = jnp.full(row, LOWEST, jnp.float32), jnp.zeros(row, jnp.float32), jnp.zeros((*row, H), jnp.float32)
        start, end = visibility.key_blocks(i, block_q, block_k)
        m, l, acc = _loop(start, end, segments.skipping(lambda j: (i, j), key_block), state)
        seen = l > 0
        l = jnp.where(seen, l, 1.0)
        return (acc / l[..., None]).astype(out_dtype), jnp.where(seen, m + jnp.log(l), -jnp.inf)

    q_rows = to_rows(q, K, block_q)
    out, lse = lax.map(query_block, (jnp.arange(len(q_rows), dtype=jnp.int32), q_rows))
    return from_rows(out, T, block_q), from_row_vector(lse, T, block_q)


def flash_attention_backward_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B N T"],
    d_out: Float[Array, "B T N H"],
    d_lse: Float[Array, "B N T"] | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: Any = False,
    tiles: tuple[int, int] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Returns (dq, dk, dv)."""
    del interpret
    (T, N), (S, K) = q.shape[1:3], k.shape[1:3]
    block_q, block_k = _tiles(tiles, T, S)
    visibility = Visibility(T, S, causal, sliding_window)
    segments = _Segments(q_segment_ids, kv_segment_ids, N // K, block_q, block_k)
    queries = row_queries(N // K, block_q)
    q_rows, do_rows = (to_rows(x, K, block_q) for x in (q, d_out.astype(q.dtype)))
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)  # such a row has every score masked: its weights are 0 all the same
    lse_rows, delta_rows = (to_row_vector(x, K, block_q) for x in (lse, row_delta(out, d_out, d_lse)))

    def key_block(dq: jax.Array, args: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        j, k_block, v_block = args

        def query_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = state
            scores = _dot("bkrh,bkjh->bkrj", q_rows[i], k_block) * scale
            slope = scale
            if soft_cap is not None:
                tanh = jnp.tanh(scores / soft_cap)
                scores, slope = soft_cap * tanh, scale * (1 - tanh * tanh)
            scores = jnp.where(segments.mask(visibility, queries, i, j), scores, -jnp.inf)
            p = jnp.exp(scores - lse_rows[i][..., None])
            dp = _dot("bkrh,bkjh->bkrj", do_rows[i], v_block)
            ds = (p * (dp - delta_rows[i][..., None]) * slope).astype(q.dtype)
            dv = dv + _dot("bkrj,bkrh->bkjh", p.astype(q.dtype), do_rows[i])
            dk = dk + _dot("bkrj,bkrh->bkjh", ds, q_rows[i])
            dq_block = lax.dynamic_index_in_dim(dq, i, keepdims=False) + _dot("bkrj,bkjh->bkrh", ds, k_block)
            return lax.dynamic_update_index_in_dim(dq, dq_block, i, axis=0), dk, dv

        start, end = visibility.query_blocks(j, block_q, block_k)
        zeros = jnp.zeros(k_block.shape, jnp.float32)
        dq, dk, dv = _loop(start, end, segments.skipping(lambda i: (i, j), query_block), (dq, zeros, zeros))
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    keys, values = (_to_keys(x, block_k) for x in (k, v))
    blocks = (jnp.arange(len(keys), dtype=jnp.int32), keys, values)
    dq, (dk, dv) = lax.scan(key_block, jnp.zeros(q_rows.shape, jnp.float32), blocks)
    return from_rows(dq, T, block_q).astype(q.dtype), from_rows(dk, S, block_k), from_rows(dv, S, block_k)


class _Segments:
    """Segment ids in blocks, and the least and largest id of each block; empty without segment ids."""

    def __init__(self, q_ids: jax.Array | None, kv_ids: jax.Array | None, group: int, block_q: int, block_k: int):
        self.block_q, self.block_k = block_q, block_k
        self.q = self.k = None
        if q_ids is not None and kv_ids is not None:
            self.q, self.k = segment_rows(q_ids, group, block_q), segment_blocks(kv_ids, block_k)

    def mask(self, visibility: Visibility, queries: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Returns which rows of query block i see which keys of key block j: bool[B | 1, 1, rows, block_k]."""
        keys = j * self.block_k + jnp.arange(self.block_k, dtype=jnp.int32)
        mask = visibility.mask((i * self.block_q + queries)[:, None], keys[None])[None]
        if self.q is not None and self.k is not None:
            mask = mask & (self.q[i][:, :, None] == self.k[j][:, None, :])
        return mask[:, None]

    def skipping(self, blocks: Any, body: Any) -> Any:
        """Returns a loop body that leaves out pairs of blocks without a segment in common in any batch row."""
        if self.q is None or self.k is None:
            return body
        q_low, q_high = (f(self.q, axis=2) for f in (jnp.min, jnp.max))
        k_low, k_high = (f(self.k, axis=2) for f in (jnp.min, jnp.max))

        def skipping_body(index: jax.Array, state: Any) -> Any:
            i, j = blocks(index)
            may_meet = jnp.any((q_low[i] <= k_high[j]) & (k_low[j] <= q_high[i]))
            return lax.cond(may_meet, lambda: body(index, state), lambda: state)

        return skipping_body


def _tiles(tiles: tuple[int, int] | None, num_q: int, num_k: int) -> tuple[int, int]:
    block_q, block_k = tiles or (BLOCK_Q, BLOCK_K)
    return min(block_q, num_q), min(block_k, num_k)


def _loop(start: Any, end: Any, body: Any, state: Any) -> Any:
    return lax.fori_loop(jnp.int32(start), jnp.int32(end), body, state)


def _to_keys(x: jax.Array, block_k: int) -> jax.Array:
    """Returns [nk, B, K, block_k, H] of [B, S, K, H]: the rows of groups of one head."""
    return to_rows(x, x.shape[2], block_k)


def _to_key_vector(x: jax.Array, block_k: int) -> jax.Array:
    """Returns [nk, B, K, block_k] of [B, K, S]."""
    return to_row_vector(x, x.shape[1], block_k)


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)
