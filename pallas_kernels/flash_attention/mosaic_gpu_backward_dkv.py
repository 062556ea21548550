"""Gradients of the keys and values: the first kernel of the flash attention backward pass."""

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


def key_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, lse: jax.Array, delta: jax.Array,
    segment_ids: tuple[jax.Array, ...], visibility: blocks.Visibility, *,
    scale: float, soft_cap: float | None, tiles: BackwardTiles, interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns (dk, dv), summed over the G query heads of a key head in registers, in one fixed order.

    Scores are computed transposed, [keys, queries], so that P and dS leave the registers only as left operands of
    dV += P @ dO and dK += dS @ Q: four matmuls, 8 * H FLOPs a visible pair. The two consumer warpgroups own 64 keys
    each; at H = 256, where the gradients of 64 keys exceed the registers of one, they share 64 keys and own half of the
    columns each, both recomputing P and dS (12 * H FLOPs a pair).

    Args:
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: like k.
        d_out: like q.
        lse: f32[B, N, T] times log2(e), infinite for queries that see nothing.
        delta: f32[B, N, T], the sum of out * d_out over H, less the gradient of lse.
        segment_ids: those of the queries and of the keys, or ().
        visibility: with the true lengths; T and S above are padded to multiples of 8.
        scale: factor on the scores.
        soft_cap: of the scores.
        tiles: block sizes.
        interpret: of Pallas.
    """
    B, _, N, H = q.shape
    K = k.shape[2]
    G = N // K
    parts = 2 if H > 128 else 1
    groups = _CONSUMERS // parts  # of 64 keys, in a thread block
    block_q, stages, columns = tiles.block_q, tiles.stages, H // parts
    score, factor = blocks.scores(scale, soft_cap)
    if H > 128 and soft_cap is not None:  # two loops would spill
        visibility = dataclasses.replace(visibility, mask_all=True)

    def kernel(
        k_gmem, v_gmem, q_gmem, do_gmem, lse_gmem, delta_gmem, *rest, k_smem, v_smem, q_smem, do_smem, lse_smem,
        delta_smem, columns_smem, kv_full, full, empty, done, k_ids_smem: Any = None, q_ids_smem: Any = None,
    ):  # fmt: skip
        *ids_gmem, dk_gmem, dv_gmem = rest
        batch, kv_head, warpgroup = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("warpgroup")
        first_key = lax.axis_index("tile") * (groups * ROWS)
        visit = visibility.query_blocks(first_key, groups * ROWS, block_q)

        def slot_of(step):
            return lax.rem(step, jnp.asarray(stages, jnp.int32))

        @pl.when(warpgroup == _CONSUMERS)
        def _produce():
            plgpu.set_max_registers(24, action="decrease")
            for group in range(groups):
                keys = pl.ds(pl.multiple_of(first_key + group * ROWS, ROWS), ROWS)
                for part in range(parts):
                    at = batch, keys, kv_head, pl.ds(part * columns, columns)
                    plgpu.copy_gmem_to_smem(k_gmem.at[at], k_smem.at[group, part], kv_full)
                    plgpu.copy_gmem_to_smem(v_gmem.at[at], v_smem.at[group, part], kv_full)
                if ids_gmem:
                    plgpu.copy_gmem_to_smem(ids_gmem[1].at[batch, keys], k_ids_smem.at[group], kv_full)

            @pl.loop(0, G)
            def _head(g):
                @pl.loop(0, visit.count)
                def _step(index):
                    step = g * visit.count + index
                    slot, head = slot_of(step), kv_head * G + g
                    queries = pl.ds(pl.multiple_of(visit.block(index) * block_q, block_q), block_q)

                    @pl.when(step >= stages)
                    def _wait():
                        plgpu.barrier_wait(empty.at[slot])

                    for x_gmem, x_smem in ((q_gmem, q_smem), (do_gmem, do_smem)):
                        for part in range(parts):
                            at = batch, queries, head, pl.ds(part * columns, columns)
                            plgpu.copy_gmem_to_smem(x_gmem.at[at], x_smem.at[slot, part], full.at[slot])
                    for row_gmem, row_smem in ((lse_gmem, lse_smem), (delta_gmem, delta_smem)):
                        plgpu.copy_gmem_to_smem(row_gmem.at[batch, head, queries], row_smem.at[slot], full.at[slot])
                    if ids_gmem:
                        plgpu.copy_gmem_to_smem(ids_gmem[0].at[batch, queries], q_ids_smem.at[slot], full.at[slot])

        @pl.when(warpgroup < _CONSUMERS)
        def _consume():
            plgpu.set_max_registers(240, action="increase")
            blocks.number_columns(columns_smem.at[warpgroup])
            group, own = (0, warpgroup) if parts > 1 else (warpgroup, 0)
            key = first_key + group * ROWS
            row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
            plgpu.barrier_wait(kv_full)
            k_ids = plgpu.load(k_ids_smem.at[group], layout=row_layout) if ids_gmem else None

            def step(number, index, carry, masked):
                slot = slot_of(number)
                plgpu.barrier_wait(full.at[slot])

                def probabilities(refs):
                    s_acc, dp_acc, p_ref, ds_ref = refs
                    for part in range(parts):
                        plgpu.wgmma(s_acc, k_smem.at[group, part], q_smem.at[slot, part].transpose((1, 0)))
                    for part in range(parts):
                        plgpu.wgmma(dp_acc, v_smem.at[group, part], do_smem.at[slot, part].transpose((1, 0)))
                    s = score(plgpu.wgmma_accumulator_load(s_acc, wait_n=parts))
                    lse = plgpu.load(lse_smem.at[slot], layout=column_layout)
                    p = jnp.exp2(s * factor - blocks.columns_like(lse, s.shape))
                    if masked:
                        q_ids = plgpu.load(q_ids_smem.at[slot], layout=column_layout) if ids_gmem else None
                        query = visit.block(index) * block_q
                        p = blocks.where_visible(
                            visibility, query, key, p, q_ids, k_ids, columns_smem=columns_smem.at[warpgroup],
                            queries_first=False,
                        )  # fmt: skip
                    slope = p if soft_cap is None else p * (1 - s * s)
                    ds = slope * plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                    p_ref[...], ds_ref[...] = p.astype(q.dtype), ds.astype(q.dtype)

                def accumulate(refs):
                    dk_acc, dv_acc = refs
                    plgpu.wgmma(dv_acc, p, do_smem.at[slot, own])
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot, own])

                shape = ROWS, block_q
                minus_delta = -plgpu.load(delta_smem.at[slot], layout=column_layout)  # spares its columns later
                s_init, unset = blocks.full(shape, 0), blocks.full(shape, 0).astype(q.dtype)
                dp_init = blocks.columns_like(minus_delta, shape)
                *_, p, ds = blocks.run_state(probabilities)(
                    (blocks.ACC.init(s_init), blocks.ACC.init(dp_init), unset, unset)
                )
                dk, dv = blocks.run_state(accumulate)(tuple(blocks.ACC.init(x) for x in carry))
                plgpu.commit_smem()  # the rows were read by the threads and are next written by a copy
                plgpu.barrier_arrive(empty.at[slot])
                return dk, dv

            def head(g, carry):
                for begin, end, masked in visibility.loops(visit, None):
                    carry = lax.fori_loop(
                        begin, end, lambda i, carry, masked=masked: step(g * visit.count + i, i, carry, masked), carry
                    )
                return carry

            zeros = blocks.full((ROWS, columns), 0)
            dk, dv = lax.fori_loop(0, G, head, (zeros, zeros))
            if parts > 1:  # the other warpgroup may still read the keys that are overwritten below
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
            k_smem.at[group, own][...] = (dk * scale).astype(q.dtype)
            v_smem.at[group, own][...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            keys = pl.ds(pl.multiple_of(key, ROWS), ROWS)
            own_columns = pl.ds(pl.multiple_of(warpgroup * columns, columns), columns) if parts > 1 else slice(None)
            at = batch, keys, kv_head, own_columns
            plgpu.copy_smem_to_gmem(k_smem.at[group, own], dk_gmem.at[at])
            plgpu.copy_smem_to_gmem(v_smem.at[group, own], dv_gmem.at[at])
            plgpu.wait_smem_to_gmem(0)

    transforms, f32 = blocks.tiled(columns, q.dtype, block_q), jnp.float32
    scratch = {
        "k_smem": plgpu.SMEM((groups, parts, ROWS, columns), q.dtype, transforms=transforms),
        "v_smem": plgpu.SMEM((groups, parts, ROWS, columns), q.dtype, transforms=transforms),
        "q_smem": plgpu.SMEM((stages, parts, block_q, columns), q.dtype, transforms=transforms),
        "do_smem": plgpu.SMEM((stages, parts, block_q, columns), q.dtype, transforms=transforms),
        "lse_smem": plgpu.SMEM((stages, block_q), f32),
        "columns_smem": plgpu.SMEM((_CONSUMERS, block_q), jnp.int32),
        "delta_smem": plgpu.SMEM((stages, block_q), f32),
        "kv_full": plgpu.Barrier(num_arrivals=groups * (2 * parts + bool(segment_ids))),
        "full": plgpu.Barrier(num_arrivals=2 * parts + 2 + bool(segment_ids), num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "done": plgpu.Barrier(num_arrivals=_CONSUMERS),
    }
    if segment_ids:
        scratch |= {
            "k_ids_smem": plgpu.SMEM((groups, ROWS), jnp.int32),
            "q_ids_smem": plgpu.SMEM((stages, block_q), jnp.int32),
        }
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid=(pl.cdiv(visibility.num_keys, groups * ROWS), B, K),
        grid_names=("tile", "batch", "kv_head"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="flash_attention_backward_dkv",
    )(k, v, q, d_out, lse, delta, *segment_ids)
