"""The TPU kernel for rows with one query token."""

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
from pallas_kernels.paged_attention.mosaic_tpu_work import TILE, WorkList
from pallas_kernels.paged_attention.tpu_tiles import VMEM_BYTES
from pallas_kernels.pages import Pages

UNROLLED_HEADS = 8  # up to so many KV heads are unrolled, which lets their matmuls overlap


def decode(
    q: Float[Array, "T N H"], k_pages: Pages, v_pages: Pages, page_indices: Int[Array, "S M"], work: WorkList, *,
    scale: float, soft_cap: float | None, block_k: int, interpret: Any,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:  # fmt: skip
    """Returns output and log-sum-exp at the tokens of `work`, and anything elsewhere.

    All N query heads of the token are the left operand of every KV head's matmul, and the rows that belong to the
    head are then selected. That multiplies the arithmetic by K, which costs nothing: the matrix unit is bound by
    pushing K and V tiles, at any number of rows up to about its own side; and neither q nor the output needs a
    layout other than [T, N, H].
    """
    T, N, H = q.shape
    pages_per_block = block_k // k_pages.shape[2]
    dtype = compute_dtype(q, k_pages, v_pages)
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    inputs = [q, *operands(k_pages), *operands(v_pages)]
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, k_pages=k_pages, v_pages=v_pages, pages_per_row=page_indices.shape[1],
            pages_per_block=pages_per_block, dtype=dtype, scale=scale, soft_cap=soft_cap,
        ),
        out_shape=(jax.ShapeDtypeStruct((T, N, H), q.dtype), jax.ShapeDtypeStruct((T, 1, N), jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[any_memory] * len(inputs),
            out_specs=(any_memory, any_memory),
            scratch_shapes=[
                [*buffers(k_pages, pages_per_block), *buffers(v_pages, pages_per_block)],
                pltpu.VMEM((2, N, H), q.dtype),  # q
                pltpu.VMEM((N, 1), jnp.float32),  # m
                pltpu.VMEM((N, 1), jnp.float32),  # l
                pltpu.VMEM((N, H), jnp.float32),  # acc
                pltpu.VMEM((2, N, H), q.dtype),  # out
                pltpu.VMEM((2, 1, N), jnp.float32),  # lse
                pltpu.SemaphoreType.DMA((2,)),  # pages
                pltpu.SemaphoreType.DMA((2,)),  # q
                pltpu.SemaphoreType.DMA((2,)),  # out and lse
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="ragged_paged_attention_decode",
    )(work.items, work.count, page_indices.reshape(-1), *inputs)  # fmt: skip
    return out, lse[:, 0]


def _kernel(
    items_ref: Any, count_ref: Any, page_table_ref: Any, *refs: Any, k_pages: Pages, v_pages: Pages,
    pages_per_row: int, pages_per_block: int, dtype: jnp.dtype, scale: float, soft_cap: float | None,
) -> None:  # fmt: skip
    num_pages = len(operands(k_pages)) + len(operands(v_pages))
    q_hbm, *pages_hbm = refs[: 1 + num_pages]
    out_hbm, lse_hbm = refs[1 + num_pages : 3 + num_pages]
    blocks, q_ref, m_ref, l_ref, acc_ref, out_ref, lse_ref, page_sems, q_sems, out_sems = refs[3 + num_pages :]
    K, page_size = k_pages.shape[0], k_pages.shape[2]
    k_stream, v_stream = PageStream.split(tuple(pages_hbm), tuple(blocks), k_pages, v_pages)
    loop = BlockLoop(
        items_ref, count_ref, page_table_ref, pages_per_row, page_size, pages_per_block, (k_stream, v_stream), page_sems
    )
    N, H = acc_ref.shape

    def copy_q(i: jax.Array) -> Any:
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(q_hbm.at[loop.item(i, TILE)], q_ref.at[slot], q_sems.at[slot])

    def copies_out(i: jax.Array) -> tuple[Any, Any]:
        slot, token = lax.rem(i, 2), loop.item(i, TILE)
        return (
            pltpu.make_async_copy(out_ref.at[slot], out_hbm.at[token], out_sems.at[slot]),
            pltpu.make_async_copy(lse_ref.at[slot], lse_hbm.at[token], out_sems.at[slot]),
        )

    def begin(i: jax.Array) -> None:
        copy_q(i).wait()
        m_ref[...] = jnp.full_like(m_ref, MASK_VALUE)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def each_head(shape: tuple[int, int], of_head: Any) -> jax.Array:
        """Returns `of_head(h)` in the rows of KV head h, for all h."""
        row_head = lax.broadcasted_iota(jnp.int32, shape, 0) // (N // K)

        def add(h: Any, result: jax.Array) -> jax.Array:
            return jnp.where(row_head == h, of_head(h), result)

        return lax.fori_loop(0, K, add, jnp.zeros(shape, jnp.float32), unroll=K <= UNROLLED_HEADS)

    def attend(i: jax.Array, b: jax.Array, slot: jax.Array, masked: bool) -> None:
        q = q_ref[lax.rem(i, 2)]
        visible = loop.visible(i, b) if masked else None
        s = each_head((N, loop.block_k), lambda h: scores(q, k_stream.load(slot, h, dtype))) * scale
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        if visible is not None:
            s = jnp.where(visible.along(s.shape, 1), s, MASK_VALUE)
        m = m_ref[...]
        m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
        correction = jnp.exp(m - m_new)
        p = jnp.exp(s - m_new)
        m_ref[...] = m_new
        l_ref[...] = l_ref[...] * correction + jnp.sum(p, axis=1, keepdims=True)
        pv = each_head((N, H), lambda h: weigh(p, v_stream.load(slot, h, dtype, visible)))
        acc_ref[...] = acc_ref[...] * correction + pv

    def block(i: jax.Array, b: jax.Array, slot: jax.Array) -> None:
        visible = loop.visible(i, b)
        is_whole = (visible.start <= 0) & (visible.end >= loop.block_k)
        pl.when(is_whole)(lambda: attend(i, b, slot, masked=False))
        pl.when(~is_whole)(lambda: attend(i, b, slot, masked=True))

    def finish(i: jax.Array) -> None:
        slot = lax.rem(i, 2)

        @pl.when(i >= 2)
        def _() -> None:
            for copy in copies_out(i - 2):
                copy.wait()

        l = l_ref[...]
        out_ref[slot] = (acc_ref[...] / l).astype(out_ref.dtype)
        lse_ref[slot] = to_row(m_ref[...] + jnp.log(l))
        for copy in copies_out(i):
            copy.start()

    loop.run(lambda i: copy_q(i).start(), begin, block, finish)

    for back in (2, 1):

        @pl.when(count_ref[0] >= back)
        def _(back: int = back) -> None:
            for copy in copies_out(count_ref[0] - back):
                copy.wait()
