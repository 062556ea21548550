"""The attention that each key receives, summed where the key lies: what H2O chooses by.

It follows from queries, keys and the log-sum-exp that attention returns, so that the kernels need not know of it. One
more product of queries and keys than attention itself, without that of the values: 2 * N * H FLOPs a visible pair.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import Schedule
from pallas_kernels.paged_attention.schedule import (
    BLOCK_BASE,
    BLOCK_END,
    ROW,
    TOKEN_END,
    TOKEN_START,
)
from pallas_kernels.pages import Pages, dequantize


def add_key_mass(
    mass: Float[Array, "K P page_size"],
    q: Float[Array, "T N H"],
    k_pages: Pages,
    lse: Float[Array, "T N"],
    page_indices: Int[Array, "S M"],
    schedule: Schedule,
    *,
    scale: float,
) -> Float[Array, "K P page_size"]:
    """Returns `mass` with exp(score - lse) of the step's queries added at each key they see.

    Args:
        mass: sums so far, f32.
        q: query tokens of all rows.
        k_pages: keys, this step's included.
        lse: f32, logarithm of the sum of exp(score) over all keys of each query.
        page_indices: pages of each row.
        schedule: of the rows that count; a row for which it was made with no keys adds nothing.
        scale: factor on the scores.
    """
    (T, N, H), (K, _, page_size) = q.shape, mass.shape
    s = schedule
    tail = max(s.block_rows, s.block_q)
    pages = jnp.pad(page_indices, ((0, s.block_rows), (0, s.pages_per_block)))
    positions = jnp.pad(s.positions, (0, tail), constant_values=-1)
    q = jnp.pad((q * scale).reshape(T, K, N // K, H), ((0, tail), (0, 0), (0, 0), (0, 0)))
    lse = jnp.pad(lse.reshape(T, K, N // K), ((0, tail), (0, 0), (0, 0)))

    def run(items: jax.Array, rows: int, num_q: int, mass: jax.Array) -> jax.Array:
        """Adds what all work items of `rows` rows with `num_q` query tokens each say."""
        size = rows * num_q

        def by_row(x: jax.Array, start: jax.Array) -> jax.Array:
            """Returns f[K, rows, num_q * G, ...] of the tokens from `start` on."""
            tile = lax.dynamic_slice_in_dim(x, start, size).reshape(rows, num_q, *x.shape[1:])
            return jnp.moveaxis(tile, 2, 0).reshape(K, rows, -1, *x.shape[3:])

        def block(index: jax.Array, mass: jax.Array) -> jax.Array:
            item = items[jnp.sum(items[:, BLOCK_END] <= index, dtype=jnp.int32)]
            tokens, key_block = item[TOKEN_START], index - item[BLOCK_BASE]
            where = lax.dynamic_slice(pages, (item[ROW], key_block * s.pages_per_block), (rows, s.pages_per_block))
            k = dequantize(jax.tree.map(lambda x: x[:, where], k_pages)).reshape(K, rows, -1, H).astype(q.dtype)
            valid = tokens + jnp.arange(size, dtype=jnp.int32) < item[TOKEN_END]
            q_position = jnp.where(valid, lax.dynamic_slice_in_dim(positions, tokens, size), -1).reshape(rows, num_q)
            k_position = key_block * k.shape[2] + jnp.arange(k.shape[2], dtype=jnp.int32)
            mask = jnp.repeat(k_position[None, None] <= q_position[:, :, None], N // K, axis=1)
            scores = jnp.einsum("krqh,krsh->krqs", by_row(q, tokens), k, preferred_element_type=jnp.float32)
            p = jnp.where(mask[None], jnp.exp(scores - by_row(lse, tokens)[..., None]), 0.0)
            return mass.at[:, where].add(jnp.sum(p, axis=2).reshape(K, rows, s.pages_per_block, page_size))

        return lax.fori_loop(0, items[-1, BLOCK_END], block, mass)

    mass = run(s.decode_items, s.block_rows, 1, mass)
    return mass if s.prefill_items is None else run(s.prefill_items, 1, s.block_q, mass)
