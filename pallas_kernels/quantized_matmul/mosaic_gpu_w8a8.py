"""Both operands in 8 bits on Hopper: int8 with s32 sums, float8_e4m3fn with f32 sums.

As in `mosaic_gpu`, out^T = W x^T with 64 rows of W a warpgroup, but both operands go from shared memory straight into
wgmma; the scale of the row of x and of the output multiply the sums at the end. The products of step i run while
step i + 1 arrives; a slot is handed back when the products of the step after it have been issued.

int8 sums are exact (K up to 2^31 / 2^14). Hopper's float8 products are added with fewer bits than f32 has, so that the
sum of each step is added to the total by ordinary f32 additions (as in DeepSeek-V3, section 3.3.2); total and sum
together allow 128 rows of x a block.

FLOPs 2 M N K; bytes N K + M K + 4 (M + N) + M N out. On an H200 (1979 T/s in both types) the memory bounds up to M of
about 200. Expected: at M <= 16 about 85 % of the bandwidth (no conversion, 100 KB an SM in flight), at M >= 1024 about
60 % of the peak for int8 and 50 % for float8 (blocks of 128 x 256 and 128 x 128 need 96 and 128 bytes of shared memory
a clock of its 128; the loop is not persistent). Not measured on hardware.
"""

import functools
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
    finish,
    out_type,
    pad_rows,
    part,
    produce,
    stage_type,
    store,
    tiled,
)
from pallas_kernels.quantized_matmul.tiles import TileConfig, choose_tiles
from pallas_kernels.quantized_matmul.weights import QuantizedWeight


def quantized_matmul_w8a8(
    x: jax.Array, weight: QuantizedWeight, x_scale: jax.Array, out_dtype: Any, interpret: Any, tiles: TileConfig | None
) -> jax.Array:
    """Returns `(x @ data.T) * x_scale[:, None] * scale`; x[M, K] and the weights are both int8 or both float8_e4m3fn.

    Raises:
        NotImplementedError: other types, one scale for less than all inputs, a zero point, or tiles that do not fit.
    """
    N, K = weight.shape
    if weight.bits != 8 or x.dtype != weight.data.dtype or x.dtype not in (jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(
            "mosaic_gpu needs an 8-bit x and weights of one type, int8 or float8_e4m3fn, "
            f"got {x.dtype} and {weight.bits} bits of {weight.data.dtype}"
        )
    if weight.group != K or weight.zero is not None:
        raise NotImplementedError(
            f"mosaic_gpu multiplies 8-bit x by weights with one scale an output and no zero point, got {weight.group=}"
        )
    float8 = x.dtype == jnp.float8_e4m3fn
    tiles = tiles or choose_tiles(x.shape[0], N, K, 8, K, x_bytes=1, most_rows=128 if float8 else 256)
    if N % tiles.block_n or K % tiles.block_k or tiles.splits > K // tiles.block_k:
        raise NotImplementedError(f"{tiles} does not fit {N=}, {K=}")
    rows = x.shape[0]
    x, x_scale = pad_rows(x, tiles.block_m), pad_rows(x_scale, tiles.block_m)
    M, stages = x.shape[0], tiles.stages
    out, transposed = out_type(tiles.splits, M, N, jnp.dtype(out_dtype))
    operand = functools.partial(plgpu.SMEM, dtype=x.dtype, transforms=tiled(tiles.block_k, x.dtype))
    written = plgpu.kernel(
        functools.partial(_kernel, tiles=tiles, K=K, float8=float8, transposed=transposed),
        out_type=out,
        grid=(tiles.splits, N // tiles.block_n, M // tiles.block_m),
        grid_names=("split", "n", "m"),  # the last runs fastest: neighbours share weights
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "x_smem": operand((stages, tiles.block_m, tiles.block_k)),
            "data_smem": operand((stages, tiles.block_n, tiles.block_k)),
            "stage": stage_type(tiles.warpgroups, tiles.block_m, out.dtype, transposed),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="quantized_matmul_float8" if float8 else "quantized_matmul_int8",
    )(x, weight.data, x_scale, weight.scale[:, 0])
    return finish(written, rows, transposed, out_dtype)


def _kernel(
    x_gmem,  # [M, K]
    data_gmem,  # [N, K]
    x_scale_gmem,  # f32[M]
    scale_gmem,  # f32[N]
    out_gmem,  # [1, M, N], or f32[splits, N, M]
    *,
    x_smem,  # [stages, block_m, block_k]
    data_smem,  # [stages, block_n, block_k]
    stage,
    full,
    empty,
    tiles: TileConfig,
    K: int,
    float8: bool,
    transposed: bool,
) -> None:
    split, n, m = lax.axis_index("split"), lax.axis_index("n"), lax.axis_index("m")
    warpgroup = lax.axis_index("warpgroup")
    start, count = part(split, tiles.splits, K // tiles.block_k)

    @pl.when(warpgroup == tiles.warpgroups)
    def _producer() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")

        def copies(k: Any, slot: Any, barrier: Any) -> None:
            inputs = block(k, tiles.block_k)
            plgpu.copy_gmem_to_smem(data_gmem.at[block(n, tiles.block_n), inputs], data_smem.at[slot], barrier)
            plgpu.copy_gmem_to_smem(x_gmem.at[block(m, tiles.block_m), inputs], x_smem.at[slot], barrier)

        produce(copies, full, empty, start, count, tiles.stages)

    @pl.when(warpgroup < tiles.warpgroups)
    def _consumer() -> None:
        plgpu.set_max_registers(compute_registers(tiles.warpgroups), action="increase")
        shape = (64, tiles.block_m)

        def multiply(acc: Any, i: Any) -> Any:
            slot = lax.rem(i, jnp.int32(tiles.stages))
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(acc, data_smem.at[slot, block(warpgroup, 64)], x_smem.at[slot].T)
            return slot

        if float8:

            def step(i: Any, total: jax.Array) -> jax.Array:
                def one(acc: Any) -> jax.Array:
                    multiply(acc, i)
                    return acc[...]

                total = total + pl.run_scoped(one, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
                plgpu.barrier_arrive(empty.at[lax.rem(i, jnp.int32(tiles.stages))])
                return total

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            values = lax.fori_loop(jnp.int32(0), jnp.int32(count), step, zeros)
        else:

            def accumulate(acc: Any) -> jax.Array:
                def step(i: Any, _: None) -> None:
                    multiply(acc, i)
                    plgpu.wgmma_wait(1)

                    @pl.when(i > 0)
                    def _release() -> None:
                        plgpu.barrier_arrive(empty.at[lax.rem(i - 1, jnp.int32(tiles.stages))])

                lax.fori_loop(jnp.int32(0), jnp.int32(count), step, None)
                return acc[...]

            values = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.int32)).astype(jnp.float32)

        outputs = pl.ds(pl.multiple_of(n * tiles.block_n + warpgroup * 64, 64), 64)
        scale = plgpu.load(scale_gmem.at[outputs], layout=ROWS, optimized=False)
        x_scale = plgpu.load(x_scale_gmem.at[block(m, tiles.block_m)], layout=COLUMNS, optimized=False)
        values = values * along(scale, shape, 0) * along(x_scale, shape, 1)
        columns = block(m, tiles.block_m)
        target = out_gmem.at[split, columns, outputs] if transposed else out_gmem.at[split, outputs, columns]
        store(values, stage.at[warpgroup], target, transposed)
