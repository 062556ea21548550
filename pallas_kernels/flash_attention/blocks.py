"""Rows: the queries of all G heads that share a KV head, in blocks of equal size.

Row g * block_q + t of block i is query i * block_q + t of head g of the group, so one product with a key block
serves the whole group and no key is ever repeated.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def pad_axis(x: jax.Array, axis: int, size: int, mode: str = "constant") -> jax.Array:
    """Returns `x` padded at the end of `axis` up to `size`, with zeros or, by mode "edge", with its last element."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return x if size == x.shape[axis] else jnp.pad(x, widths, mode=mode)


def to_rows(x: Shaped[Array, "B T N H"], num_kv_heads: int, block_q: int) -> Shaped[Array, "nq B K rows H"]:
    """Returns blocks of G * block_q rows; queries past the last are zero."""
    B, T, N, H = x.shape
    G, num_blocks = N // num_kv_heads, -(-T // block_q)
    x = pad_axis(x, 1, num_blocks * block_q).reshape(B, num_blocks, block_q, num_kv_heads, G, H)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(num_blocks, B, num_kv_heads, G * block_q, H)


def from_rows(rows: Shaped[Array, "nq B K rows H"], num_q: int, block_q: int) -> Shaped[Array, "B T N H"]:
    """Returns the inverse of `to_rows` without its padding."""
    num_blocks, B, K, _, H = rows.shape
    x = rows.reshape(num_blocks, B, K, -1, block_q, H).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, num_blocks * block_q, -1, H)[:, :num_q]


def to_row_vector(x: Float[Array, "B N T"], num_kv_heads: int, block_q: int) -> Float[Array, "nq B K rows"]:
    """Returns `to_rows` for one number a query and head."""
    return to_rows(x.transpose(0, 2, 1)[..., None], num_kv_heads, block_q)[..., 0]


def from_row_vector(rows: Float[Array, "nq B K rows"], num_q: int, block_q: int) -> Float[Array, "B N T"]:
    """Returns the inverse of `to_row_vector`."""
    return from_rows(rows[..., None], num_q, block_q)[..., 0].transpose(0, 2, 1)


def segment_rows(ids: Int[Array, "B T"], group: int, block_q: int) -> Int[Array, "nq B rows"]:
    """Returns the segment id of each row; padding repeats the last id, which widens no block's range of ids."""
    num_blocks = -(-ids.shape[1] // block_q)
    ids = pad_axis(ids, 1, num_blocks * block_q, "edge").reshape(ids.shape[0], num_blocks, block_q)
    return jnp.tile(ids.transpose(1, 0, 2), (1, 1, group))


def segment_blocks(ids: Int[Array, "B S"], block: int) -> Int[Array, "nk B block"]:
    """Returns the segment ids of each block of keys; padding repeats the last id."""
    return segment_rows(ids, 1, block)


def row_queries(group: int, block_q: int) -> Int[Array, " rows"]:
    """Returns the query, counted from the start of its block, of each row."""
    return jnp.tile(jnp.arange(block_q, dtype=jnp.int32), group)


def row_delta(
    out: Float[Array, "B T N H"], d_out: Float[Array, "B T N H"], d_lse: Float[Array, "B N T"] | None
) -> Float[Array, "B N T"]:
    """Returns D (Dao 2023, Algorithm 2, line 4): sum of out * d_out over channels, less the gradient of lse.

    With P the weights and dP = d_out v^T, the gradient of the scores is P * (dP - sum(out * d_out) + d_lse).
    """
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32), precision="highest")
    return delta if d_lse is None else delta - d_lse
