"""Flash attention forward in Pallas Mosaic GPU (Hopper)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention import mosaic_gpu_blocks as blocks
from pallas_kernels.flash_attention.mosaic_gpu_fp8 import flash_attention_mosaic_gpu_float8
from pallas_kernels.flash_attention.tiles import ROWS, ForwardTiles, forward_tiles
from pallas_kernels.target import require_hopper

_CONSUMERS = 2
_BLOCK_Q = _CONSUMERS * ROWS


def flash_attention_mosaic_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None, *,
    scale: float, causal: bool, sliding_window: int | None, soft_cap: float | None,
    q_scale: jax.Array | None = None, k_scale: jax.Array | None = None, v_scale: jax.Array | None = None,
    interpret: Any = False, tiles: ForwardTiles | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns out [B, T, N, H] and lse f32[B, N, T]; the semantic is that of `flash_attention_reference`.

    FlashAttention-3 (Shah et al., 2024): a thread block owns 128 queries of one head. One warpgroup copies K and V
    by TMA into rings of shared memory; two consumer warpgroups own 64 queries each. The scores of a block and the
    values of the block before are in flight together, and the softmax of the one runs under the latter (2-stage
    pipelining); the two warpgroups take turns at the tensor core, so that the softmax of each also
    runs under the matmuls of the other (ping-pong). Softmax is in base 2 with log2(e) folded into the scale.

    Key blocks that no query of the tile sees are not loaded; those at the edges of causal mask and window are visited
    first, with a mask and without the pipelining of the rest, for which registers would be short. With segment ids
    every block is masked. Tiles at the end of the sequence, which are the longest under a causal mask, are issued
    first. The G query heads of a key head are neighbours in the grid and share K and V in the L2 cache. Lengths that
    are no multiple of 8 are padded to one outside the kernel; further rows are the copies' own zeros.

    Work: 4 * H FLOPs a visible (query, key) pair; reads q, k and v and writes out once from memory (K and V once more
    a wave of query tiles, mostly from L2). Tiles and shared memory: see `forward_tiles`; one thread block an SM.
    Expected on H200 at H = 128, long and unmasked: 65-75 % of 989 TFLOP/s. The matmuls of a 64 x 128 block take
    1,024 cycles of the tensor core, its softmax about 220 cycles of issue beside 512 of exp2 (16 a cycle and SM),
    which the turns hide; what is lost is the start of a tile, the masked blocks and the power limit. H = 64
    halves the matmuls of the same softmax: about 50 %. FlashAttention-3 reports 75 % and 50 %. Not measured on
    hardware.

    Raises:
        NotImplementedError: no Hopper GPU, or a dtype or head dim without tiles.
    """
    require_hopper(interpret)
    if q_scale is not None and k_scale is not None and v_scale is not None:
        return flash_attention_mosaic_gpu_float8(
            q, k, v, q_segment_ids, kv_segment_ids, scale=scale, causal=causal, sliding_window=sliding_window,
            soft_cap=soft_cap, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, interpret=interpret, tiles=tiles,
        )  # fmt: skip
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    blocks.require_supported(q, k, v)
    tiles = tiles or forward_tiles(H)
    segments = q_segment_ids is not None
    visibility = blocks.Visibility(T, S, causal, sliding_window, segments)
    block_kv, stages, num_tiles = tiles.block_kv, tiles.stages, pl.cdiv(T, _BLOCK_Q)
    tile_of_q = (ROWS, H)
    transforms = blocks.tiled(H, q.dtype)
    score, factor = blocks.scores(scale, soft_cap)

    def kernel(
        q_gmem, k_gmem, v_gmem, *rest, q_smem, k_smem, v_smem, lse_smem, q_full, k_full, k_empty, v_full, v_empty,
        turn, q_ids_smem: Any = None, k_ids_smem: Any = None,
    ):  # fmt: skip
        *ids_gmem, out_gmem, lse_gmem = rest
        batch, head, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
        tile = num_tiles - 1 - lax.axis_index("tile")  # under a causal mask the last tiles are the longest
        visit = visibility.key_blocks(tile * _BLOCK_Q, _BLOCK_Q, block_kv)

        def slot_of(index):
            return lax.rem(index, jnp.asarray(stages, jnp.int32))

        @pl.when(warpgroup == _CONSUMERS)
        def _produce():
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(head, jnp.asarray(N // K, jnp.int32))

            @pl.loop(0, visit.count)
            def _step(index):
                slot = slot_of(index)
                keys = pl.ds(pl.multiple_of(visit.block(index) * block_kv, block_kv), block_kv)

                @pl.when(index >= stages)
                def _wait_for_k():
                    plgpu.barrier_wait(k_empty.at[slot])

                plgpu.copy_gmem_to_smem(k_gmem.at[batch, keys, kv_head], k_smem.at[slot], k_full.at[slot])
                if segments:
                    plgpu.copy_gmem_to_smem(ids_gmem[1].at[batch, keys], k_ids_smem.at[slot], k_full.at[slot])

                @pl.when(index >= stages)
                def _wait_for_v():
                    plgpu.barrier_wait(v_empty.at[slot])

                plgpu.copy_gmem_to_smem(v_gmem.at[batch, keys, kv_head], v_smem.at[slot], v_full.at[slot])

        @pl.when(warpgroup < _CONSUMERS)
        def _consume():
            plgpu.set_max_registers(232, action="increase")
            query = tile * _BLOCK_Q + warpgroup * ROWS
            rows = pl.ds(pl.multiple_of(query, ROWS), ROWS)
            q_tile, mine, other = q_smem.at[warpgroup], turn.at[warpgroup], turn.at[1 - warpgroup]
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, rows, head], q_tile, q_full.at[warpgroup])
            if segments:
                plgpu.copy_gmem_to_smem(ids_gmem[0].at[batch, rows], q_ids_smem.at[warpgroup], q_full.at[warpgroup])

            @pl.when(warpgroup == 1)
            def _give_first_turn():
                plgpu.barrier_arrive(other)

            plgpu.barrier_wait(q_full.at[warpgroup])
            q_ids = plgpu.load(q_ids_smem.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(1)) if segments else None

            def softmax(s, index, m, l, masked):
                """Online softmax in base 2; m is the running maximum of scores * log2(e)."""
                s = score(s)
                if masked:
                    k_ids = None
                    if segments:
                        k_ids = plgpu.load(k_ids_smem.at[slot_of(index)], layout=plgpu.Layout.WGMMA.reduce(0))
                    key = visit.block(index) * block_kv
                    s = blocks.where_visible(visibility, query, key, s, q_ids, k_ids, -jnp.inf)
                m_new = jnp.maximum(m, s.max(axis=1) * factor)
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(s * factor - blocks.rows_like(m_new, s.shape))
                return m_new, l * alpha + p.sum(axis=1), alpha, p.astype(v.dtype)

            # The tensor core is taken with `barrier_wait(mine)` and handed on with `barrier_arrive(other)`, so that the
            # softmax of one warpgroup runs under the matmuls of the other.
            def scores(index, m, l):
                plgpu.barrier_wait(k_full.at[slot_of(index)])

                def matmul(s_acc):
                    plgpu.wgmma(s_acc, q_tile, k_smem.at[slot_of(index)].transpose((1, 0)))
                    plgpu.barrier_arrive(other)
                    return s_acc[...]

                s = pl.run_scoped(matmul, blocks.ACC((ROWS, block_kv), jnp.float32))
                m, l, alpha, p = softmax(s, index, m, l, True)
                if segments:
                    plgpu.commit_smem()  # the ids were read by the threads and are next written by a copy
                plgpu.barrier_arrive(k_empty.at[slot_of(index)])
                return m, l, alpha, p

            def values(index, acc, p):
                plgpu.barrier_wait(v_full.at[slot_of(index)])
                plgpu.barrier_wait(mine)
                acc = blocks.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem.at[slot_of(index)]))(
                    blocks.ACC.init(acc)
                )
                plgpu.barrier_arrive(v_empty.at[slot_of(index)])
                return acc

            def masked_step(index, carry):
                acc, m, l = carry
                m, l, alpha, p = scores(index, m, l)
                return values(index, acc * blocks.rows_like(alpha, acc.shape), p), m, l

            def whole_step(index, carry):
                """Scores of a block and, under their softmax, the values of the block before."""
                acc, m, l, p = carry
                slot, before = slot_of(index), slot_of(index - 1)
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(v_full.at[before])

                def matmuls(refs):
                    s_acc, acc_ref, m_ref, l_ref, alpha_ref, p_ref = refs
                    plgpu.barrier_wait(mine)
                    plgpu.wgmma(s_acc, q_tile, k_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma(acc_ref, p, v_smem.at[before])
                    plgpu.barrier_arrive(other)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    m_ref[...], l_ref[...], alpha_ref[...], p_ref[...] = softmax(s, index, m, l, False)
                    plgpu.barrier_arrive(k_empty.at[slot])

                s_init = blocks.ACC.init(blocks.full((ROWS, block_kv), 0))
                _, acc, m, l, alpha, p = blocks.run_state(matmuls)((s_init, blocks.ACC.init(acc), m, l, m, p))
                plgpu.barrier_arrive(v_empty.at[before])
                return acc * blocks.rows_like(alpha, acc.shape), m, l, p

            carry = blocks.full(tile_of_q, 0), blocks.full((ROWS,), blocks.UNSEEN), blocks.full((ROWS,), 0)
            plgpu.barrier_wait(mine)
            prologue = 0
            if causal or sliding_window is not None or segments:
                prologue = jnp.maximum(visit.masked - 1, 0)
                carry = lax.fori_loop(0, prologue, masked_step, carry)
            acc, m, l = carry
            m, l, alpha, p = scores(prologue, m, l)
            carry = acc * blocks.rows_like(alpha, acc.shape), m, l, p
            if not segments:
                carry = lax.fori_loop(prologue + 1, visit.count, whole_step, carry)
            acc, m, l, p = carry
            acc = values(visit.count - 1, acc, p)

            @pl.when(warpgroup == 0)
            def _give_last_turn():
                plgpu.barrier_arrive(other)

            seen = l > 0
            inverse = jnp.where(seen, 1 / l, 0.0)
            q_tile[...] = (acc * blocks.rows_like(inverse, tile_of_q)).astype(q.dtype)
            lse_smem.at[warpgroup][...] = jnp.where(seen, m * math.log(2) + jnp.log(l), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out_gmem.at[batch, rows, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_gmem.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)

    q, k, v = (blocks.pad_rows(x, 1) for x in (q, k, v))
    ids = [blocks.pad_rows(x.astype(jnp.int32), 1) for x in (q_segment_ids, kv_segment_ids) if x is not None]
    padded_T = q.shape[1]
    arrivals = 1 + segments
    scratch = {
        "q_smem": plgpu.SMEM((_CONSUMERS, ROWS, H), q.dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((stages, block_kv, H), k.dtype, transforms=transforms),
        "v_smem": plgpu.SMEM((stages, block_kv, H), v.dtype, transforms=transforms),
        "lse_smem": plgpu.SMEM((_CONSUMERS, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=_CONSUMERS),
        "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "turn": plgpu.Barrier(num_barriers=_CONSUMERS),
    }
    if segments:
        scratch |= {
            "q_ids_smem": plgpu.SMEM((_CONSUMERS, ROWS), jnp.int32),
            "k_ids_smem": plgpu.SMEM((stages, block_kv), jnp.int32),
        }
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, N, padded_T), jnp.float32),
        ),
        grid=(num_tiles, B, N),
        grid_names=("tile", "batch", "head"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="flash_attention_forward",
    )(q, k, v, *ids)
    return out[:, :T], lse[:, :, :T]
