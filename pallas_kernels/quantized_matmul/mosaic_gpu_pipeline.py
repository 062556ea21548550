"""What the Hopper kernels of this operation share: copies in flight and the way out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = plgpu.Layout.WGMMA.reduce(1)  # a number for each row of an accumulator
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # a number for each column
COPY_REGISTERS = 40  # a thread of the copying warpgroup

Copies = Callable[[Any, Any, Any], None]  # (step, slot, barrier) -> starts the copies of a step


def tiled(row_bytes: int, dtype: Any) -> tuple[Any, Any]:
    """Returns the layout of rows of `row_bytes` (a multiple of 32) in shared memory that wgmma reads: 8 rows a tile."""
    swizzle = next(size for size in (128, 64, 32) if row_bytes % size == 0)
    transform: Any = plgpu.TilingTransform
    swizzled: Any = plgpu.SwizzleTransform
    return transform((8, swizzle // jnp.dtype(dtype).itemsize)), swizzled(swizzle)


def part(index: Any, splits: int, steps: int) -> tuple[Any, Any]:
    """Returns the first step of part `index` of `splits` and the number of its steps."""
    if splits == 1:
        return jnp.int32(0), steps
    start = lax.div(index * steps, splits)
    return start, lax.div((index + 1) * steps, splits) - start


def produce(copies: Copies, full: Any, empty: Any, start: Any, count: Any, stages: int) -> None:
    """Copies step after step into the slots as the consumers leave them."""

    def step(i: Any, _: None) -> None:
        slot = lax.rem(i, jnp.int32(stages))

        @pl.when(i >= stages)
        def _wait() -> None:
            plgpu.barrier_wait(empty.at[slot])

        copies(start + i, slot, full.at[slot])

    lax.fori_loop(jnp.int32(0), jnp.int32(count), step, None)


def store(values: Any, stage: Any, out: Any, transposed: bool) -> None:
    """Writes the [64, block_m] tile of a warpgroup, in pieces of at most 64 columns.

    Args:
        values: f32[64, block_m] in the layout of a wgmma accumulator.
        stage: shared memory of this warpgroup: [64, piece], or [piece, 64] if `transposed`.
        out: the block in memory: [64, block_m], or [block_m, 64] if `transposed`.
        transposed: as said.
    """
    block_m = values.shape[1]
    piece = min(block_m, 64)
    for i in range(block_m // piece):
        columns = lax.slice(values, (0, i * piece), (64, (i + 1) * piece)).astype(stage.dtype)
        if i:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if transposed:
            stage.T[...] = columns
            target = out.at[pl.ds(i * piece, piece)]
        else:
            stage[...] = columns
            target = out.at[:, pl.ds(i * piece, piece)]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, target)
    plgpu.wait_smem_to_gmem(0)


def stage_type(warpgroups: int, block_m: int, dtype: Any, transposed: bool) -> Any:
    """Returns the shared memory from which `store` writes, one piece a warpgroup."""
    piece = min(block_m, 64)
    shape = (piece, 64) if transposed else (64, piece)
    return plgpu.SMEM((warpgroups, *shape), dtype, transforms=tiled(shape[1] * jnp.dtype(dtype).itemsize, dtype))


def out_type(splits: int, M: int, N: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, bool]:
    """Returns the array the kernel writes, and whether that is the transpose of its tiles (the final form)."""
    if splits == 1 and jnp.dtype(dtype).itemsize == 2:
        return jax.ShapeDtypeStruct((1, M, N), dtype), True
    return jax.ShapeDtypeStruct((splits, N, M), jnp.float32), False


def finish(out: jax.Array, rows: int, transposed: bool, dtype: Any) -> jax.Array:
    """Returns [rows, N] of what the kernel wrote: the sum of the parts in a fixed order, rows of padding cut off."""
    if transposed:
        return out[0, :rows]
    total = out[0] if out.shape[0] == 1 else jnp.sum(out, axis=0)
    return total.T[:rows].astype(dtype)


def pad_rows(x: jax.Array, multiple: int) -> jax.Array:
    """Returns x with rows of zeros up to the next multiple."""
    missing = -x.shape[0] % multiple
    return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x


def block(index: Any, size: int) -> Any:
    """Returns the slice of block `index`, known to start at a multiple of its size."""
    return pl.ds(pl.multiple_of(index * size, size), size)


def along(vector: jax.Array, shape: tuple[int, ...], dimension: int) -> jax.Array:
    """Returns the vector repeated to `shape`, running along `dimension`."""
    return lax.broadcast_in_dim(vector, shape, [dimension])


def compute_registers(warpgroups: int) -> int:
    """Returns the registers of a multiplying thread: of 64 K, what COPY_REGISTERS leaves, in eights, 240 at most."""
    return min(240, (65536 - 128 * COPY_REGISTERS) // (128 * warpgroups) // 8 * 8)
