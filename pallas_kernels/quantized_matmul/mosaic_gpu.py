"""x[M, K] (16 bits) times weights in 8 or 4 bits on Hopper, dequantized in registers.

The product is computed transposed, out^T = W x^T: 64 rows of W, unpacked in registers, are the left operand of wgmma
and the tile of x, as TMA laid it out, is the right one, which may be as narrow as 8 rows of x. W crosses the memory bus
once for every `block_m` rows of x, never in another form than it is stored in.

Where scales go. One scale an output: once, on the accumulators. One scale a group of inputs and few rows of x: the
group is accumulated by itself and then scaled, block_m / 2 multiplications a thread and group of 64 rows, where scaling
the weights would take group / 2; the weights stay exact and the scale stays f32. Many rows of x: on the weights, in
f32, rounded to 16 bits once. A zero point (and the offset of the 4-bit codes) is not subtracted from the weights
either, but enters as `(offset - zero) * scale * sum(x of the group)`.

FLOPs 2 M N K; bytes N K bits / 8 + 4 N K / group (twice with zero points) + 2 M K + M N out. On an H200 (4.8 TB/s, 989
TFLOP/s) the memory bounds up to M of about 50 for 4 bits. Expected: at M <= 16 about 75 % of the bandwidth (the
pipeline holds three times what Little's law asks for, but unpacking four bits takes about 2.8 of the 3.1 operations a
lane has for each weight at 4.8 TB/s), so some 2.8 times bf16; at M >= 1024 about 65 % of the tensor peak (conversion in
one warpgroup hides under the products of the other, the loop is not persistent). Not measured on hardware.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.mosaic_gpu_pipeline import (
    COLUMNS,
    COPY_REGISTERS,
    ROWS,
    along,
    block,
    compute_registers,
    finish,
    out_type,
    pad_rows,
    part,
    produce,
    stage_type,
    store,
    tiled,
)
from pallas_kernels.quantized_matmul.mosaic_gpu_unpack import CODE_OFFSET, PLANE, units
from pallas_kernels.quantized_matmul.mosaic_gpu_w8a8 import quantized_matmul_w8a8
from pallas_kernels.quantized_matmul.tiles import SCALES_PER_STEP, TileConfig, choose_tiles
from pallas_kernels.quantized_matmul.weights import QuantizedWeight
from pallas_kernels.target import require_hopper

# A thread holds the SCALES_PER_STEP scales of the rows it has in an accumulator: taking one is no communication.
_SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, SCALES_PER_STEP), (16, SCALES_PER_STEP), (8, SCALES_PER_STEP))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


def quantized_matmul_mosaic_gpu(
    x: Float[Array, "M K"],
    weight: QuantizedWeight,
    *,
    x_scale: Float[Array, " M"] | None = None,
    out_dtype: Any = None,
    interpret: Any = False,
    tiles: TileConfig | None = None,
) -> Float[Array, "M N"]:
    """Returns `x @ dequantize_weight(weight).T` (times `x_scale[:, None]`), accumulated in f32.

    Args:
        x: bf16 or f16, or int8 / float8_e4m3fn with `x_scale` (see `mosaic_gpu_w8a8`).
        weight: N and K multiples of 64.
        x_scale: f32[M] scale of each row of an 8-bit x.
        out_dtype: of the result, x's (bf16 for an 8-bit x) by default.
        interpret: parameters of the interpreter, False on a device.
        tiles: sizes, `choose_tiles` by default.

    Raises:
        NotImplementedError: another device, type or shape.
    """
    require_hopper(interpret)
    N, K = weight.shape
    if N % 64 or K % 64:
        raise NotImplementedError(f"mosaic_gpu needs N and K that are multiples of 64, got {N=}, {K=}")
    if x.shape[0] == 0:
        raise NotImplementedError("mosaic_gpu needs at least one row")
    if x_scale is not None:
        return quantized_matmul_w8a8(x, weight, x_scale, out_dtype or jnp.bfloat16, interpret, tiles)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu needs x in bfloat16 or float16 (or 8 bits with x_scale), got {x.dtype}")
    if weight.group != K and weight.group not in (32, 64, 128):
        raise NotImplementedError(f"mosaic_gpu needs groups of 32, 64, 128 or all inputs, got {weight.group}")
    tiles = tiles or choose_tiles(x.shape[0], N, K, weight.bits, weight.group, weight.zero is not None)
    if N % tiles.block_n or K % tiles.block_k or tiles.splits > K // tiles.block_k:
        raise NotImplementedError(f"{tiles} does not fit {N=}, {K=}")
    if weight.group != K and tiles.block_k > SCALES_PER_STEP * weight.group:
        raise NotImplementedError(f"block_k={tiles.block_k} holds more than {SCALES_PER_STEP} groups of {weight.group}")
    return _matmul(x, weight, jnp.dtype(out_dtype or x.dtype), interpret, tiles)


def _matmul(x: jax.Array, weight: QuantizedWeight, out_dtype: Any, interpret: Any, tiles: TileConfig) -> jax.Array:
    N, K = weight.shape
    rows = x.shape[0]
    x = pad_rows(x, tiles.block_m)
    M = x.shape[0]
    whole = weight.group == K
    on_weights = not whole and tiles.block_m >= 128
    shifted = weight.bits == 4 or weight.zero is not None
    sums = shifted and not on_weights
    sum_group = min(weight.group, tiles.block_k)

    data = weight.data if weight.bits == 4 else lax.bitcast_convert_type(weight.data, jnp.uint8)
    scale, zero = weight.scale, weight.zero
    if whole:
        scale, zero = scale[:, 0], None if zero is None else zero[:, 0]
    elif missing := -scale.shape[1] % SCALES_PER_STEP:  # rows of a multiple of 16 bytes, as TMA demands
        scale = jnp.pad(scale, ((0, 0), (0, missing)))
        zero = None if zero is None else jnp.pad(zero, ((0, 0), (0, missing)))
    operands = {"x": x, "data": data, "scale": scale}
    if zero is not None:
        operands["zero"] = zero
    if sums:
        operands["sums"] = jnp.sum(x.reshape(M, -1, sum_group), axis=-1, dtype=jnp.float32).T
    names = tuple(operands)

    unit = PLANE if weight.bits == 4 or sum_group == 32 else 64
    row_bytes = tiles.block_k * weight.bits // 8
    stages, block_m, block_n = tiles.stages, tiles.block_m, tiles.block_n
    scratch = {
        "x_smem": plgpu.SMEM((stages, block_m, tiles.block_k), x.dtype, transforms=tiled(unit * 2, x.dtype)),
        "data_smem": plgpu.SMEM((stages, block_n, row_bytes), jnp.uint8, transforms=tiled(row_bytes, jnp.uint8)),
    }
    boxes = [] if whole else [name for name in ("scale", "zero") if name in operands]
    for name in boxes:
        scratch[f"{name}_smem"] = plgpu.SMEM((stages, block_n, SCALES_PER_STEP), jnp.float32)
    if sums:
        scratch["sums_smem"] = plgpu.SMEM((stages, tiles.block_k // sum_group, block_m), jnp.float32)
    out, transposed = out_type(tiles.splits, M, N, out_dtype)
    scratch["stage"] = stage_type(tiles.warpgroups, block_m, out.dtype, transposed)
    scratch["full"] = plgpu.Barrier(num_arrivals=2 + len(boxes) + sums, num_barriers=stages)
    scratch["empty"] = plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=stages)
    body = functools.partial(
        _kernel, names=names, tiles=tiles, K=K, bits=weight.bits, group=weight.group, sum_group=sum_group, unit=unit,
        float8=weight.data.dtype == jnp.float8_e4m3fn, on_weights=on_weights, transposed=transposed,
    )  # fmt: skip
    written = plgpu.kernel(
        body,
        out_type=out,
        grid=(tiles.splits, N // block_n, M // block_m),
        grid_names=("split", "n", "m"),  # the last runs fastest: neighbours share weights
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(*operands.values())
    return finish(written, rows, transposed, out_dtype)


def _kernel(*refs, names, tiles, K, bits, group, sum_group, unit, float8, on_weights, transposed, **scratch) -> None:
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
                found += [(k + c * width * 8 // bits, a) for k, a in units(chunk, bits, unit, dtype, float8)]
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

            values, total = pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))
            if group == K:
                scale = plgpu.load(gmem["scale"].at[outputs], layout=ROWS, optimized=False)
                zero = None
                if "zero" in gmem:
                    zero = plgpu.load(gmem["zero"].at[outputs], layout=ROWS, optimized=False)
                values = values * along(scale, shape, 0)
                if total is not None:
                    values = values + along(_shift(scale, zero, bits), shape, 0) * along(total, shape, 1)
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

                    product = pl.run_scoped(one, plgpu.ACC(shape, jnp.float32))
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
