"""What the Mosaic GPU kernels of flash attention share: which blocks are visited, which elements are visible."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

HEAD_DIMS = (64, 80, 96, 128, 256)
LOG2E = math.log2(math.e)
ACC: Any = plgpu.WGMMAAccumulatorRef  # whose instances stand for arrays, which no type says
run_state: Any = pl.run_state
_COLUMNS: Any = plgpu.Layout.WGMMA.reduce(0)
UNSEEN = -1e30
"""Running maximum of a row that has seen nothing: finite, so that its difference with itself is 0."""


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: query t is at position t + S - T among the S keys.

    With `mask_all` every block counts as one that needs a mask: where segment ids have to be compared, or where a loop
    more, and the order that puts the masked blocks first, would take registers that are not there.
    """

    num_queries: int
    num_keys: int
    causal: bool
    sliding_window: int | None
    mask_all: bool

    @property
    def offset(self) -> int:
        """Position of query 0 among the keys."""
        return self.num_keys - self.num_queries

    def key_blocks(self, query: Any, rows: int, block: int) -> "Blocks":
        """Returns the key blocks that queries `query : query + rows` visit."""
        first = first_whole = 0
        end = end_whole = self.num_keys
        if self.causal:
            end = query + rows + self.offset
            end_whole = query + self.offset + 1
        if self.sliding_window is not None:
            first = query + self.offset - self.sliding_window + 1
            first_whole = first + rows - 1
        return self._blocks(first, first_whole, end_whole, end, block, self.num_keys, self.num_keys)

    def query_blocks(self, key: Any, rows: int, block: int) -> "Blocks":
        """Returns the query blocks that see keys `key : key + rows`.

        Queries past the last one need no mask: they and the gradients of their outputs are 0.
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
    ) -> "Blocks":
        """Rounds ranges of elements to ranges of blocks."""
        first = _floor(_clip(first, size - 1), block)
        end = jnp.maximum(_ceil(_clip(end, size), block), first + 1)
        if self.mask_all:
            return Blocks(first, end, end, end)
        first_whole = jnp.clip(_ceil(_clip(first_whole, whole_size), block), first, end)
        return Blocks(first, first_whole, jnp.clip(_floor(_clip(end_whole, whole_size), block), first_whole, end), end)

    def visible(
        self, query: Any, key: Any, shape: tuple[int, ...], columns_smem: Any, *, queries_first: bool = True
    ) -> jax.Array | None:
        """Returns which elements of a block of scores are visible, or None where all are, whatever the block.

        Args:
            query: first query of the block.
            key: first key of the block.
            shape: of the block, in the WGMMA layout.
            columns_smem: what `number_columns` wrote, or None for numbers in registers.
            queries_first: rows are queries and columns keys, else the other way about.
        """
        ragged = queries_first and self.num_keys % shape[1] > 0
        if not (ragged or self.causal or self.sliding_window is not None):
            return None  # before any unused array is made, of which the compiler could not infer the layout
        columns = _numbers(shape[1]) if columns_smem is None else plgpu.load(columns_smem, layout=_COLUMNS)
        columns = columns_like(columns, shape)
        terms = [columns < self.num_keys - key] if ragged else []
        if self.causal or self.sliding_window is not None:
            # The scalars meet the rows, of which a thread has two; adding them to the columns would fill registers.
            rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
            ahead = query + self.offset - key
            diagonal: Any = rows + (ahead if queries_first else -ahead)  # the column at which key and query meet
        if self.causal:
            limit = rows_like(diagonal, shape)
            terms.append(columns <= limit if queries_first else columns >= limit)
        if self.sliding_window is not None:
            width = -self.sliding_window if queries_first else self.sliding_window
            limit = rows_like(diagonal + width, shape)
            terms.append(columns > limit if queries_first else columns < limit)
        return functools.reduce(jnp.logical_and, terms)

    def loops(self, visit: "Blocks", block_kv: int | None) -> list[tuple[Any, Any, bool]]:
        """Returns (begin, end, masked) of the loops over a visit, leaving out those that are always empty.

        Args:
            visit: of key blocks or query blocks.
            block_kv: number of keys of a visited block; None for a visit of query blocks.
        """
        if self.mask_all:
            return [(0, visit.count, True)]
        ragged = block_kv is not None and self.num_keys % block_kv > 0
        if not (self.causal or self.sliding_window is not None or ragged):
            return [(0, visit.count, False)]
        return [(0, visit.masked, True), (visit.masked, visit.count, False)]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Visited blocks [first, end), at least one, of which [first_whole, end_whole) need no mask (i32 scalars).

    Those that need one come first, the last of them first of all: index i of the visit is block `block(i)`.
    """

    first: jax.Array
    first_whole: jax.Array
    end_whole: jax.Array
    end: jax.Array

    @property
    def count(self) -> jax.Array:
        """Number of visited blocks."""
        return self.end - self.first

    @property
    def masked(self) -> jax.Array:
        """Number of visited blocks that need a mask."""
        return self.count - (self.end_whole - self.first_whole)

    def block(self, index: Any) -> jax.Array:
        """Returns the block that is visited at `index` of `count`."""
        trailing = self.end - self.end_whole
        leading = jnp.where(index < self.masked, self.first - trailing, self.first_whole - self.masked)
        return jnp.where(index < trailing, self.end - 1 - index, leading + index)


def where_visible(
    visibility: Visibility, query: Any, key: Any, x: jax.Array, q_ids: jax.Array | None, k_ids: jax.Array | None,
    hidden: float = 0.0, *, columns_smem: Any = None, queries_first: bool = True,
) -> jax.Array:  # fmt: skip
    """Returns x[rows, columns] with `hidden` where the query does not see the key."""
    mask = visibility.visible(query, key, x.shape, columns_smem, queries_first=queries_first)
    if q_ids is not None and k_ids is not None:
        rows, columns = (q_ids, k_ids) if queries_first else (k_ids, q_ids)
        same = rows_like(rows, x.shape) == columns_like(columns, x.shape)
        mask = same if mask is None else mask & same
    return x if mask is None else jnp.where(mask, x, hidden)


def require_supported(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Declines dtypes and head dims for which there are no tiles.

    Raises:
        NotImplementedError: naming what is supported and what was given.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"mosaic_gpu takes q, k and v all in bfloat16 or all in float16, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"mosaic_gpu takes head dims {HEAD_DIMS}, got {q.shape[-1]}")


def scores(scale: float, soft_cap: float | None) -> tuple[Callable[[jax.Array], jax.Array], float]:
    """Returns (f, factor): f(q @ k) * factor is the score in base 2.

    The factor is positive, so that it commutes with the maximum.
    """
    if soft_cap is not None:
        return lambda s: jnp.tanh(s * (scale / soft_cap)), soft_cap * LOG2E
    if scale <= 0:
        return lambda s: s * scale, LOG2E
    return lambda s: s, scale * LOG2E


def tiled(head_dim: int, dtype: Any, contracted: int | None = None) -> tuple[Any, Any]:
    """Returns the transforms of a [rows, head_dim] tile in shared memory that wgmma can read.

    Where wgmma contracts over so many `contracted` rows, they must be a multiple of the elements of a swizzle.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(math.gcd(head_dim, contracted or 0) * bits)
    tiling: Any = plgpu.TilingTransform  # abstract to the type checker alone
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle * 8 // bits)), swizzling(swizzle)


def pad_rows(x: jax.Array, axis: int, multiple: int = 8, value: Any = 0) -> jax.Array:
    """Pads `axis` to the multiple of 8 that a tiled copy needs; the copies themselves stop at the end of the array."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def rows_like(x: Any, shape: tuple[int, ...]) -> jax.Array:
    """Repeats x[rows] over the columns of a block."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns_like(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats x[columns] over the rows of a block."""
    return lax.broadcast_in_dim(x, shape, [1])


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """Returns an f32 constant in the layout of a wgmma accumulator, or of its row sums."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def number_columns(columns_smem: Any) -> None:
    """Writes 0, 1, ... for `Visibility.visible`; each warpgroup needs its own.

    As an iota they would be hoisted out of the loop, and a thread hold one in four of them all the time.
    """
    columns_smem[...] = _numbers(columns_smem.shape[0])
    plgpu.commit_smem()


def _numbers(count: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=_COLUMNS)


def _clip(x: Any, limit: int) -> jax.Array:
    return jnp.clip(jnp.asarray(x, jnp.int32), 0, limit)


def _floor(x: jax.Array, block: int) -> jax.Array:
    return lax.div(x, jnp.asarray(block, jnp.int32))


def _ceil(x: jax.Array, block: int) -> jax.Array:
    return _floor(x + (block - 1), block)
