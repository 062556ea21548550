"""The grouped product on Hopper."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.mosaic_gpu_rows import grouped_rows
from pallas_kernels.grouped_matmul.tiles import TileConfig, choose_tiles
from pallas_kernels.grouped_matmul.work import make_items
from pallas_kernels.target import require_hopper


def grouped_matmul_mosaic_gpu(
    x: Float[Array, "T K"],
    weights: Float[Array, "E N K"],
    group_sizes: Int[Array, " E"],
    *,
    tiles: TileConfig | None = None,
    interpret: Any = False,
) -> Float[Array, "T N"]:
    """See `grouped_matmul`.

    Algorithm: the tile walk of MegaBlocks (Gale et al., MLSys 2023) over a work list made by XLA, in the kernel of
    `grouped_rows`: persistent, one warpgroup loads by TMA, two multiply by wgmma. An expert without rows is never
    read; rows after the last group are written as 0 without a product.

    FLOPs 2 * T * N * K; bytes, at least, those of x, of the result and of the experts with rows. T rows are padded to
    whole tiles, with a copy of x if that changes T.

    Shared memory: 208 KiB at 128 x 256 (3 steps of 48 KiB, 64 KiB of result), one block an SM.

    Expected on an H200, not measured on hardware. Prefill (512 rows an expert and more): a unit of 128 x 256 x 4096 is
    64 steps of 512 cycles of tensor time at the peak rate, and at its end both warpgroups store at once, not under the
    products of the next unit: some 3,000 cycles, hence at best 90 % of 989 TFLOP/s, less what power takes and less the
    tiles cut at borders of experts. Decode: bound by the weights at 4.8 TB/s; 64 * 256 * 2 FLOPs a column of
    64 KiB need a third of that time, so 85 % of the bandwidth is the aim.

    Why not what exists: `jax.lax.ragged_dot` becomes a dense product on GPU (see `grouped_matmul_xla`); JAX ships
    an example kernel (ops/gpu/ragged_dot_mgpu.py, with `transpose_rhs` for our layout) that compiles for H200, but has
    one warpgroup that loads and multiplies in turn, no 128 x 256 tile, a scan over all experts unrolled
    into every block (64 experts: 169 registers, 7 s), products for idle tiles, undefined rows after the last group,
    and needs K to be a multiple of its tile.

    Raises:
        NotImplementedError: not a Hopper GPU; not bf16 or f16; N or K no multiple of 16.
        ValueError: tiles that do not divide the matrices.
    """
    require_hopper(interpret)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu multiplies bfloat16 or float16, got {x.dtype}")
    num_rows, depth = x.shape
    tiles = tiles or choose_tiles(num_rows, *weights.shape)
    tiles.check(weights.shape[1], depth)
    items, count = make_items(group_sizes, num_rows, tiles.block_rows)
    if num_rows % tiles.block_rows:
        x = jnp.pad(x, ((0, -num_rows % tiles.block_rows), (0, 0)))
    return grouped_rows(
        x, weights, items, count, name="grouped_matmul", tiles=tiles, out_rows=num_rows, out_dtype=x.dtype,
        interpret=interpret,
    )[0]  # fmt: skip
