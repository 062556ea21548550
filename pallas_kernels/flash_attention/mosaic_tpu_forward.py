"""Flash attention on TPU, forward."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.blocks import from_row_vector, from_rows, pad_axis, to_rows
from pallas_kernels.flash_attention.float8 import dequantize_blocks
from pallas_kernels.flash_attention.mosaic_tpu_blocks import (
    Segments,
    TpuTiles,
    choose_tiles,
    cost,
    dot_nn,
    for_visible_block,
    mask_scores,
    scores_of,
    split_refs,
)
from pallas_kernels.flash_attention.visibility import Visibility
from pallas_kernels.target import require_tpu

LOWEST = -1e30  # where the running maximum starts: finite, so that exp(-inf - maximum) is 0 and never NaN


def flash_attention_mosaic_tpu(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: Float[Array, "B N q_blocks"] | None = None,
    k_scale: Float[Array, "B K k_blocks"] | None = None,
    v_scale: Float[Array, "B K k_blocks"] | None = None,
    interpret: Any = False,
    tiles: TpuTiles | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Returns (out, lse); see `flash_attention`.

    Algorithm: FlashAttention-2 (Dao 2023), Algorithm 1, on transposed scores (see `mosaic_tpu_blocks`). The grid is
    (B, K, query blocks, key blocks); the last axis has as many steps as the query block with most visible key
    blocks, counted from each block's first visible one, and steps past its last visible one repeat its index,
    which copies nothing. Blocks whose ranges of segment ids do not overlap are skipped; the mask is computed only
    where a block is not wholly visible.

    FLOPs: 4 * N * H per visible (query, key) pair. Bytes: q, out, lse once; K and V once a query block
    (512 / G queries). v5e has 197 TFLOP/s of bf16 and 819 GB/s: a step of 512 x 512 scores at H = 128 is 0.7 us of
    products and 0.3 us of copies, and 256 vector registers of scores at about 12 vector operations each, 1-2 us:
    the exponentials and what surrounds them bound it, so 35-60 % of peak is expected at H = 128. VMEM: 6 MiB.
    Not measured on hardware.

    float8 is dequantized to bfloat16 first (v5e has no float8 arithmetic); float16 is refused (no TPU has it).

    Why not the kernels that JAX 0.12 ships (`jax.experimental.pallas.ops.tpu`): see `mosaic_tpu_backward`.
    """
    require_tpu(interpret)
    if q.dtype == jnp.float16:
        raise NotImplementedError("mosaic_tpu has no float16: TPUs compute in bfloat16 and float32")
    if q_scale is not None:
        q, k, v = (dequantize_blocks(x, s).astype(jnp.bfloat16) for x, s in ((q, q_scale), (k, k_scale), (v, v_scale)))
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    tiles = tiles or choose_tiles(T, S, N // K)
    visibility = Visibility(T, S, causal, sliding_window)
    segments = Segments(q_segment_ids, kv_segment_ids, N // K, tiles)
    rows, num_q_blocks, num_k_blocks = N // K * tiles.block_q, pl.cdiv(T, tiles.block_q), pl.cdiv(S, tiles.block_k)
    ranges = [visibility.key_blocks(i, tiles.block_q, tiles.block_k) for i in range(num_q_blocks)]
    steps = max(1, *(end - start for start, end in ranges))

    def key_block(i: Any, step: Any) -> Any:
        start, end = visibility.key_blocks(i, tiles.block_q, tiles.block_k)
        return jnp.clip(start + step, 0, jnp.maximum(end - 1, 0))

    k, v = (pad_axis(x, 1, num_k_blocks * tiles.block_k) for x in (k, v))
    kernel = functools.partial(
        _kernel, batch=B, steps=steps, has_segments=bool(segments.arrays), visibility=visibility, tiles=tiles,
        scale=scale, soft_cap=soft_cap,
    )  # fmt: skip
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(segments.scalars),
            grid=(B, K, num_q_blocks, steps),
            in_specs=[
                *segments.specs(tiles, N // K, lambda i, step: i, key_block),
                pl.BlockSpec((None, None, None, rows, H), lambda b, h, i, step, *_: (i, b, h, 0, 0)),
                pl.BlockSpec((None, None, tiles.block_k, H), lambda b, h, i, step, *_: (b, h, key_block(i, step), 0)),
                pl.BlockSpec((None, None, H, tiles.block_k), lambda b, h, i, step, *_: (b, h, 0, key_block(i, step))),
            ],
            out_specs=[
                pl.BlockSpec((None, None, None, H, rows), lambda b, h, i, step, *_: (i, b, h, 0, 0)),
                pl.BlockSpec((None, None, None, 1, rows), lambda b, h, i, step, *_: (i, b, h, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((H, rows), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_q_blocks, B, K, H, rows), q.dtype),
            jax.ShapeDtypeStruct((num_q_blocks, B, K, 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=cost(sum(max(0, end - start) for start, end in ranges), tiles, 2, q, k),
        interpret=interpret,
        name="flash_attention_forward",
    )(
        *segments.scalars, *segments.arrays,
        to_rows(q, K, tiles.block_q), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 3, 1),
    )  # fmt: skip
    out = from_rows(out.swapaxes(3, 4), T, tiles.block_q)
    return out, from_row_vector(lse[..., 0, :], T, tiles.block_q)


def _kernel(
    *refs: Any, batch: int, steps: int, has_segments: bool, visibility: Visibility, tiles: TpuTiles, scale: float,
    soft_cap: float | None,
) -> None:  # fmt: skip
    scalars, segment_refs, refs = split_refs(refs, has_segments)
    (
        q_ref,  # [rows, H]
        k_ref,  # [block_k, H]
        v_ref,  # [H, block_k]
        out_ref,  # [H, rows]
        lse_ref,  # f32[1, rows]
        m_ref,  # f32[1, rows]
        l_ref,  # f32[1, rows]
        acc_ref,  # f32[H, rows]
    ) = refs
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    start, end = visibility.key_blocks(i, tiles.block_q, tiles.block_k)
    j = start + step

    @pl.when(step == 0)
    def _() -> None:
        m_ref[...] = jnp.full(m_ref.shape, LOWEST, jnp.float32)
        l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def compute(masked: bool) -> None:
        scores, _ = scores_of(k_ref[...], q_ref[...], scale, soft_cap)
        if masked:
            scores = mask_scores(scores, visibility, tiles, i, j, segment_refs)
        m = m_ref[...]
        m_new = jnp.maximum(m, jnp.max(scores, axis=0, keepdims=True))
        p = jnp.exp(scores - m_new)
        correction = jnp.exp(m - m_new)
        m_ref[...] = m_new
        l_ref[...] = l_ref[...] * correction + jnp.sum(p, axis=0, keepdims=True)
        acc_ref[...] = acc_ref[...] * correction + dot_nn(v_ref[...], p.astype(v_ref.dtype))

    for_visible_block(compute, visibility, tiles, b, i, j, j < end, scalars, batch)

    @pl.when(step == steps - 1)
    def _() -> None:
        l = l_ref[...]
        seen = l > 0
        out_ref[...] = (acc_ref[...] * (1 / jnp.where(seen, l, 1.0))).astype(out_ref.dtype)
        lse_ref[...] = jnp.where(seen, m_ref[...] + jnp.log(jnp.where(seen, l, 1.0)), -jnp.inf)
