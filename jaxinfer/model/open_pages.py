"""Attention over a cache whose pages are quantized when they are full, in the way of KIVI (Liu et al., 2024).

A query token sees the packed pages before its own page, and its own page up to itself in full precision. That depends
on its position alone, so that neither chunks nor batches nor a preemption change what a token sees, and a packed page
can be shared. The two parts are two calls of the same kernels, joined by their log-sum-exp.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.join import Part, join
from jaxinfer.model.kv_cache import OpenPages
from pallas_kernels.kv_write import write_full_pages, write_kv
from pallas_kernels.page_copy import scatter_pages
from pallas_kernels.paged_attention import Schedule, make_schedule, ragged_paged_attention
from pallas_kernels.pages import Pages, QuantizedPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenPlan:
    """Where a step's tokens lie among the open pages; made once for all layers.

    The tokens of one row in one page are a segment. A row's first segment lies in its open page; the others, which only
    a chunk of a prompt has, in further pages that live for the step.
    """

    slots: jax.Array  # i32[T]  place of each token: page * page_size + offset
    page_indices: jax.Array  # i32[G, 1]  page of each segment
    kv_lens: jax.Array  # i32[G]  tokens in it, after the step
    cu_q_lens: jax.Array  # i32[G + 1]  tokens of this step, as prefix sums
    schedule: Schedule  # of the attention within segments
    num_full: jax.Array  # i32[]  pages that are full
    full: jax.Array  # i32[G]  these, first
    destinations: jax.Array  # i32[G]  the pages of the cache that they become
    last: jax.Array | None  # i32[S]  page that is a row's open page after the step; None: the same as before
    owners: jax.Array | None  # i32[S]  the row's open page, 0 for empty rows
    num_extra: int = dataclasses.field(metadata={"static": True})  # further pages


def packed_view(batch: TokenBatch, page_size: int, window: int | None) -> tuple[TokenBatch, bool]:
    """Returns the batch as attention over packed pages is told of it, and whether it must leave out each own page.

    Where each row has one token and no window, it is enough to say that the row ends before its own page: all kernels
    can do that.
    """
    if batch.num_decode_rows is not None or window is not None:
        return batch, True
    return dataclasses.replace(batch, kv_lens=lax.div(jnp.maximum(batch.kv_lens - 1, 0), page_size) * page_size), False


def plan_open_pages(batch: TokenBatch, page_size: int, num_open: int, window: int | None) -> OpenPlan:
    """Returns the plan of a step over `num_open` open pages, the null page included."""
    assert batch.slots is not None, "a cache with open pages needs the slot of every row"
    T, S = batch.token_ids.shape[0], batch.kv_lens.shape[0]
    offset = batch.positions % page_size
    cu = batch.cu_q_lens
    if batch.num_decode_rows is None:
        page = batch.places() // page_size
        active = batch.kv_lens > 0
        own = jnp.where(active, batch.slots + 1, 0)
        lens = jnp.where(active, offset + 1, 0)
        slots = own * page_size + jnp.where(active, offset, 0)
        target = jnp.take_along_axis(batch.page_indices, page[:, None], axis=1, mode="clip")[:, 0]
        last = owners = None
        extra = 0
    else:
        extra, G = min(T, T // page_size + S), min(T, T // page_size + 2 * S)
        token = jnp.arange(T, dtype=jnp.int32)
        row = jnp.sum(cu[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
        is_real, row = row < S, jnp.minimum(row, S - 1)
        starts_row = token == cu[row]
        starts = is_real & (starts_row | (offset == 0))
        segment = jnp.cumsum(starts, dtype=jnp.int32) - 1
        is_further = starts & ~starts_row
        place = jnp.where(starts_row, batch.slots[row] + 1, num_open - 1 + jnp.cumsum(is_further, dtype=jnp.int32))
        first = jnp.full(G, cu[-1]).at[jnp.where(starts, segment, G)].set(token, mode="drop")
        is_used, at = first < cu[-1], jnp.minimum(first, T - 1)
        own = jnp.where(is_used, place[at], 0)
        cu = jnp.append(first, cu[-1])
        lens = jnp.where(is_used, offset[jnp.maximum(cu[1:] - 1, 0)] + 1, 0)
        slots = jnp.where(is_real, own[segment] * page_size + offset, 0)
        target = batch.page_indices[row[at], (batch.places(row) // page_size)[at]]
        is_empty = batch.cu_q_lens[1:] == batch.cu_q_lens[:-1]
        last = jnp.where(is_empty, 0, own[segment[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)]])
        owners = jnp.where(is_empty, 0, batch.slots + 1)
    is_full = lens == page_size
    order = jnp.argsort(~is_full, stable=True)
    schedule = make_schedule(T, page_size, 1, lens, cu, batch.num_decode_rows, window)
    return OpenPlan(
        slots, own[:, None], lens, cu, schedule, jnp.sum(is_full, dtype=jnp.int32), own[order], target[order], last,
        owners, extra,
    )  # fmt: skip


def attend(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: tuple[Pages, Pages],
    open_pages: OpenPages, batch: TokenBatch, schedule: Schedule, plan: OpenPlan, *,
    rope: tuple[jax.Array, jax.Array] | None, scale: float, window: int | None, implementation: str | None,
    write_implementation: str | None,
) -> tuple[Part, tuple[Pages, Pages], OpenPages]:  # fmt: skip
    """Returns the attention of the step's tokens with its log-sum-exp, the layer's packed pages and its open pages.

    Args:
        q: queries, rotated.
        k: new keys, rotated by `rope`.
        v: new values.
        pages: the packed keys and values.
        open_pages: the rows' open pages.
        batch: the step's tokens.
        schedule: of `packed_view`.
        plan: where the tokens lie.
        rope: see `write_kv`.
        scale: see `ragged_paged_attention`, as the next two.
        window: sliding window.
        implementation: of attention.
        write_implementation: of `write_kv`.
    """
    page_size, num_open = open_pages[0].shape[2], open_pages[0].shape[1]
    if plan.num_extra:
        open_pages = _map(lambda x: jnp.pad(x, ((0, 0), (0, plan.num_extra), (0, 0), (0, 0))), open_pages)
    opened: Any = write_kv(*open_pages, k, v, plan.slots, rope=rope, implementation=write_implementation)

    def pack(i: jax.Array, pages: Any) -> Any:
        return tuple(
            _put(x, lax.dynamic_slice_in_dim(new, plan.full[i], 1, axis=1), plan.destinations[i][None])
            for x, new in zip(pages, opened)
        )

    pages = lax.fori_loop(0, plan.num_full, pack, pages)  # as many turns as there are full pages: seldom any
    view, before_own_page = packed_view(batch, page_size, window)
    options: dict[str, Any] = {"scale": scale, "sliding_window": window, "implementation": implementation}
    before = ragged_paged_attention(
        q, pages[0], pages[1], view.page_indices, view.kv_lens, view.cu_q_lens, view.num_decode_rows, schedule=schedule,
        before_own_page=before_own_page, return_lse=True, **options,
    )  # fmt: skip
    own = ragged_paged_attention(
        q, opened[0], opened[1], plan.page_indices, plan.kv_lens, plan.cu_q_lens, batch.num_decode_rows,
        schedule=plan.schedule, return_lse=True, **options,
    )  # fmt: skip
    if plan.last is not None:
        opened = _map(lambda x: x[:, :num_open].at[:, plan.owners].set(x[:, plan.last]), opened)
    return join(before, own), pages, opened


def _map(function: Any, pair: Any) -> Any:
    return tuple(map(function, pair))


def _put(pages: Pages, full: Float[Array, "K 1 page_size H"], destination: jax.Array) -> Pages:
    if isinstance(pages, QuantizedPages):
        return write_full_pages(pages, full, destination)
    return scatter_pages(pages, full.astype(pages.dtype), destination)
