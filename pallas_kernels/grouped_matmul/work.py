"""The work list of a grouped product: which rows of which group a tile of rows holds."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

BLOCK, GROUP, START, END = range(4)  # columns of the items


def max_items(num_rows: int, num_groups: int, block_rows: int) -> int:
    """Returns the most items that rows of `num_groups` groups and of no group can make."""
    blocks = -(-num_rows // block_rows)
    return min(num_rows, blocks + num_groups)


def make_items(
    group_sizes: Int[Array, " G"], num_rows: int, block_rows: int
) -> tuple[Int[Array, "W 4"], Int[Array, " 1"]]:
    """Returns the work items of rows sorted by group, and how many of them there are.

    An item is a part of the block of rows `block * block_rows : (block + 1) * block_rows` that one group owns: rows
    `start : end`. Group G stands for the rows after the last group. Every block is cut at the borders of its groups,
    empty groups have no item, and every row is in one item. Items after the last real one repeat it with no rows, so
    that whoever reads their weights reads nothing new.

    Args:
        group_sizes: rows of each group, in the order of the rows; their sum is at most `num_rows`.
        num_rows: rows in all.
        block_rows: rows of a block.
    """
    groups = group_sizes.shape[0]
    sizes = group_sizes.astype(jnp.int32)
    sizes = jnp.append(sizes, num_rows - jnp.sum(sizes, dtype=jnp.int32))
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    size = jnp.int32(block_rows)
    first = lax.div(starts, size)
    counts = jnp.where(sizes > 0, lax.div(ends - 1, size) + 1 - first, 0)
    item_ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(max_items(num_rows, groups, block_rows), dtype=jnp.int32)
    real = jnp.minimum(index, item_ends[-1] - 1)
    group = jnp.searchsorted(item_ends, real, side="right", method="compare_all").astype(jnp.int32)
    block = first[group] + real - (item_ends - counts)[group]
    end = jnp.minimum(ends[group], (block + 1) * size)
    start = jnp.where(index < item_ends[-1], jnp.maximum(starts[group], block * size), end)
    return jnp.stack([block, group, start, end], axis=1), item_ends[-1:]
