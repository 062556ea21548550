"""Rings of key or value blocks in shared memory: fetched page by page, handed to wgmma as bf16."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.tiles import TileConfig
from pallas_kernels.pages import Pages, QuantizedPages

TILE = plgpu.Layout.WGMMA


def parts(pages: Pages) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the arrays of pages: data, scales, zeros."""
    return (pages.data, pages.scale, pages.zero) if isinstance(pages, QuantizedPages) else (pages, None, None)


def swizzled(width: int) -> Any:
    """Returns the layout that wgmma and TMA read without bank conflicts, for 16-bit rows used `width` at a time."""
    swizzle = plgpu.find_swizzle(width * 16)
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // 2)), swizzling(swizzle)


class RingMemory(NamedTuple):
    """Shared memory and barriers of a ring; `raw`, `scale` and `zero` exist for quantized pages."""

    block: Any  # [stages, block_k, H] as wgmma wants it; for quantized pages [block_k, H]
    raw: Any  # [stages, block_k, bytes]
    scale: Any  # f32[stages, block_k] or f32[stages, H]
    zero: Any
    full: Any  # barriers: the block has arrived, ...
    empty: Any  # ... all warpgroups are done with it, ...
    fixed: Any  # ... the slots beyond the row's last value are zero


@dataclasses.dataclass(frozen=True)
class PageRing:
    """A ring of blocks of `tiles.block_k` keys or values from pages of one precision."""

    tiles: TileConfig
    page_size: int
    head_dim: int
    dtype: Any  # that wgmma multiplies in
    quantized: bool
    bits: int
    axis: str
    has_zero: bool
    raw_dtype: Any
    pages_per_row: int

    @classmethod
    def of(cls, pages: Pages, tiles: TileConfig, dtype: Any, pages_per_row: int) -> "PageRing":
        """Returns the ring for `pages`."""
        _, _, page_size, H = pages.shape
        if isinstance(pages, QuantizedPages):
            raw = pages.data.dtype
            return cls(
                tiles, page_size, H, dtype, True, pages.bits, pages.axis, pages.zero is not None, raw, pages_per_row
            )
        return cls(tiles, page_size, H, dtype, False, 16, "token", False, pages.dtype, pages_per_row)

    @property
    def planes(self) -> int:
        """Values in one byte of a packed page."""
        return max(1, 8 // self.bits)

    @property
    def copies(self) -> int:
        """Pages of a block, of which each is one copy."""
        return max(1, self.tiles.block_k // self.page_size)

    def scratch(self) -> RingMemory:
        """Returns the types of the ring's shared memory."""
        t, H = self.tiles, self.head_dim
        shape = (t.block_k, H) if self.quantized else (t.stages, t.block_k, H)
        block = plgpu.SMEM(shape, self.dtype, transforms=swizzled(H // self.planes))
        per_block = t.block_k if self.axis == "token" else H
        side = plgpu.SMEM((t.stages, per_block), jnp.float32)
        parts = 1 + self.quantized + self.has_zero
        return RingMemory(
            block,
            plgpu.SMEM((t.stages, t.block_k, H * self.bits // 8), self.raw_dtype) if self.quantized else None,
            side if self.quantized else None,
            side if self.has_zero else None,
            plgpu.Barrier(num_arrivals=self.copies * parts, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=1) if t.warpgroups > 1 else None,
        )

    def fetch(
        self, source: Any, memory: RingMemory, page_indices: Any, row: Any, head: Any, block: Any, step: Any
    ) -> None:
        """Starts the copies of key block `block` of a row, when its place in the ring is free."""
        t, size = self.tiles, self.page_size
        slot = lax.rem(step, t.stages)
        last = self.pages_per_row - 1  # a block may reach beyond the table; what it reads there is masked
        if size <= t.block_k:
            pages = [page_indices[row, jnp.minimum(block * self.copies + i, last)] for i in range(self.copies)]
            offset = None
        else:
            per_page = size // t.block_k
            pages = [page_indices[row, jnp.minimum(lax.div(block, per_page), last)]]
            offset = pl.multiple_of(lax.rem(block, per_page) * t.block_k, t.block_k)

        @pl.when(step >= t.stages)
        def _() -> None:
            plgpu.barrier_wait(memory.empty.at[slot])

        data, scale, zero = source
        target = memory.raw if self.quantized else memory.block
        for i, page in enumerate(pages):
            rows = pl.ds(i * size, size) if offset is None else slice(None)
            values = data.at[head, page] if offset is None else data.at[head, page, pl.ds(offset, t.block_k)]
            plgpu.copy_gmem_to_smem(values, target.at[slot].at[rows], memory.full.at[slot])
            for side, place in ((scale, memory.scale), (zero, memory.zero)):
                if side is None:
                    continue
                values = side.at[head, page]
                if self.axis == "token" and offset is not None:
                    values = side.at[head, page, pl.ds(offset, t.block_k)]
                into = place.at[slot].at[rows] if self.axis == "token" else place.at[slot]
                plgpu.copy_gmem_to_smem(values, into, memory.full.at[slot])

    def take(self, memory: RingMemory, step: Any, block: Any, kv_len: Any, *, masked: bool, fixes: Any) -> Any:
        """Returns the block of `step` [block_k, H] once it has arrived.

        Where `masked`, slots beyond `kv_len` become zero, since probability 0 times whatever lies there may be NaN;
        of the warpgroups that share a block the one with `fixes` does it.
        """
        t = self.tiles
        slot = lax.rem(step, t.stages)
        plgpu.barrier_wait(memory.full.at[slot])
        if self.quantized:
            self._dequantize(memory, slot, kv_len - block * t.block_k if masked else None)
            return memory.block
        target = memory.block.at[slot]
        if masked:

            def fix() -> None:
                width = max(w for w in (16, 32, 64) if self.head_dim % w == 0)  # few registers at a time
                key = plgpu.broadcasted_iota(jnp.int32, (t.block_k, width), 0, layout=TILE) + block * t.block_k
                for start in range(0, self.head_dim, width):
                    columns = target.at[:, start : start + width]
                    values = plgpu.load(columns, layout=TILE)
                    columns[...] = jnp.where(key < kv_len, values, jnp.zeros_like(values))
                plgpu.commit_smem()

            @pl.when((block + 1) * t.block_k > kv_len)
            def _() -> None:
                if t.warpgroups == 1:
                    fix()
                    return

                @pl.when(fixes)
                def _() -> None:
                    fix()
                    plgpu.barrier_arrive(memory.fixed)

                @pl.when(jnp.logical_not(fixes))
                def _() -> None:
                    plgpu.barrier_wait(memory.fixed)

        return target

    def release(self, memory: RingMemory, step: Any) -> None:
        """Gives the place of `step` back; quantized blocks gave it back when they were unpacked."""
        if not self.quantized:
            plgpu.barrier_arrive(memory.empty.at[lax.rem(step, self.tiles.stages)])

    def _dequantize(self, memory: RingMemory, slot: Any, valid: Any) -> None:
        """Unpacks raw block `slot` into the one bf16 block; rows from `valid` on become zero."""
        planes = self.planes
        width = self.head_dim // planes
        shape = (self.tiles.block_k, width)
        axis = 1 if self.axis == "token" else 0
        raw = plgpu.load(memory.raw.at[slot], layout=TILE, optimized=False)
        sides = [
            [
                plgpu.load(place.at[slot].at[pl.ds(p * width, width)], layout=TILE.reduce(0), optimized=False)
                for p in range(planes)
            ]
            if self.axis == "channel"
            else [plgpu.load(place.at[slot], layout=TILE.reduce(1), optimized=False)] * planes
            for place in (memory.scale, memory.zero)
            if place is not None
        ]
        for p in range(planes):
            values = raw
            if self.bits < 8:
                values = lax.shift_right_logical(values.astype(jnp.int32), jnp.full(shape, p * self.bits, jnp.int32))
                values = values & (2**self.bits - 1)
            values = values.astype(jnp.float32)
            scale, *zero = (lax.broadcast_in_dim(side[p], shape, [1 - axis]) for side in sides)
            if zero:
                values = values - zero[0]
            values = values * scale
            if valid is not None:
                key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
                values = jnp.where(key < valid, values, 0.0)
            memory.block[:, p * width : (p + 1) * width] = values.astype(self.dtype)
        plgpu.commit_smem()  # also orders the reads above before the next copy into the same place
        plgpu.barrier_arrive(memory.empty.at[slot])
