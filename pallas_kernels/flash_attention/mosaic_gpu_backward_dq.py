"""Gradient of the queries: the second kernel of the flash attention backward pass."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention import mosaic_gpu_blocks as blocks
from pallas_kernels.flash_attention.tiles import ROWS, BackwardTiles

_CONSUMERS = 2
_BLOCK_Q = _CONSUMERS * ROWS


def query_gradient(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, lse: jax.Array, delta: jax.Array,
    segment_ids: tuple[jax.Array, ...], visibility: blocks.Visibility, *,
    scale: float, soft_cap: float | None, tiles: BackwardTiles, interpret: Any,
) -> jax.Array:  # fmt: skip
    """Returns dq; the arguments are those of `key_gradients`.

    Two consumer warpgroups of 64 queries each; a step recomputes the probabilities of `tiles.block_kv` keys and adds
    dS @ K: three matmuls, 6 * H FLOPs a visible pair.
    """
    B, _, N, H = q.shape
    G = N // k.shape[2]
    block_kv, stages = tiles.block_kv, tiles.stages
    num_tiles = pl.cdiv(visibility.num_queries, _BLOCK_Q)
    score, factor = blocks.scores(scale, soft_cap)
    if H > 128 and visibility.sliding_window is not None:  # two loops would spill
        visibility = dataclasses.replace(visibility, mask_all=True)

    def kernel(
        q_gmem, do_gmem, k_gmem, v_gmem, lse_gmem, delta_gmem, *rest, q_smem, do_smem, k_smem, v_smem, lse_smem,
        delta_smem, columns_smem, q_full, full, k_empty, v_empty, q_ids_smem: Any = None, k_ids_smem: Any = None,
    ):  # fmt: skip
        *ids_gmem, dq_gmem = rest
        batch, head, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
        tile = num_tiles - 1 - lax.axis_index("tile")  # under a causal mask the last tiles are the longest
        visit = visibility.key_blocks(tile * _BLOCK_Q, _BLOCK_Q, block_kv)

        def slot_of(index):
            return lax.rem(index, jnp.asarray(stages, jnp.int32))

        @pl.when(warpgroup == _CONSUMERS)
        def _produce():
            plgpu.set_max_registers(24, action="decrease")
            kv_head = lax.div(head, jnp.asarray(G, jnp.int32))

            @pl.loop(0, visit.count)
            def _step(index):
                slot = slot_of(index)
                keys = pl.ds(pl.multiple_of(visit.block(index) * block_kv, block_kv), block_kv)

                @pl.when(index >= stages)
                def _wait_for_k():
                    plgpu.barrier_wait(k_empty.at[slot])

                plgpu.copy_gmem_to_smem(k_gmem.at[batch, keys, kv_head], k_smem.at[slot], full.at[slot])
                if ids_gmem:
                    plgpu.copy_gmem_to_smem(ids_gmem[1].at[batch, keys], k_ids_smem.at[slot], full.at[slot])

                @pl.when(index >= stages)
                def _wait_for_v():
                    plgpu.barrier_wait(v_empty.at[slot])

                plgpu.copy_gmem_to_smem(v_gmem.at[batch, keys, kv_head], v_smem.at[slot], full.at[slot])

        @pl.when(warpgroup < _CONSUMERS)
        def _consume():
            plgpu.set_max_registers(240, action="increase")
            blocks.number_columns(columns_smem.at[warpgroup])
            query = tile * _BLOCK_Q + warpgroup * ROWS
            rows = pl.ds(pl.multiple_of(query, ROWS), ROWS)
            ready, row_layout = q_full.at[warpgroup], plgpu.Layout.WGMMA.reduce(1)
            q_tile, do_tile = q_smem.at[warpgroup], do_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, rows, head], q_tile, ready)
            plgpu.copy_gmem_to_smem(do_gmem.at[batch, rows, head], do_tile, ready)
            plgpu.copy_gmem_to_smem(lse_gmem.at[batch, head, rows], lse_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(delta_gmem.at[batch, head, rows], delta_smem.at[warpgroup], ready)
            if ids_gmem:
                plgpu.copy_gmem_to_smem(ids_gmem[0].at[batch, rows], q_ids_smem.at[warpgroup], ready)
            plgpu.barrier_wait(ready)
            row_lse = plgpu.load(lse_smem.at[warpgroup], layout=row_layout)
            row_delta = plgpu.load(delta_smem.at[warpgroup], layout=row_layout)
            q_ids = plgpu.load(q_ids_smem.at[warpgroup], layout=row_layout) if ids_gmem else None

            def step(index, dq, masked):
                slot = slot_of(index)
                plgpu.barrier_wait(full.at[slot])

                def score_gradient(s_acc, dp_acc):
                    plgpu.wgmma(s_acc, q_tile, k_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma(dp_acc, do_tile, v_smem.at[slot].transpose((1, 0)))
                    s = score(plgpu.wgmma_accumulator_load(s_acc, wait_n=1))
                    p = jnp.exp2(s * factor - blocks.rows_like(row_lse, s.shape))
                    if masked:
                        k_ids = None
                        if ids_gmem:
                            k_ids = plgpu.load(k_ids_smem.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
                        key = visit.block(index) * block_kv
                        p = blocks.where_visible(
                            visibility, query, key, p, q_ids, k_ids, columns_smem=columns_smem.at[warpgroup]
                        )
                    slope = p if soft_cap is None else p * (1 - s * s)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                    return slope * (dp - blocks.rows_like(row_delta, s.shape))

                shape = blocks.ACC((ROWS, block_kv), jnp.float32)
                ds = pl.run_scoped(score_gradient, shape, shape).astype(q.dtype)
                plgpu.barrier_arrive(v_empty.at[slot])
                dq = blocks.run_state(lambda acc: plgpu.wgmma(acc, ds, k_smem.at[slot]))(blocks.ACC.init(dq))
                if ids_gmem:
                    plgpu.commit_smem()  # the ids were read by the threads and are next written by a copy
                plgpu.barrier_arrive(k_empty.at[slot])
                return dq

            dq = blocks.full((ROWS, H), 0)
            for begin, end, masked in visibility.loops(visit, block_kv):
                dq = lax.fori_loop(begin, end, lambda index, dq, masked=masked: step(index, dq, masked), dq)
            q_tile[...] = (dq * scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, dq_gmem.at[batch, rows, head])
            plgpu.wait_smem_to_gmem(0)

    transforms, f32 = blocks.tiled(H, q.dtype, block_kv), jnp.float32
    scratch = {
        "q_smem": plgpu.SMEM((_CONSUMERS, ROWS, H), q.dtype, transforms=transforms),
        "do_smem": plgpu.SMEM((_CONSUMERS, ROWS, H), q.dtype, transforms=transforms),
        "k_smem": plgpu.SMEM((stages, block_kv, H), q.dtype, transforms=transforms),
        "v_smem": plgpu.SMEM((stages, block_kv, H), q.dtype, transforms=transforms),
        "lse_smem": plgpu.SMEM((_CONSUMERS, ROWS), f32),
        "columns_smem": plgpu.SMEM((_CONSUMERS, block_kv), jnp.int32),
        "delta_smem": plgpu.SMEM((_CONSUMERS, ROWS), f32),
        "q_full": plgpu.Barrier(num_arrivals=5 if segment_ids else 4, num_barriers=_CONSUMERS),
        "full": plgpu.Barrier(num_arrivals=3 if segment_ids else 2, num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
    }
    if segment_ids:
        scratch |= {
            "q_ids_smem": plgpu.SMEM((_CONSUMERS, ROWS), jnp.int32),
            "k_ids_smem": plgpu.SMEM((stages, block_kv), jnp.int32),
        }
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_tiles, B, N),
        grid_names=("tile", "batch", "head"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="flash_attention_backward_dq",
    )(q, d_out, k, v, lse, delta, *segment_ids)
