"""The work lists of the TPU kernels: functions of the lengths alone, so that XLA merges those of all layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

# Columns of a work list. An item is one row's part of one tile of query tokens: `TILE` is the tile (the token itself
# when decoding), it sees the keys [KEY_START, KEY_END) of row `ROW`, and opens or closes its tile if `FIRST`, `LAST`.
TILE, ROW, KEY_START, KEY_END, FIRST, LAST = range(6)
COLUMNS = 6


class WorkList(NamedTuple):
    """Items in the order of their tiles, then padding; at least one item of padding."""

    items: jax.Array  # i32[W * COLUMNS], row-major: one dimension, since scalar memory pads the last of several
    count: jax.Array  # i32[1]


def decode_work(kv_lens: Int[Array, " S"], cu_q_lens: Int[Array, " S+1"], window: int | None) -> WorkList:
    """Returns one item for each row with one query token; arguments as for `prefill_work`."""
    S = kv_lens.shape[0]
    row = _first_where((jnp.diff(cu_q_lens) == 1) & (kv_lens > 0))
    in_row = jnp.minimum(row, S - 1)
    end = kv_lens[in_row]
    start = jnp.zeros_like(end) if window is None else jnp.maximum(end - window, 0)
    one = jnp.ones_like(end)
    return _work_list([cu_q_lens[in_row], in_row, start, end, one, one], row < S)


def prefill_work(
    kv_lens: Int[Array, " S"], cu_q_lens: Int[Array, " S+1"], num_tokens: int, block_q: int, window: int | None
) -> WorkList:
    """Returns one item for each row with several query tokens and each tile that it touches.

    Args:
        kv_lens: keys of each row.
        cu_q_lens: prefix sum of the query lengths.
        num_tokens: T.
        block_q: query tokens of a tile; tiles are fixed parts of the T tokens, so that copies are aligned.
        window: width of the sliding window, or None.
    """
    S = kv_lens.shape[0]
    q_lens = jnp.diff(cu_q_lens)
    first_tile = lax.div(cu_q_lens[:-1], jnp.int32(block_q))
    counts = lax.div(cu_q_lens[1:] - 1, jnp.int32(block_q)) + 1 - first_tile
    counts = jnp.where(q_lens > 1, counts, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    item = jnp.arange(min(-(-num_tokens // block_q) + S, num_tokens), dtype=jnp.int32)
    row = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
    is_item = row < S
    row = jnp.minimum(row, S - 1)
    tile = first_tile[row] + item - (ends - counts)[row]

    shift = kv_lens[row] - cu_q_lens[row + 1]  # position of a token minus its index
    first = shift + jnp.maximum(tile * block_q, cu_q_lens[row])
    end = shift + jnp.minimum((tile + 1) * block_q, cu_q_lens[row + 1])
    start = jnp.zeros_like(first) if window is None else jnp.maximum(first - (window - 1), 0)
    marked = jnp.where(is_item, tile, -1)
    opens = marked != jnp.pad(marked, (1, 0), constant_values=-2)[:-1]
    closes = marked != jnp.pad(marked, (0, 1), constant_values=-2)[1:]
    return _work_list([tile, row, start, end, opens.astype(jnp.int32), closes.astype(jnp.int32)], is_item)


def _first_where(condition: jax.Array) -> jax.Array:
    """Returns the indices at which `condition` holds, in order, filled up with its length."""
    size = condition.shape[0]
    place = jnp.where(condition, jnp.cumsum(condition, dtype=jnp.int32) - 1, size)
    return jnp.full(size, size, jnp.int32).at[place].set(jnp.arange(size, dtype=jnp.int32), mode="drop")


def _work_list(columns: list[jax.Array], is_item: jax.Array) -> WorkList:
    items = jnp.where(is_item[:, None], jnp.stack(columns, axis=1), 0)
    items = jnp.pad(items, ((0, 1), (0, 0)))  # the loop looks one item ahead
    return WorkList(items.reshape(-1), jnp.sum(is_item, dtype=jnp.int32)[None])
