"""Flash attention forward with float8 queries, keys and values in Pallas Mosaic GPU (Hopper)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention import mosaic_gpu_blocks as blocks
from pallas_kernels.flash_attention.float8 import SCALE_BLOCK
from pallas_kernels.flash_attention.tiles import ROWS, ForwardTiles
from pallas_kernels.pages import FLOAT8
from pallas_kernels.target import require_hopper

HEAD_DIMS = (64, 128, 256)
_CONSUMERS = 2
_BLOCK_Q = _CONSUMERS * ROWS
_WEIGHT_BITS = 8
"""Weights are multiplied by 2**8 before they are rounded: at most 256, of 448; from 2**-14 on not subnormal."""


def flash_attention_mosaic_gpu_float8(
    q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None, *,
    scale: float, causal: bool, sliding_window: int | None, soft_cap: float | None,
    q_scale: jax.Array, k_scale: jax.Array, v_scale: jax.Array,
    interpret: Any = False, tiles: ForwardTiles | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns out bf16[B, T, N, H] and lse f32[B, N, T]; the semantic is that of `flash_attention_reference`.

    FlashAttention-2's loop (Dao, 2023) on the 8-bit tensor core. A thread block owns 128 queries of one head, which
    share a scale: one warpgroup copies K and V by TMA into rings of shared memory, two consumer warpgroups own 64
    queries each. A step is a block of keys within the 128 that share a scale, so that all scales are scalars: those
    of Q and K join the softmax scale, that of V multiplies the step's values as they are added to the output in f32.
    That each step has a sum of its own also keeps the tensor core's sums short, whose precision is below f32 here.

    The tensor core takes 8-bit operands only with the contracted dimension innermost: for the values XLA transposes
    V to [B, K, H, S] beforehand. The weights, times 256, are rounded to e4m3 and pass through shared memory, since an
    accumulator lies in registers otherwise than an 8-bit operand. A weight w has a relative error up to 2**-4, so an
    output at most 2**-4 * sum(w * |v|); the errors of many weights cancel. The normalizer is summed unrounded.
    Key blocks that no query of a tile sees are not loaded, and only those at the edges of the mask are masked. Tiles
    at the end of the sequence, the longest under a causal mask, are issued first.

    Work: 4 * H FLOPs a visible (query, key) pair; reads q and k once, v twice, writes v once (to transpose it) and out.
    Shared memory: 128 * H bytes of Q, 2 * block_kv * H a stage, 128 * block_kv of weights, up to 32 KiB of output:
    195 KiB at H = 128 (128 keys, 4 stages), 203 KiB at H = 256 (64 keys, 4 stages), 107 KiB at H = 64. The step's
    values are computed 128 columns at a time: a thread holds H/2 + 64 f32 of accumulators, or H/2 + block_kv/2 with
    the scores, of 232 registers (H = 256 with a
    window spills 16 bytes: scalars, outside the loops).
    Expected on H200 at H = 128, long and unmasked: 30-40 % of 1,979 TFLOP/s. The matmuls of a 64 x 128 block take 512
    cycles of the tensor core; its exp2 take 512 (16 a cycle and SM), with about as many of issue for the
    rest of the softmax and the update of the output. A warpgroup does one after the other, about 1,250 cycles a
    block with the waits; two of them would fill 80 % of the tensor core if they never met there, but nothing makes
    them take turns. FlashAttention-3, where they do, reports 60 %. H = 64 halves the matmuls of the same softmax:
    about 20 %. Not measured on hardware.

    Raises:
        NotImplementedError: no Hopper GPU, segment ids, other dtypes, or a head dim or tiles without a kernel.
    """
    require_hopper(interpret)
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    tiles = tiles or (ForwardTiles(block_kv=64, stages=4) if H > 128 else ForwardTiles(block_kv=128, stages=4))
    _require_supported(q, k, v, q_segment_ids is not None, tiles)
    visibility = blocks.Visibility(T, S, causal, sliding_window, False)
    block_kv, stages, num_tiles = tiles.block_kv, tiles.stages, pl.cdiv(T, _BLOCK_Q)
    width = min(H, 128)
    pieces = range(H // width)

    def kernel(
        q_gmem, k_gmem, v_gmem, q_scale_gmem, k_scale_gmem, v_scale_gmem, out_gmem, lse_gmem, *,
        q_smem, k_smem, v_smem, p_smem, out_smem, lse_smem, columns_smem, q_full, k_full, k_empty, v_full, v_empty,
    ):  # fmt: skip
        batch, head, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
        kv_head = lax.div(head, jnp.asarray(N // K, jnp.int32))
        tile = num_tiles - 1 - lax.axis_index("tile")  # under a causal mask the last tiles are the longest
        visit = visibility.key_blocks(tile * _BLOCK_Q, _BLOCK_Q, block_kv)

        def slot_of(index):
            return lax.rem(index, jnp.asarray(stages, jnp.int32))

        @pl.when(warpgroup == _CONSUMERS)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, visit.count)
            def _step(index):
                slot = slot_of(index)
                keys = pl.ds(pl.multiple_of(visit.block(index) * block_kv, block_kv), block_kv)

                @pl.when(index >= stages)
                def _wait_for_k():
                    plgpu.barrier_wait(k_empty.at[slot])

                plgpu.copy_gmem_to_smem(k_gmem.at[batch, keys, kv_head], k_smem.at[slot], k_full.at[slot])

                @pl.when(index >= stages)
                def _wait_for_v():
                    plgpu.barrier_wait(v_empty.at[slot])

                for i in pieces:
                    columns = pl.ds(i * width, width)
                    source = v_gmem.at[batch, kv_head, columns, keys]
                    plgpu.copy_gmem_to_smem(source, v_smem.at[slot, i], v_full.at[slot])

        @pl.when(warpgroup < _CONSUMERS)
        def _consume():
            plgpu.set_max_registers(232, action="increase")
            blocks.number_columns(columns_smem.at[warpgroup])
            query = tile * _BLOCK_Q + warpgroup * ROWS
            rows = pl.ds(pl.multiple_of(query, ROWS), ROWS)
            q_tile, p_tile = q_smem.at[warpgroup], p_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, rows, head], q_tile, q_full.at[warpgroup])
            queries_scale = q_scale_gmem[batch, head, tile] * scale
            plgpu.barrier_wait(q_full.at[warpgroup])

            def step(index, carry, masked):
                acc, m, l = carry
                slot, key = slot_of(index), visit.block(index) * block_kv
                scale_block = lax.div(key, jnp.asarray(SCALE_BLOCK, jnp.int32))
                scores_scale = queries_scale * k_scale_gmem[batch, kv_head, scale_block]
                values_scale = v_scale_gmem[batch, kv_head, scale_block]

                def scores(s_acc):
                    plgpu.wgmma(s_acc, q_tile, k_smem.at[slot].transpose((1, 0)))
                    return s_acc[...]

                plgpu.barrier_wait(k_full.at[slot])
                s = pl.run_scoped(scores, blocks.ACC((ROWS, block_kv), jnp.float32))
                plgpu.barrier_arrive(k_empty.at[slot])
                if soft_cap is None:
                    s = s * (scores_scale * blocks.LOG2E)
                else:
                    s = jnp.tanh(s * (scores_scale / soft_cap)) * (soft_cap * blocks.LOG2E)
                if masked:
                    s = blocks.where_visible(
                        visibility, query, key, s, None, None, -jnp.inf, columns_smem=columns_smem.at[warpgroup]
                    )
                m_new = jnp.maximum(m, s.max(axis=1))
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(s - blocks.rows_like(m_new - _WEIGHT_BITS, s.shape))
                l = l * alpha + p.sum(axis=1)
                p_tile[...] = p.astype(FLOAT8)
                plgpu.commit_smem()

                plgpu.barrier_wait(v_full.at[slot])
                sums = []
                for i in pieces:

                    def values(v_acc, i=i):
                        plgpu.wgmma(v_acc, p_tile, v_smem.at[slot, i].transpose((1, 0)))
                        before = acc[i] * blocks.rows_like(alpha, acc[i].shape)  # under the matmul
                        return before + v_acc[...] * values_scale

                    sums.append(pl.run_scoped(values, blocks.ACC((ROWS, width), jnp.float32)))
                plgpu.barrier_arrive(v_empty.at[slot])
                return tuple(sums), m_new, l

            acc = tuple(blocks.full((ROWS, width), 0) for _ in pieces)
            carry = acc, blocks.full((ROWS,), blocks.UNSEEN), blocks.full((ROWS,), 0)
            for begin, end, masked in visibility.loops(visit, block_kv):
                carry = lax.fori_loop(begin, end, lambda i, c, masked=masked: step(i, c, masked), carry)
            acc, m, l = carry

            seen = l > 0
            inverse = jnp.where(seen, 1 / l, 0.0)
            lse = (m - _WEIGHT_BITS) * math.log(2) + jnp.log(l)
            lse_smem.at[warpgroup][...] = jnp.where(seen, lse, -jnp.inf)
            for i in pieces:
                if i > 0:
                    plgpu.wait_smem_to_gmem(0)
                out_smem.at[warpgroup][...] = (acc[i] * blocks.rows_like(inverse, acc[i].shape)).astype(jnp.bfloat16)
                plgpu.commit_smem()
                columns = pl.ds(i * width, width)
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_gmem.at[batch, rows, head, columns])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_gmem.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)

    q, k = blocks.pad_rows(q, 1), blocks.pad_rows(k, 1)
    v = blocks.pad_rows(v, 1, SCALE_BLOCK).transpose(0, 2, 3, 1)
    padded_T = q.shape[1]
    of_head, of_keys = blocks.tiled(H, FLOAT8), blocks.tiled(block_kv, FLOAT8)
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((B, N, padded_T), jnp.float32),
        ),
        grid=(num_tiles, B, N),
        grid_names=("tile", "batch", "head"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "q_smem": plgpu.SMEM((_CONSUMERS, ROWS, H), FLOAT8, transforms=of_head),
            "k_smem": plgpu.SMEM((stages, block_kv, H), FLOAT8, transforms=of_head),
            "v_smem": plgpu.SMEM((stages, len(pieces), width, block_kv), FLOAT8, transforms=of_keys),
            "p_smem": plgpu.SMEM((_CONSUMERS, ROWS, block_kv), FLOAT8, transforms=of_keys),
            "out_smem": plgpu.SMEM(
                (_CONSUMERS, ROWS, width), jnp.bfloat16, transforms=blocks.tiled(width, jnp.bfloat16)
            ),
            "lse_smem": plgpu.SMEM((_CONSUMERS, ROWS), jnp.float32),
            "columns_smem": plgpu.SMEM((_CONSUMERS, block_kv), jnp.int32),
            "q_full": plgpu.Barrier(num_barriers=_CONSUMERS),
            "k_full": plgpu.Barrier(num_barriers=stages),
            "k_empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
            "v_full": plgpu.Barrier(num_arrivals=len(pieces), num_barriers=stages),
            "v_empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="flash_attention_forward_float8",
    )(q, k, v, q_scale, k_scale, v_scale)
    return out[:, :T], lse[:, :, :T]


def _require_supported(q: jax.Array, k: jax.Array, v: jax.Array, segments: bool, tiles: ForwardTiles) -> None:
    if not q.dtype == k.dtype == v.dtype == FLOAT8:
        raise NotImplementedError(
            f"mosaic_gpu takes scales with float8_e4m3fn alone, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if segments:
        raise NotImplementedError("mosaic_gpu has no segment ids in float8 flash attention yet")
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"mosaic_gpu takes head dims {HEAD_DIMS} in float8, got {q.shape[-1]}")
    if tiles.block_kv not in (64, SCALE_BLOCK):
        raise NotImplementedError(f"float8 needs block_kv 64 or 128, within a scale's keys, got {tiles.block_kv}")
