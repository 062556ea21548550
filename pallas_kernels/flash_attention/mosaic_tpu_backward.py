"""Flash attention on TPU, backward.

Why not the kernels that JAX ships in `jax.experimental.pallas.ops.tpu` (read, compiled for v5e and tried in 0.12.0.1).
`flash_attention` has neither GQA (K must equal N), windows, soft caps nor lengths off its blocks, and gives no lse.
`splash_attention` has GQA, windows, soft caps, segment ids and gradients, and compiles for v5e at H = 64, 128, 256, but
  - with `save_residuals=True`, which returns lse, its gradient raises "Higher-order AD not supported": neither
    training beside lse nor a gradient through it;
  - a query that sees nothing (T = 256, S = 128, causal) gets NaN, where 0 and -inf are meant;
  - a length of 1000 is refused: "q_block_size=128 should divide q_seq_len=1000";
  - the mask is an object worked through on the host for every shape: 3.3 s for 32 heads at 16k here, where
    tracing and lowering these kernels takes 0.1-0.5 s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.blocks import from_rows, pad_axis, row_delta, to_row_vector, to_rows
from pallas_kernels.flash_attention.mosaic_tpu_blocks import (
    Segments,
    TpuTiles,
    choose_tiles,
    cost,
    dot_nn,
    dot_nt,
    for_visible_block,
    mask_scores,
    scores_of,
    split_refs,
)
from pallas_kernels.flash_attention.visibility import Visibility
from pallas_kernels.target import require_tpu


def flash_attention_backward_mosaic_tpu(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B N T"],
    d_out: Float[Array, "B T N H"],
    d_lse: Float[Array, "B N T"] | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interpret: Any = False,
    tiles: TpuTiles | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Returns (dq, dk, dv).

    Algorithm: FlashAttention-2 (Dao 2023), Algorithm 2, as two kernels, so that no gradient is read back: one with
    the grid (B, K, key blocks, query blocks) sums dk and dv in VMEM, over the G heads of a group too, one with the
    grid of the forward pass sums dq. Weights are recomputed from lse in both: seven products instead of five.

    FLOPs: 14 * N * H per visible (query, key) pair. Bytes: q, d_out once a key block, K, V once a query block, all
    gradients once. Expected on v5e: 40-60 % of 197 TFLOP/s over the seven products (less vector work a product than
    the forward pass). VMEM: 7 MiB. Not measured on hardware.
    """
    require_tpu(interpret)
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    tiles = tiles or choose_tiles(T, S, N // K)
    visibility = Visibility(T, S, causal, sliding_window)
    segments = Segments(q_segment_ids, kv_segment_ids, N // K, tiles)
    rows, num_q_blocks, num_k_blocks = N // K * tiles.block_q, pl.cdiv(T, tiles.block_q), pl.cdiv(S, tiles.block_k)

    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)  # such a row has every score masked: its weights are 0 all the same
    row_vectors = [to_row_vector(x, K, tiles.block_q)[..., None, :] for x in (lse, row_delta(out, d_out, d_lse))]
    row_blocks = [to_rows(x, K, tiles.block_q) for x in (q, d_out.astype(q.dtype))]
    k_blocks, v_blocks = (pad_axis(x, 1, num_k_blocks * tiles.block_k).transpose(0, 2, 1, 3) for x in (k, v))
    inputs = (*segments.scalars, *segments.arrays, *row_blocks, *row_vectors, k_blocks, v_blocks)

    def input_specs(q_index: Any, k_index: Any) -> list[pl.BlockSpec]:
        row_block = pl.BlockSpec((None, None, None, rows, H), lambda b, h, x, y, *_: (q_index(x, y), b, h, 0, 0))
        row_vector = pl.BlockSpec((None, None, None, 1, rows), lambda b, h, x, y, *_: (q_index(x, y), b, h, 0, 0))
        keys = pl.BlockSpec((None, None, tiles.block_k, H), lambda b, h, x, y, *_: (b, h, k_index(x, y), 0))
        segment_specs = segments.specs(tiles, N // K, q_index, k_index)
        return [*segment_specs, row_block, row_block, row_vector, row_vector, keys, keys]

    def call(kernel: Any, ranges: Any, products: int, in_specs: Any, out_specs: Any, out_shape: Any, *more: Any) -> Any:
        steps = max(1, *(end - start for start, end in ranges))
        return pl.pallas_call(
            functools.partial(
                kernel, batch=B, steps=steps, has_segments=bool(segments.arrays), visibility=visibility, tiles=tiles,
                scale=scale, soft_cap=soft_cap,
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(segments.scalars), grid=(B, K, len(ranges), steps), in_specs=in_specs,
                out_specs=out_specs,
                scratch_shapes=[pltpu.VMEM(spec.block_shape[-2:], jnp.float32) for spec in out_specs],
            ),
            out_shape=out_shape,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            cost_estimate=cost(sum(max(0, end - start) for start, end in ranges), tiles, products, q, k),
            interpret=interpret,
            name=f"flash_attention_backward{kernel.__name__}",
        )(*inputs, *more)  # fmt: skip

    # dk and dv: for each key block, the query blocks that see it.
    ranges = [visibility.query_blocks(j, tiles.block_q, tiles.block_k) for j in range(num_k_blocks)]
    keys = pl.BlockSpec((None, None, tiles.block_k, H), lambda b, h, j, step, *_: (b, h, j, 0))
    dk, dv = call(
        _dkv, ranges, 4,
        input_specs(lambda j, step: _clamped(visibility.query_blocks(j, tiles.block_q, tiles.block_k), step),
                    lambda j, step: j),
        [keys, keys], [jax.ShapeDtypeStruct(k_blocks.shape, k.dtype)] * 2,
    )  # fmt: skip

    # dq: for each query block, the key blocks that it sees.
    def key_block(i: Any, step: Any) -> Any:
        return _clamped(visibility.key_blocks(i, tiles.block_q, tiles.block_k), step)

    ranges = [visibility.key_blocks(i, tiles.block_q, tiles.block_k) for i in range(num_q_blocks)]
    transposed = pl.BlockSpec((None, None, H, tiles.block_k), lambda b, h, i, step, *_: (b, h, 0, key_block(i, step)))
    (dq,) = call(
        _dq, ranges, 3, [*input_specs(lambda i, step: i, key_block), transposed],
        [pl.BlockSpec((None, None, None, H, rows), lambda b, h, i, step, *_: (i, b, h, 0, 0))],
        [jax.ShapeDtypeStruct((num_q_blocks, B, K, H, rows), q.dtype)], k_blocks.swapaxes(2, 3),
    )  # fmt: skip
    return from_rows(dq.swapaxes(3, 4), T, tiles.block_q), *(x.transpose(0, 2, 1, 3)[:, :S] for x in (dk, dv))


def _dkv(
    *refs: Any, batch: int, steps: int, has_segments: bool, visibility: Visibility, tiles: TpuTiles, scale: float,
    soft_cap: float | None,
) -> None:  # fmt: skip
    scalars, segment_refs, refs = split_refs(refs, has_segments)
    *inputs, dk_ref, dv_ref, dk_sum, dv_sum = refs  # [block_k, H]
    b, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    start, end = visibility.query_blocks(j, tiles.block_q, tiles.block_k)
    i = start + step

    @pl.when(step == 0)
    def _() -> None:
        dk_sum[...] = jnp.zeros(dk_sum.shape, jnp.float32)
        dv_sum[...] = jnp.zeros(dv_sum.shape, jnp.float32)

    def compute(masked: bool) -> None:
        q_ref, do_ref, *_ = inputs
        p, ds = _weights(inputs, masked, visibility, tiles, i, j, segment_refs, scale, soft_cap)
        dv_sum[...] += dot_nn(p.astype(do_ref.dtype), do_ref[...])
        dk_sum[...] += dot_nn(ds.astype(q_ref.dtype), q_ref[...])

    for_visible_block(compute, visibility, tiles, b, i, j, i < end, scalars, batch)

    @pl.when(step == steps - 1)
    def _() -> None:
        dk_ref[...] = dk_sum[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)


def _dq(
    *refs: Any, batch: int, steps: int, has_segments: bool, visibility: Visibility, tiles: TpuTiles, scale: float,
    soft_cap: float | None,
) -> None:  # fmt: skip
    scalars, segment_refs, refs = split_refs(refs, has_segments)
    *inputs, k_transposed_ref, dq_ref, dq_sum = refs  # [H, block_k], [H, rows], [H, rows]
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    start, end = visibility.key_blocks(i, tiles.block_q, tiles.block_k)
    j = start + step

    @pl.when(step == 0)
    def _() -> None:
        dq_sum[...] = jnp.zeros(dq_sum.shape, jnp.float32)

    def compute(masked: bool) -> None:
        _, ds = _weights(inputs, masked, visibility, tiles, i, j, segment_refs, scale, soft_cap)
        dq_sum[...] += dot_nn(k_transposed_ref[...], ds.astype(k_transposed_ref.dtype))

    for_visible_block(compute, visibility, tiles, b, i, j, j < end, scalars, batch)

    @pl.when(step == steps - 1)
    def _() -> None:
        dq_ref[...] = dq_sum[...].astype(dq_ref.dtype)


def _weights(
    inputs: Any, masked: bool, visibility: Visibility, tiles: TpuTiles, i: Any, j: Any, segment_refs: Any,
    scale: float, soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns P and the gradient of q k, f32[block_k, rows]."""
    q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref = inputs
    scores, slope = scores_of(k_ref[...], q_ref[...], scale, soft_cap)
    if masked:
        scores = mask_scores(scores, visibility, tiles, i, j, segment_refs)
    p = jnp.exp(scores - lse_ref[...])
    return p, p * (dot_nt(v_ref[...], do_ref[...]) - delta_ref[...]) * slope


def _clamped(blocks: tuple[Any, Any], step: Any) -> Any:
    start, end = blocks
    return jnp.clip(start + step, 0, jnp.maximum(end - 1, 0))
