"""The work list of ragged paged attention: which query tokens meet which key blocks, in what order.

Computed once a step and shared by all layers with the same sliding window (as FlashInfer's plan is).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

BLOCK_ROWS = 8  # decode rows of one work item
BLOCK_Q = 128  # query tokens of one prefill work item
BLOCK_K = 256  # keys of one block, rounded down to whole pages

# Columns of a work list.
TOKEN_START, TOKEN_END, ROW, BLOCK_START, BLOCK_BASE, BLOCK_END = range(6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Work items i32[W, 6] of decode rows and of all other rows.

    An item covers the query tokens [TOKEN_START, TOKEN_END), from row ROW on, and the blocks
    [BLOCK_START, BLOCK_END) of the running count over all items; block i of the count is key block i - BLOCK_BASE.
    """

    decode_items: jax.Array  # i32[W, 6], `block_rows` rows each
    prefill_items: jax.Array | None  # i32[W, 6], part of one row each; None if every row is a decode row
    positions: jax.Array  # i32[T] position of each query token, -1 for padding
    block_rows: int = dataclasses.field(metadata={"static": True})
    block_q: int = dataclasses.field(metadata={"static": True})
    pages_per_block: int = dataclasses.field(metadata={"static": True})


def make_schedule(
    num_tokens: int,
    page_size: int,
    pages_per_row: int,
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""] | None,
    sliding_window: int | None = None,
) -> Schedule:
    """Returns the work list for T = `num_tokens` query tokens; arguments as for `ragged_paged_attention`."""
    S = kv_lens.shape[0]
    pages_per_block = max(1, min(BLOCK_K // page_size, pages_per_row))
    block_k = pages_per_block * page_size
    block_rows, block_q = min(BLOCK_ROWS, S, num_tokens), min(BLOCK_Q, num_tokens)
    q_lens = jnp.diff(cu_q_lens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    decode_rows = jnp.int32(S) if num_decode_rows is None else num_decode_rows

    if num_decode_rows is None:
        positions = kv_lens[:num_tokens] - 1
        prefill_items = None
    else:
        row = jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
        in_row = jnp.minimum(row, S - 1)
        positions = kv_lens[in_row] - cu_q_lens[in_row + 1] + token
        positions = jnp.where(row < S, positions, -1)

        counts = lax.div(q_lens + (block_q - 1), jnp.int32(block_q))
        counts = jnp.where(jnp.arange(S, dtype=jnp.int32) < decode_rows, 0, counts)
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        item = jnp.arange(num_tokens // block_q + S, dtype=jnp.int32)
        row = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
        in_row = jnp.minimum(row, S - 1)
        start = cu_q_lens[in_row] + (item - ends[in_row] + counts[in_row]) * block_q
        end = jnp.minimum(start + block_q, cu_q_lens[in_row + 1])
        last = kv_lens[in_row] - cu_q_lens[in_row + 1] + end - 1
        last = jnp.where(row < S, last, -1)
        prefill_items = _items(start, end, in_row, last - (end - start) + 1, last, block_k, sliding_window)

    first_row = jnp.arange(0, S, block_rows, dtype=jnp.int32)
    pad = (-S) % block_rows
    is_decode = jnp.arange(S, dtype=jnp.int32) < decode_rows
    last = jnp.pad(jnp.where(is_decode, kv_lens - 1, -1), (0, pad), constant_values=-1).reshape(-1, block_rows)
    longest = jnp.max(last, axis=1)
    shortest = jnp.min(jnp.where(last < 0, longest[:, None], last), axis=1)
    end = jnp.minimum(first_row + block_rows, decode_rows)
    decode_items = _items(first_row, end, first_row, shortest, longest, block_k, sliding_window)
    return Schedule(decode_items, prefill_items, positions, block_rows, block_q, pages_per_block)


def _items(
    token_start: jax.Array, token_end: jax.Array, row: jax.Array, first: jax.Array, last: jax.Array, block_k: int,
    sliding_window: int | None,
) -> jax.Array:  # fmt: skip
    """Returns work items whose queries stand at positions `first` to `last`; last = -1 makes an item empty."""
    first_block = jnp.zeros_like(first)
    if sliding_window is not None:  # blocks that no query of the item sees are not read
        first_block = lax.div(jnp.maximum(first - (sliding_window - 1), 0), jnp.int32(block_k))
    counts = jnp.where(last < 0, 0, lax.div(last, jnp.int32(block_k)) + 1 - first_block)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts
    return jnp.stack([token_start, token_end, row, starts, starts - first_block, ends], axis=1)
