"""The TPU kernel for rows with several query tokens: prompts, chunks of them, drafts to verify."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.mosaic_tpu_pages import (
    MASK_VALUE,
    BlockLoop,
    PageStream,
    buffers,
    compute_dtype,
    operands,
    scores,
    to_row,
    weigh,
)
from pallas_kernels.paged_attention.mosaic_tpu_work import FIRST, LAST, ROW, TILE, WorkList
from pallas_kernels.paged_attention.tpu_tiles import VMEM_BYTES
from pallas_kernels.pages import Pages


def prefill(
    q: Float[Array, "T N H"], k_pages: Pages, v_pages: Pages, page_indices: Int[Array, "S M"],
    kv_lens: Int[Array, " S"], cu_q_lens: Int[Array, " S+1"], work: WorkList, *, scale: float,
    sliding_window: int | None, soft_cap: float | None, tree_mask: jax.Array | None,
    block_q: int, block_k: int, interpret: Any,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:  # fmt: skip
    """Returns output and log-sum-exp at the tokens of `work`, and anything elsewhere.

    Query tokens are cut into fixed tiles of `block_q`; a tile meets the keys of each row that has tokens in it,
    one row after the other, and the tokens of other rows are masked meanwhile: the online softmax forgets what a
    token gathered before its first visible key. The rows of a matmul are the G * block_q (query head, token) pairs
    of a KV head, for which q and the output are head-major [N, T, H] here.
    """
    T, N, H = q.shape
    K, _, page_size, _ = k_pages.shape
    tiles, group = -(-T // block_q), N // K
    pages_per_block = block_k // page_size
    pad = ((0, tiles * block_q - T), (0, 0))
    inputs = [jnp.pad(q, (*pad, (0, 0))).swapaxes(0, 1)]
    trees = []
    if tree_mask is not None:
        words = lax.bitcast_convert_type(jnp.pad(tree_mask, pad), jnp.int32)
        inputs.append(words)
        trees = [pltpu.VMEM((2, block_q, words.shape[1]), jnp.int32)]
    inputs += [*operands(k_pages), *operands(v_pages)]
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    rows = group * block_q
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, k_pages=k_pages, v_pages=v_pages, pages_per_row=page_indices.shape[1],
            pages_per_block=pages_per_block, dtype=compute_dtype(q, k_pages, v_pages), scale=scale,
            sliding_window=sliding_window, soft_cap=soft_cap, num_words=0 if tree_mask is None else tree_mask.shape[1],
        ),
        out_shape=(
            jax.ShapeDtypeStruct((N, tiles * block_q, H), q.dtype),
            jax.ShapeDtypeStruct((tiles, K, group, block_q), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(1,),
            in_specs=[any_memory] * len(inputs),
            out_specs=(any_memory, any_memory),
            scratch_shapes=[
                [*buffers(k_pages, pages_per_block), *buffers(v_pages, pages_per_block)],
                pltpu.VMEM((2, N, block_q, H), q.dtype),  # q
                pltpu.VMEM((K, rows, 1), jnp.float32),  # m
                pltpu.VMEM((K, rows, 1), jnp.float32),  # l
                pltpu.VMEM((K, rows, H), jnp.float32),  # acc
                pltpu.VMEM((N, block_q, H), q.dtype),  # out
                pltpu.VMEM((K, group, block_q), jnp.float32),  # lse
                pltpu.SemaphoreType.DMA((2,)),  # pages
                pltpu.SemaphoreType.DMA((2,)),  # q and tree words
                pltpu.SemaphoreType.DMA,  # out and lse
                pltpu.SMEM((2,), jnp.int32),  # tiles prefetched, tiles begun
                trees,
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="ragged_paged_attention_prefill",
    )(work.items, work.count, page_indices.reshape(-1), kv_lens, cu_q_lens, *inputs)  # fmt: skip
    return out[:, :T].swapaxes(0, 1), lse.transpose(0, 3, 1, 2).reshape(-1, N)[:T]


def _kernel(
    items_ref: Any, count_ref: Any, page_table_ref: Any, kv_lens_ref: Any, cu_q_lens_ref: Any, *refs: Any,
    k_pages: Pages, v_pages: Pages, pages_per_row: int, pages_per_block: int, dtype: jnp.dtype, scale: float,
    sliding_window: int | None, soft_cap: float | None, num_words: int,
) -> None:  # fmt: skip
    num_inputs = 1 + (num_words > 0) + len(operands(k_pages)) + len(operands(v_pages))
    q_hbm, *pages_hbm = refs[:num_inputs]
    words_hbm = pages_hbm.pop(0) if num_words else None
    out_hbm, lse_hbm = refs[num_inputs : num_inputs + 2]
    (
        blocks, q_ref, m_ref, l_ref, acc_ref, out_ref, lse_ref, page_sems, q_sems, out_sem, tile_counts, trees,
    ) = refs[num_inputs + 2 :]  # fmt: skip
    k_stream, v_stream = PageStream.split(tuple(pages_hbm), tuple(blocks), k_pages, v_pages)
    loop = BlockLoop(
        items_ref, count_ref, page_table_ref, pages_per_row, k_pages.shape[2], pages_per_block,
        (k_stream, v_stream), page_sems,
    )  # fmt: skip
    _, N, block_q, H = q_ref.shape
    K, rows, block_k = m_ref.shape[0], m_ref.shape[1], loop.block_k
    group = N // K
    prefetched, begun = 0, 1  # in tile_counts: tile number n of those that have work lies in q_ref[n % 2]

    def tokens(i: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(loop.item(i, TILE) * block_q, block_q), block_q)

    def copies_in(i: jax.Array, number: jax.Array) -> list[Any]:
        slot = lax.rem(number, 2)
        copies = [pltpu.make_async_copy(q_hbm.at[:, tokens(i)], q_ref.at[slot], q_sems.at[slot])]
        if words_hbm is not None:
            copies.append(pltpu.make_async_copy(words_hbm.at[tokens(i)], trees[0].at[slot], q_sems.at[slot]))
        return copies

    def copies_out(i: jax.Array) -> tuple[Any, Any]:
        return (
            pltpu.make_async_copy(out_ref, out_hbm.at[:, tokens(i)], out_sem),
            pltpu.make_async_copy(lse_ref, lse_hbm.at[loop.item(i, TILE)], out_sem),
        )

    def prefetch(i: jax.Array) -> None:
        @pl.when(loop.item(i, FIRST) == 1)
        def _() -> None:
            for copy in copies_in(i, tile_counts[prefetched]):
                copy.start()
            tile_counts[prefetched] = tile_counts[prefetched] + 1

    def begin(i: jax.Array) -> None:
        @pl.when(loop.item(i, FIRST) == 1)
        def _() -> None:
            for copy in copies_in(i, tile_counts[begun]):
                copy.wait()
            tile_counts[begun] = tile_counts[begun] + 1
            m_ref[...] = jnp.full_like(m_ref, MASK_VALUE)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

    def attend(slot: jax.Array, mask: jax.Array | None, visible: Any) -> None:
        q_slot = lax.rem(tile_counts[begun] - 1, 2)

        def of_head(h: Any, _: None) -> None:
            q = q_ref[q_slot, pl.ds(h * group, group)].reshape(rows, H)
            s = scores(q, k_stream.load(slot, h, dtype)) * scale
            if soft_cap is not None:
                s = soft_cap * jnp.tanh(s / soft_cap)
            if mask is not None:
                s = s.reshape(group, block_q, block_k)
                s = jnp.where(mask[None], s, MASK_VALUE).reshape(rows, block_k)
            m = m_ref[h]
            m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
            correction = jnp.exp(m - m_new)
            p = jnp.exp(s - m_new)
            m_ref[h] = m_new
            l_ref[h] = l_ref[h] * correction + jnp.sum(p, axis=1, keepdims=True)
            acc_ref[h] = acc_ref[h] * correction + weigh(p, v_stream.load(slot, h, dtype, visible))

        lax.fori_loop(0, K, of_head, None)

    def visible_pairs(i: jax.Array, b: jax.Array) -> jax.Array:
        """Returns which (token, key) pairs of tile and block see each other: bool[block_q, block_k]."""
        row = loop.item(i, ROW)
        first, end, kv_len = cu_q_lens_ref[row], cu_q_lens_ref[row + 1], kv_lens_ref[row]
        shape = (block_q, block_k)
        token = loop.item(i, TILE) * block_q + lax.broadcasted_iota(jnp.int32, shape, 0)
        key = b * block_k + lax.broadcasted_iota(jnp.int32, shape, 1)
        position = kv_len - end + token
        mask = key <= position
        if sliding_window is not None:
            mask &= key > position - sliding_window
        if num_words:
            words = trees[0][lax.rem(tile_counts[begun] - 1, 2)]
            key_token = key - (kv_len - (end - first))  # which query token of the row the key is
            word, any_word = jnp.zeros(shape, jnp.int32), jnp.zeros((block_q, 1), jnp.int32)
            for w in range(num_words):
                word = jnp.where(key_token >> 5 == w, words[:, w : w + 1], word)
                any_word |= words[:, w : w + 1]
            in_tree = (lax.shift_right_logical(word, key_token & 31) & 1) == 1
            no_tree = jnp.broadcast_to(any_word, shape) == 0
            mask &= no_tree | in_tree | (key_token < 0) | (key == position)
        return mask & (token >= first) & (token < end)

    def block(i: jax.Array, b: jax.Array, slot: jax.Array) -> None:
        row, start = loop.item(i, ROW), loop.item(i, TILE) * block_q
        first, end, kv_len = cu_q_lens_ref[row], cu_q_lens_ref[row + 1], kv_lens_ref[row]
        oldest = kv_len - end + start  # position of the tile's first token
        seen_by_all = kv_len - (end - first) if num_words else oldest + 1
        is_whole = (first <= start) & (end >= start + block_q) & ((b + 1) * block_k <= seen_by_all)
        if sliding_window is not None:
            is_whole &= b * block_k > oldest + block_q - 1 - sliding_window
        pl.when(is_whole)(lambda: attend(slot, None, None))
        pl.when(~is_whole)(lambda: attend(slot, visible_pairs(i, b), loop.visible(i, b)))

    def finish(i: jax.Array) -> None:
        @pl.when(loop.item(i, LAST) == 1)
        def _() -> None:
            @pl.when(tile_counts[begun] > 1)
            def _() -> None:
                for copy in copies_out(i):  # of the tile before: the sizes are the same
                    copy.wait()

            def of_head(h: Any, _: None) -> None:
                m, l = m_ref[h], l_ref[h]
                seen = m > 0.5 * MASK_VALUE
                out = jnp.where(seen, acc_ref[h] / l, 0.0)
                out_ref[pl.ds(h * group, group)] = out.reshape(group, block_q, H).astype(out_ref.dtype)
                lse = jnp.where(seen, m + jnp.log(l), -jnp.inf).reshape(group, block_q, 1)
                for g in range(group):
                    lse_ref[h, g : g + 1] = to_row(lse[g])

            lax.fori_loop(0, K, of_head, None)
            for copy in copies_out(i):
                copy.start()

    tile_counts[prefetched] = 0
    tile_counts[begun] = 0
    loop.run(prefetch, begin, block, finish)

    @pl.when(count_ref[0] > 0)
    def _() -> None:
        for copy in copies_out(count_ref[0] - 1):
            copy.wait()
