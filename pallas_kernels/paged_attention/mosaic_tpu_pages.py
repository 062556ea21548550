"""Blocks of cache pages on a TPU: copied from HBM, two in turn, and turned into matrices in VMEM."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.mosaic_tpu_work import COLUMNS, KEY_END, KEY_START, ROW
from pallas_kernels.pages import Pages, QuantizedPages

MASK_VALUE = -1e30  # finite: exp(MASK_VALUE - m) is 0 for the m of any score, and nothing becomes NaN


class Block(NamedTuple):
    """Keys or values of one head in one block: `(values - zero) * scale`."""

    values: jax.Array  # [block_k, H] in the dtype of the matmul
    scale: jax.Array | None  # f32[1, block_k] of "token" scales; "channel" ones are in `values` already
    zero: jax.Array | None


def operands(pages: Pages) -> list[jax.Array]:
    """Returns the arrays of `pages` that the kernel reads."""
    if isinstance(pages, QuantizedPages):
        return [x for x in (pages.data, pages.scale, pages.zero) if x is not None]
    return [pages]


def buffers(pages: Pages, pages_per_block: int) -> list[Any]:
    """Returns the scratch of `pages`: two blocks of `pages_per_block` pages of all heads."""
    return [pltpu.VMEM((2, x.shape[0], pages_per_block, *x.shape[2:]), x.dtype) for x in operands(pages)]


def compute_dtype(q: jax.Array, *both: Pages) -> jnp.dtype:
    """Returns the dtype of the matmuls: that of q, or float32 if some pages are."""
    wide = any(not isinstance(pages, QuantizedPages) and pages.dtype == jnp.float32 for pages in both)
    return jnp.dtype(jnp.float32) if wide else q.dtype


@dataclasses.dataclass(frozen=True)
class PageStream:
    """The key or value pages inside a kernel; `pages` only describes them."""

    pages: Pages
    hbm: tuple[Any, ...]
    vmem: tuple[Any, ...]

    @classmethod
    def split(cls, refs: tuple[Any, ...], scratch: tuple[Any, ...], k: Pages, v: Pages) -> tuple["PageStream", ...]:
        """Returns the streams of keys and values from the refs of their `operands` and `buffers`."""
        n = len(operands(k))
        return cls(k, refs[:n], scratch[:n]), cls(v, refs[n:], scratch[n:])

    def copies(self, page: jax.Array, slot: jax.Array, i: jax.Array, semaphore: Any) -> list[Any]:
        """Returns the copies of one page, all heads in one descriptor, to place i of block `slot`."""
        return [
            pltpu.make_async_copy(hbm.at[:, page], vmem.at[slot, :, i], semaphore)
            for hbm, vmem in zip(self.hbm, self.vmem)
        ]

    def load(self, slot: jax.Array, head: Any, dtype: jnp.dtype, visible: "Visible | None" = None) -> Block:
        """Returns one head's block; what is not `visible` (and may be NaN) becomes zero."""
        data = self.vmem[0][slot, head]
        pages_per_block, page_size, _ = data.shape
        if not isinstance(self.pages, QuantizedPages):
            values = data.reshape(pages_per_block * page_size, -1)
            if visible is not None:
                values = jnp.where(visible.of_keys(values.shape), values, jnp.zeros_like(values))
            return Block(values.astype(dtype), None, None)

        bits = self.pages.bits
        if bits < 8:
            codes = data.astype(jnp.int32)
            planes = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
            values = jnp.concatenate([plane.astype(jnp.float32) for plane in planes], axis=-1)
        else:
            values = data.astype(jnp.float32)
        extra = [buffer[slot, head] for buffer in self.vmem[1:]]
        if self.pages.axis == "channel":
            scale, *zero = [x[:, None, :] for x in extra]
            values = (values - zero[0] if zero else values) * scale
        values = values.reshape(pages_per_block * page_size, -1)
        if visible is not None:
            values = jnp.where(visible.of_keys(values.shape), values, jnp.zeros_like(values))
        values = values.astype(dtype)
        if self.pages.axis == "channel":
            return Block(values, None, None)
        vectors = [_row(x, None if visible is None else visible) for x in extra]
        return Block(values, vectors[0], vectors[1] if len(vectors) > 1 else None)


class Visible(NamedTuple):
    """The keys [start, end) of a block, counted from its first."""

    start: jax.Array
    end: jax.Array

    def along(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Returns the mask bool[shape] for keys along `axis`."""
        key = lax.broadcasted_iota(jnp.int32, shape, axis)
        return (key >= self.start) & (key < self.end)

    def of_keys(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns the mask of [block_k, H]."""
        return self.along(shape, 0)


def _row(x: jax.Array, visible: Visible | None) -> jax.Array:
    """Returns f32[pages_per_block, page_size] as f32[1, block_k]."""
    row = jnp.concatenate([x[i : i + 1] for i in range(x.shape[0])], axis=1)
    return row if visible is None else jnp.where(visible.along(row.shape, 1), row, 0.0)


def scores(q: jax.Array, k: Block) -> jax.Array:
    """Returns f32[rows, block_k] of q[rows, H] against the keys."""
    s = dot(q.astype(k.values.dtype), k.values, 1)
    if k.zero is not None:
        s = s - jnp.sum(q.astype(jnp.float32), axis=1, keepdims=True) * k.zero
    return s if k.scale is None else s * k.scale


def weigh(p: jax.Array, v: Block) -> jax.Array:
    """Returns f32[rows, H], the values weighed by p, f32[rows, block_k]."""
    if v.scale is not None:
        p = p * v.scale
    out = dot(p.astype(v.values.dtype), v.values, 0)
    return out if v.zero is None else out - jnp.sum(p * v.zero, axis=1, keepdims=True)


def dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """Returns f32 a @ b (contract=0) or a @ b.T (contract=1)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def to_row(column: jax.Array) -> jax.Array:
    """Returns [..., 1, n] of column [..., n, 1]: the diagonal of its broadcast, since lanes are not sublanes."""
    n = column.shape[-2]
    square = (*column.shape[:-1], n)
    axes = (column.ndim - 2, column.ndim - 1)
    on_diagonal = lax.broadcasted_iota(jnp.int32, square, axes[0]) == lax.broadcasted_iota(jnp.int32, square, axes[1])
    return jnp.sum(jnp.where(on_diagonal, column, 0.0), axis=axes[0], keepdims=True)


@dataclasses.dataclass(frozen=True)
class BlockLoop:
    """The pipelined loop over all key blocks of all work items.

    While block n is computed, block n + 1 is copied, be it of the same item or of the next one.
    """

    items: Any  # SMEM i32[W * COLUMNS]
    count: Any  # SMEM i32[1]
    page_table: Any  # SMEM i32[S * M]
    pages_per_row: int
    page_size: int
    pages_per_block: int
    streams: tuple[PageStream, ...]
    semaphores: Any  # DMA[2]

    @property
    def block_k(self) -> int:
        """Keys of a block."""
        return self.page_size * self.pages_per_block

    def item(self, i: jax.Array, column: int) -> jax.Array:
        """Returns a column of work item i."""
        return self.items[i * COLUMNS + column]

    def visible(self, i: jax.Array, block: jax.Array) -> Visible:
        """Returns the keys of the block that some query token of item i sees."""
        base = block * self.block_k
        return Visible(self.item(i, KEY_START) - base, self.item(i, KEY_END) - base)

    def run(
        self,
        prefetch: Callable[[jax.Array], None],
        begin: Callable[[jax.Array], None],
        block: Callable[[jax.Array, jax.Array, jax.Array], None],
        finish: Callable[[jax.Array], None],
    ) -> None:
        """Calls `begin(item)`, `block(item, key block, slot)` for each block and `finish(item)`, for each item.

        `prefetch(item)` is called one block ahead of `begin(item)`.
        """
        count = self.count[0]

        @pl.when(count > 0)
        def _() -> None:
            prefetch(jnp.int32(0))
            self.start(jnp.int32(0), self._first_block(jnp.int32(0)), jnp.int32(0))

        def run_item(i: jax.Array, step: jax.Array) -> jax.Array:
            begin(i)
            end = pl.cdiv(self.item(i, KEY_END), self.block_k)

            def run_block(b: jax.Array, step: jax.Array) -> jax.Array:
                slot = lax.rem(step, 2)
                is_last = b + 1 == end
                next_item = jnp.where(is_last, i + 1, i)

                @pl.when(is_last & (next_item < count))
                def _() -> None:
                    prefetch(next_item)

                @pl.when(next_item < count)
                def _() -> None:
                    next_block = jnp.where(is_last, self._first_block(next_item), b + 1)
                    self.start(next_item, next_block, 1 - slot)

                self.wait(i, b, slot)
                block(i, b, slot)
                return step + 1

            step = lax.fori_loop(self._first_block(i), end, run_block, step)
            finish(i)
            return step

        lax.fori_loop(0, count, run_item, jnp.int32(0))

    def start(self, i: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        """Starts the copies of a block's pages that item i sees."""
        self._each_copy(i, block, slot, lambda copy: copy.start())

    def wait(self, i: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        """Waits for what `start` started."""
        self._each_copy(i, block, slot, lambda copy: copy.wait())

    def _first_block(self, i: jax.Array) -> jax.Array:
        return lax.div(self.item(i, KEY_START), jnp.int32(self.block_k))

    def _each_copy(self, i: jax.Array, block: jax.Array, slot: jax.Array, act: Callable[[Any], None]) -> None:
        first = block * self.pages_per_block
        start = jnp.maximum(lax.div(self.item(i, KEY_START), jnp.int32(self.page_size)) - first, 0)
        end = jnp.minimum(pl.cdiv(self.item(i, KEY_END), self.page_size) - first, self.pages_per_block)
        table = self.item(i, ROW) * self.pages_per_row + first

        def one(j: jax.Array, _: None) -> None:
            page = self.page_table[table + j]
            for stream in self.streams:
                for copy in stream.copies(page, slot, j, self.semaphores.at[slot]):
                    act(copy)

        lax.fori_loop(start, end, one, None)
