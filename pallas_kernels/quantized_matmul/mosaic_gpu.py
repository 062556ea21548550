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
TFLOP/s) the memory bounds up to M of about 50 for 4 bits. Expected at M <= 16: about 70 % of the bandwidth inside the
kernel (three times what Little's law asks for is in flight and unpacking takes 1.8 of the 3.1 operations a lane has for
each weight, but waves are not full: 112 blocks on 132 multiprocessors for N = 14336), so some 2.5 times bf16; the sums
of x, and the adding of parts where K is split, are operations of XLA of about 2 us each, of which the first may be
shared by all products of one x. At M >= 1024 about 65 % of the tensor peak: conversion in one warpgroup hides under the
products of the other, but the loop is not persistent. Not measured on hardware.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.mosaic_gpu_kernel import Plan, kernel
from pallas_kernels.quantized_matmul.mosaic_gpu_pipeline import (
    finish,
    out_type,
    pad_rows,
    stage_type,
    tiled,
)
from pallas_kernels.quantized_matmul.mosaic_gpu_unpack import PLANE
from pallas_kernels.quantized_matmul.mosaic_gpu_w8a8 import quantized_matmul_w8a8
from pallas_kernels.quantized_matmul.tiles import SCALES_PER_STEP, TileConfig, choose_tiles
from pallas_kernels.quantized_matmul.weights import QuantizedWeight
from pallas_kernels.target import require_hopper


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
    scratch: dict[str, Any] = {
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
    plan = Plan(
        names, tiles, K, weight.bits, weight.group, sum_group, unit,
        float8=weight.data.dtype == jnp.float8_e4m3fn, on_weights=on_weights, transposed=transposed,
        inline=not interpret,
    )  # fmt: skip
    written = plgpu.kernel(
        functools.partial(kernel, plan=plan),
        out_type=out,
        grid=(tiles.splits, N // block_n, M // block_m),
        grid_names=("split", "n", "m"),  # the last runs fastest: neighbours share weights
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name=f"quantized_matmul_w{weight.bits}a16",
    )(*operands.values())
    return finish(written, rows, transposed, out_dtype)
