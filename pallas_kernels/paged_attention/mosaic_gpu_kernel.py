"""The Hopper kernel of ragged paged attention: one work item for one KV head.

A producer warpgroup gathers pages by TMA into rings of blocks; one or two compute warpgroups of 64 query rows (tokens
x heads of the group) each multiply, with an online softmax in between (FlashAttention-2 and 3, Dao 2023, Shah et al.
2024). Quantized blocks are unpacked in registers and laid down as bf16 for wgmma, which reads its right operand from
shared memory alone.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_gpu_pages import PageRing, RingMemory, parts, swizzled
from pallas_kernels.paged_attention.tiles import BLOCK_Q, TileConfig
from pallas_kernels.paged_attention.work import BEGIN, END, FIRST, JOB, KV_LEN, LAST, ROW, START
from pallas_kernels.pages import Pages

MASK_VALUE = -1e30
LOG2E = math.log2(math.e)
ROWS, TILE = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """All that the kernel knows at compile time."""

    tiles: TileConfig
    heads_per_group: int  # G
    tokens: int  # query tokens of a warpgroup
    rows: int  # of BLOCK_Q, those that are loaded and stored: tokens * G, rounded up to 8
    head_dim: int
    dtype: Any  # of queries and output: bf16 or f16
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    tree_words: int  # 0: no trees


class _Refs(NamedTuple):
    """Arrays in global memory."""

    items: Any  # i32[W, 8]
    q: Any  # [J, K, warpgroups, rows, H]
    page_indices: Any  # i32[S, M]
    tree: Any  # i32[words, J, warpgroups, rows] or None
    out: Any  # [W, K, warpgroups, rows, H]
    lse: Any  # f32[W, K, warpgroups, BLOCK_Q]


class _Scratch(NamedTuple):
    """Shared memory and barriers of a block."""

    q: Any  # [warpgroups, BLOCK_Q, H], at the end the output
    lse: Any  # f32[warpgroups, BLOCK_Q]
    q_full: Any
    k: RingMemory
    v: RingMemory


def run_kernel(
    config: KernelConfig, items: jax.Array, q: jax.Array, k_pages: Pages, v_pages: Pages, page_indices: jax.Array,
    tree: jax.Array | None, interpret: Any, name: str,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the normalised output [W, K, warpgroups, rows, H] of all items and f32[W, K, warpgroups, BLOCK_Q].

    The latter is the natural log-sum-exp of each row. Items without work leave both undefined.
    """
    c = config
    W, K, groups = items.shape[0], k_pages.shape[0], c.tiles.warpgroups
    k_ring, v_ring = (PageRing.of(x, c.tiles, c.dtype, page_indices.shape[1]) for x in (k_pages, v_pages))
    # wgmma wants one layout of both its operands, so queries lie as keys do.
    tile = plgpu.SMEM((groups, BLOCK_Q, c.head_dim), c.dtype, transforms=swizzled(c.head_dim // k_ring.planes))
    scratch = _Scratch(
        tile, plgpu.SMEM((groups, BLOCK_Q), jnp.float32), plgpu.Barrier(num_barriers=groups),
        k_ring.scratch(), v_ring.scratch(),
    )  # fmt: skip

    def body(
        items: Any, q: Any, k_parts: Any, v_parts: Any, page_indices: Any, tree: Any, out: Any, lse: Any, memory: Any
    ) -> None:
        refs = _Refs(items, q, page_indices, tree, out, lse)
        _run_item(c, k_ring, v_ring, k_parts, v_parts, refs, memory)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((W, K, groups, c.rows, c.head_dim), c.dtype),
            jax.ShapeDtypeStruct((W, K, groups, BLOCK_Q), jnp.float32),
        ),
        scratch_types=(scratch,), grid=(W, K), grid_names=("item", "head"), num_threads=groups + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret, kernel_name=name,
    )(items, q, parts(k_pages), parts(v_pages), page_indices, tree)  # fmt: skip


def _run_item(
    c: KernelConfig, k_ring: PageRing, v_ring: PageRing, k_parts: Any, v_parts: Any, refs: _Refs, scratch: _Scratch
) -> None:
    """Runs the item of this block of threads."""
    tiles = c.tiles
    item, head, warpgroup = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("wg")
    begin, end = refs.items[item, BEGIN], refs.items[item, END]

    @pl.when(end > begin)
    def _work() -> None:
        @pl.when(warpgroup == tiles.warpgroups)
        def _produce() -> None:
            if tiles.warpgroups > 1:
                plgpu.set_max_registers(40, action="decrease")
            row = refs.items[item, ROW]

            @pl.loop(begin, end)
            def _block(block: jax.Array) -> None:
                step = block - begin
                k_ring.fetch(k_parts, scratch.k, refs.page_indices, row, head, block, step)
                v_ring.fetch(v_parts, scratch.v, refs.page_indices, row, head, block, step)

        @pl.when(warpgroup < tiles.warpgroups)
        def _compute() -> None:
            if tiles.warpgroups > 1:
                plgpu.set_max_registers(232, action="increase")
            _attend(c, k_ring, v_ring, refs, scratch, item, head, warpgroup, begin, end)


def _attend(
    c: KernelConfig, k_ring: PageRing, v_ring: PageRing, refs: _Refs, scratch: _Scratch, item: jax.Array,
    head: jax.Array, warpgroup: jax.Array, begin: jax.Array, end: jax.Array,
) -> None:  # fmt: skip
    block_k, H = c.tiles.block_k, c.head_dim
    first, last, kv_len, start = (refs.items[item, column] for column in (FIRST, LAST, KV_LEN, START))
    job = refs.items[item, JOB]
    q_smem, lse_smem = scratch.q.at[warpgroup], scratch.lse.at[warpgroup]
    q_rows = q_smem.at[pl.ds(0, c.rows)]  # what lies in the other rows stays in them
    plgpu.copy_gmem_to_smem(refs.q.at[job, head, warpgroup], q_rows, scratch.q_full.at[warpgroup])
    plgpu.barrier_wait(scratch.q_full.at[warpgroup])

    index = plgpu.broadcasted_iota(jnp.int32, (BLOCK_Q,), 0, layout=ROWS)
    position = first + warpgroup * c.tokens + lax.div(index, jnp.full_like(index, c.heads_per_group))
    words = [plgpu.load(refs.tree.at[w, job, warpgroup], layout=ROWS, optimized=False) for w in range(c.tree_words)]

    def visible(block: jax.Array) -> jax.Array:
        shape = (BLOCK_Q, block_k)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE) + block * block_k
        query = lax.broadcast_in_dim(position, shape, [0])
        seen = key <= query
        if c.sliding_window is not None:
            seen = seen & (key > query - c.sliding_window)
        if words:
            seen = seen & _in_tree(words, key, query, start, shape)
        return seen

    def step(block: jax.Array, carry: Any, masked: bool) -> Any:
        acc, m, l = carry
        turn = block - begin
        k = k_ring.take(scratch.k, turn, block, kv_len, masked=False, fixes=warpgroup == 0)
        s = pl.run_scoped(
            lambda scores: (plgpu.wgmma(scores, q_smem, k.transpose((1, 0))), scores[...])[1],
            plgpu.WGMMAAccumulatorRef((BLOCK_Q, block_k), jnp.float32),
        )
        k_ring.release(scratch.k, turn)
        if c.soft_cap is None:
            factor = c.scale * LOG2E
        else:
            s, factor = jnp.tanh(s * (c.scale / c.soft_cap)), c.soft_cap * LOG2E
        if masked or factor < 0:
            s = s * factor
            if masked:  # after scaling: a fused multiply-subtract of the mask would leave its rounding error, 1e22
                s = jnp.where(visible(block), s, MASK_VALUE)
            m_new = jnp.maximum(m, s.max(axis=1))
            p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
        else:
            m_new = jnp.maximum(m, s.max(axis=1) * factor)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
        alpha = jnp.exp2(m - m_new)
        l = l * alpha + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        v = v_ring.take(scratch.v, turn, block, kv_len, masked=masked, fixes=warpgroup == 0)
        acc = pl.run_state(lambda ref: plgpu.wgmma(ref, p.astype(c.dtype), v))(plgpu.WGMMAAccumulatorRef.init(acc))
        v_ring.release(scratch.v, turn)
        return acc, m_new, l

    carry = (
        plgpu.layout_cast(jnp.zeros((BLOCK_Q, H), jnp.float32), TILE),
        plgpu.layout_cast(jnp.full((BLOCK_Q,), MASK_VALUE, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((BLOCK_Q,), jnp.float32), ROWS),
    )
    # Blocks that all queries see whole need no mask: after the edge of the last query's window, before the first
    # query (or the row's tree).
    edge = jnp.minimum(first, start - 1) if c.tree_words else first
    whole_end = jnp.clip(lax.div(edge + 1, block_k), begin, end)
    whole_begin = begin
    if c.sliding_window is not None:
        whole_begin = lax.div(jnp.maximum(last - c.sliding_window + 1, 0) + (block_k - 1), block_k)
        whole_begin = jnp.clip(whole_begin, begin, whole_end)
        carry = lax.fori_loop(begin, whole_begin, lambda i, x: step(i, x, True), carry)
    carry = lax.fori_loop(whole_begin, whole_end, lambda i, x: step(i, x, False), carry)
    acc, m, l = lax.fori_loop(whole_end, end, lambda i, x: step(i, x, True), carry)

    q_smem[...] = (acc * lax.broadcast_in_dim(1 / l, acc.shape, [0])).astype(c.dtype)
    lse_smem[...] = (m + jnp.log2(l)) * (1 / LOG2E)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_rows, refs.out.at[item, head, warpgroup])
    plgpu.copy_smem_to_gmem(lse_smem, refs.lse.at[item, head, warpgroup])
    plgpu.wait_smem_to_gmem(0)


def _in_tree(words: list[jax.Array], key: jax.Array, query: jax.Array, start: jax.Array, shape: Any) -> jax.Array:
    """As `masks.tree_visible`, for words in registers."""
    index = key - start
    bit = index & 31
    chosen = jnp.zeros_like(index)
    any_word = words[0]
    for w, word in enumerate(words):
        shifted = lax.shift_right_logical(lax.broadcast_in_dim(word, shape, [0]), bit)
        chosen = jnp.where((index >= 32 * w) & (index < 32 * (w + 1)), shifted, chosen)
        any_word = any_word | word
    is_ancestor = (chosen & 1) == 1
    no_tree = lax.broadcast_in_dim(any_word, shape, [0]) == 0
    return no_tree | is_ancestor | (index < 0) | (key == query)
