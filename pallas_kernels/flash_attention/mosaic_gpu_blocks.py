"""What the Mosaic GPU kernels of flash attention share: which blocks are visited, which elements are visible."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

HEAD_DIMS = (64, 80, 96, 128, 256)
LOG2E = math.log2(math.e)
UNSEEN = -1e30
"""Running maximum of a row that has seen nothing: finite, so that its difference with itself is 0."""


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: query t is at position t + S - T among the S keys.

    With `segments` no block counts as wholly visible, since every element has to be compared.
    """

    num_queries: int
    num_keys: int
    causal: bool
    sliding_window: int | None
    segments: bool

    @property
    def offset(self) -> int:
        """Position of query 0 among the keys."""
        return self.num_keys - self.num_queries

    def key_blocks(self, query: Any, rows: int, block: int) -> tuple[Any, Any, Any, Any]:
        """Returns (first, first_whole, end_whole, end): the key blocks that queries `query : query + rows` visit.

        Of the blocks [first, end), those in [first_whole, end_whole) are visible to all of the queries.
        """
        first = first_whole = 0
        end = end_whole = self.num_keys
        if self.causal:
            end = query + rows + self.offset
            end_whole = query + self.offset + 1
        if self.sliding_window is not None:
            first = query + self.offset - self.sliding_window + 1
            first_whole = first + rows - 1
        return self._blocks(first, first_whole, end_whole, end, block, self.num_keys, self.num_keys)

    def query_blocks(self, key: Any, rows: int, block: int) -> tuple[Any, Any, Any, Any]:
        """Returns (first, first_whole, end_whole, end): the query blocks that see keys `key : key + rows`.

        Queries past the last one need no mask, as their probabilities are 0 by their logsumexp.
        """
        padded = pl.cdiv(self.num_queries, block) * block
        first = first_whole = 0
        end, end_whole = self.num_queries, padded
        if self.causal:
            first = key - self.offset
            first_whole = first + rows - 1
        if self.sliding_window is not None:
            end = key + rows - 1 - self.offset + self.sliding_window
            end_whole = key - self.offset + self.sliding_window
        return self._blocks(first, first_whole, end_whole, end, block, self.num_queries, padded)

    def _blocks(
        self, first: Any, first_whole: Any, end_whole: Any, end: Any, block: int, size: int, whole_size: int
    ) -> tuple[Any, Any, Any, Any]:
        """Rounds ranges of elements to ranges of blocks, of which at least one is visited."""
        first = _floor(_clip(first, size - 1), block)
        end = jnp.maximum(_ceil(_clip(end, size), block), first + 1)
        if self.segments:
            return first, end, end, end
        first_whole = jnp.clip(_ceil(_clip(first_whole, whole_size), block), first, end)
        end_whole = jnp.clip(_floor(_clip(end_whole, whole_size), block), first_whole, end)
        return first, first_whole, end_whole, end

    def visible(self, query: Any, key: Any, shape: tuple[int, int], *, queries_first: bool = True) -> jax.Array | None:
        """Returns which elements of a block of scores are visible, or None where all are, whatever the block.

        Args:
            query: first query of the block.
            key: first key of the block.
            shape: of the block, in the WGMMA layout.
            queries_first: rows are queries and columns keys, else the other way about.
        """
        query_ids, key_ids = (_iota(shape, 0), _iota(shape, 1)) if queries_first else (_iota(shape, 1), _iota(shape, 0))
        terms = []
        if queries_first and self.num_keys % shape[1]:
            terms.append(key_ids < self.num_keys - key)
        if self.causal:
            terms.append(key_ids - query_ids <= query + self.offset - key)
        if self.sliding_window is not None:
            terms.append(key_ids - query_ids > query + self.offset - key - self.sliding_window)
        return functools.reduce(jnp.logical_and, terms) if terms else None


def tiled(head_dim: int, dtype: Any) -> tuple[Any, Any]:
    """Returns the transforms of a [rows, head_dim] tile in shared memory that wgmma can read."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(head_dim * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def pad_rows(x: jax.Array, axis: int, multiple: int = 8, value: Any = 0) -> jax.Array:
    """Pads `axis` to the multiple of 8 that a tiled copy needs; the copies themselves stop at the end of the array."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def rows_like(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeats x[rows] over the columns of a block."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns_like(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeats x[columns] over the rows of a block."""
    return lax.broadcast_in_dim(x, shape, [1])


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """Returns an f32 constant in the layout of a wgmma accumulator, or of its row sums."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _iota(shape: tuple[int, int], dimension: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _clip(x: Any, limit: int) -> jax.Array:
    return jnp.clip(jnp.asarray(x, jnp.int32), 0, limit)


def _floor(x: jax.Array, block: int) -> jax.Array:
    return lax.div(x, jnp.asarray(block, jnp.int32))


def _ceil(x: jax.Array, block: int) -> jax.Array:
    return _floor(x + (block - 1), block)
