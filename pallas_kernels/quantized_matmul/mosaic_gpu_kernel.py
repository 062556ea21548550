"""The kernel of `mosaic_gpu`: one warpgroup copies, the others unpack and multiply."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul.mosaic_gpu_pipeline import (
    COLUMNS,
    COPY_REGISTERS,
    ROWS,
    along,
    block,
    compute_registers,
    part,
    produce,
    store,
)
from pallas_kernels.quantized_matmul.mosaic_gpu_unpack import CODE_OFFSET, units
from pallas_kernels.quantized_matmul.tiles import SCALES_PER_STEP, TileConfig

# A thread holds the SCALES_PER_STEP scales of the rows it has in an accumulator: taking one is no communication.
_SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, SCALES_PER_STEP), (16, SCALES_PER_STEP), (8, SCALES_PER_STEP))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the kernel is traced.

    Attributes:
        names: of the operands: "x", "data", "scale", and "zero" and "sums" where they are used.
        tiles: sizes.
        K: inputs.
        bits: of a weight.
        group: inputs with one scale.
        sum_group: inputs with one sum of x: the part of a group inside a step.
        unit: inputs a wgmma.
        float8: whether 8-bit weights are floating point.
        on_weights: whether scales of groups are applied to the weights, else to the accumulators.
        transposed: whether the result is written in its final form.
        inline: whether inline code is used, which the interpreter does not know.
    """

    names: tuple[str, ...]
    tiles: TileConfig
    K: int
    bits: int
    group: int
    sum_group: int
    unit: int
    float8: bool
    on_weights: bool
    transposed: bool
    inline: bool


def kernel(*refs: Any, plan: Plan, **scratch: Any) -> None:
    """Computes a block of the product; `refs` are the operands and the result, `scratch` what `_matmul` allocates."""
    names, tiles, K, bits, group, sum_group = plan.names, plan.tiles, plan.K, plan.bits, plan.group, plan.sum_group
    unit, on_weights, transposed = plan.unit, plan.on_weights, plan.transposed
    gmem = dict(zip(names, refs, strict=False))
    out = refs[len(names)]
    split, n, m = lax.axis_index("split"), lax.axis_index("n"), lax.axis_index("m")
    warpgroup = lax.axis_index("warpgroup")
    start, count = part(split, tiles.splits, K // tiles.block_k)
    full, empty = scratch["full"], scratch["empty"]
    block_m, block_n, block_k, stages = tiles.block_m, tiles.block_n, tiles.block_k, tiles.stages

    @pl.when(warpgroup == tiles.warpgroups)
    def _producer() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        rows = block(n, block_n)
        columns = block(m, block_m)

        def copies(k: Any, slot: Any, barrier: Any) -> None:
            def copy(name: str, *index: Any) -> None:
                plgpu.copy_gmem_to_smem(gmem[name].at[index], scratch[f"{name}_smem"].at[slot], barrier)

            row_bytes = block_k * bits // 8
            copy("data", rows, block(k, row_bytes))
            copy("x", columns, block(k, block_k))
            for name in ("scale", "zero"):
                if f"{name}_smem" in scratch:
                    first = lax.div(k * block_k, jnp.int32(group * SCALES_PER_STEP)) * SCALES_PER_STEP
                    copy(name, rows, pl.ds(pl.multiple_of(first, SCALES_PER_STEP), SCALES_PER_STEP))
            if "sums_smem" in scratch:
                copy("sums", block(k, block_k // sum_group), columns)

        produce(copies, full, empty, start, count, stages)

    @pl.when(warpgroup < tiles.warpgroups)
    def _consumer() -> None:
        plgpu.set_max_registers(compute_registers(tiles.warpgroups), action="increase")
        rows = block(warpgroup, 64)
        shape = (64, block_m)
        outputs = pl.ds(pl.multiple_of(n * block_n + warpgroup * 64, 64), 64)

        def pieces(slot: Any) -> list[tuple[int, jax.Array]]:
            width = min(128, block_k * bits // 8)
            found = []
            for c in range(block_k * bits // 8 // width):
                chunk = plgpu.load(
                    scratch["data_smem"].at[slot, rows, pl.ds(c * width, width)], layout=plgpu.Layout.WGMMA_UPCAST_2X
                )
                dtype = scratch["x_smem"].dtype
                found += [
                    (k + c * width * 8 // bits, a) for k, a in units(chunk, bits, unit, dtype, plan.float8, plan.inline)
                ]
            return found

        def multiply(acc: Any, slot: Any, k: int, a: jax.Array) -> None:
            plgpu.wgmma(acc, a, scratch["x_smem"].at[slot, :, pl.ds(k, unit)].T)

        def scale_and_shift(slot: Any, k: Any, offset: int) -> tuple[jax.Array, jax.Array | None]:
            """The scale of the group of input `offset` of step k, and what a weight of 0 stands for."""
            column = lax.rem(lax.div(k * block_k + offset, jnp.int32(group)), jnp.int32(SCALES_PER_STEP))
            scale = _column(plgpu.load(scratch["scale_smem"].at[slot, rows], layout=_SCALES), column)
            zero = None
            if "zero_smem" in scratch:
                zero = _column(plgpu.load(scratch["zero_smem"].at[slot, rows], layout=_SCALES), column)
            return scale, _shift(scale, zero, bits)

        def release(slot: Any) -> None:
            plgpu.commit_smem()  # orders the loads of this slot before the copies that fill it again
            plgpu.barrier_arrive(empty.at[slot])

        def sum_of(slot: Any, i: int) -> jax.Array:
            return plgpu.load(scratch["sums_smem"].at[slot, i], layout=COLUMNS)

        if group == K or on_weights:
            sums = "sums_smem" in scratch

            def accumulate(acc: Any) -> tuple[jax.Array, jax.Array | None]:
                def step(i: Any, total: Any) -> Any:
                    slot = lax.rem(i, jnp.int32(stages))
                    plgpu.barrier_wait(full.at[slot])
                    for k, a in pieces(slot):
                        if on_weights:
                            scale, shift = scale_and_shift(slot, start + i, k)
                            a = _dequantize(a, scale, shift)
                        multiply(acc, slot, k, a)
                    if sums:
                        total = total + sum_of(slot, 0)
                    plgpu.wgmma_wait(0)
                    release(slot)
                    return total

                zeros = plgpu.layout_cast(jnp.zeros((block_m,), jnp.float32), COLUMNS) if sums else None
                total = lax.fori_loop(jnp.int32(0), jnp.int32(count), step, zeros)
                return acc[...], total

            values, total = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            if group == K:
                scale = plgpu.load(gmem["scale"].at[outputs], layout=ROWS, optimized=False)
                zero = None
                if "zero" in gmem:
                    zero = plgpu.load(gmem["zero"].at[outputs], layout=ROWS, optimized=False)
                values = values * along(scale, shape, 0)
                shift = _shift(scale, zero, bits)
                if total is not None and shift is not None:
                    values = values + along(shift, shape, 0) * along(total, shape, 1)
        else:

            def step(i: Any, values: jax.Array) -> jax.Array:
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                found = pieces(slot)
                for g in range(block_k // sum_group):

                    def one(acc: Any, g: int = g) -> jax.Array:
                        for k, a in found:
                            if k // sum_group == g:
                                multiply(acc, slot, k, a)
                        return acc[...]

                    product = pl.run_scoped(one, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
                    scale, shift = scale_and_shift(slot, start + i, g * sum_group)
                    values = values + product * along(scale, shape, 0)
                    if shift is not None:
                        values = values + along(shift, shape, 0) * along(sum_of(slot, g), shape, 1)
                release(slot)
                return values

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            values = lax.fori_loop(jnp.int32(0), jnp.int32(count), step, zeros)

        m_block = block(m, block_m)
        target = out.at[split, m_block, outputs] if transposed else out.at[split, outputs, m_block]
        store(values, scratch["stage"].at[warpgroup], target, transposed)


def _column(values: jax.Array, column: Any) -> jax.Array:
    """Column `column` of f32[64, SCALES_PER_STEP]: a selection, as a sum of bit patterns of which one is not 0."""
    index = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=_SCALES)
    patterns = jnp.where(index == column, lax.bitcast_convert_type(values, jnp.int32), 0)
    return lax.bitcast_convert_type(jnp.sum(patterns, axis=1), jnp.float32)


def _shift(scale: jax.Array, zero: jax.Array | None, bits: int) -> jax.Array | None:
    """`(offset - zero) * scale`: what a weight unpacked as 0 stands for; None for nothing."""
    offset = CODE_OFFSET if bits == 4 else 0
    if zero is None:
        return scale * jnp.float32(offset) if offset else None
    return (jnp.float32(offset) - zero) * scale


def _dequantize(a: jax.Array, scale: jax.Array, shift: jax.Array | None) -> jax.Array:
    """`a * scale + shift` of each row, rounded once."""
    values = a.astype(jnp.float32) * along(scale, a.shape, 0)
    if shift is not None:
        values = values + along(shift, a.shape, 0)
    return values.astype(a.dtype)
