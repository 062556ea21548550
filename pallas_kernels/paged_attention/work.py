"""The work items of a launch: jobs (tiles of query tokens) whose keys are split evenly over the card.

Flash-decoding (Dao et al., 2023) with a dynamic split: the quota of blocks for an item follows from all lengths of the
step, so one long row fills the card and many short ones are not split at all. Computed by XLA from the lengths alone,
so the layers of a step share it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

# Columns of an item.
JOB, ROW, BEGIN, END, FIRST, LAST, KV_LEN, START = range(8)


class Work(NamedTuple):
    """Jobs and their items.

    Attributes:
        tokens: i32[J, tokens of a job], indices of its query tokens; meaningless beyond `lengths`.
        lengths: i32[J], its query tokens; 0 for jobs that are not there.
        items: i32[W, 8]: job, row, key blocks [BEGIN, END), positions of the job's first and last query token, keys
            of the row, position of the row's first query token. Items without work have BEGIN = END.
        first_item: i32[J], the first item of a job.
        counts: i32[J], its number of items.
    """

    tokens: jax.Array
    lengths: jax.Array
    items: jax.Array
    first_item: jax.Array
    counts: jax.Array


def decode_work(
    kv_lens: Int[Array, " S"], cu_q_lens: Int[Array, " S+1"], num_decode_rows: Int[Array, ""] | None,
    block_k: int, num_items: int, sliding_window: int | None,
) -> Work:  # fmt: skip
    """Returns a job for each of the S rows, row s with token s; rows from `num_decode_rows` on have no work."""
    S = kv_lens.shape[0]
    row = jnp.arange(S, dtype=jnp.int32)
    active = (jnp.diff(cu_q_lens) > 0) & (kv_lens > 0)
    if num_decode_rows is not None:
        active &= row < num_decode_rows
    last = kv_lens - 1
    return _split(row[:, None], row, active, last, last, kv_lens, last, block_k, num_items, sliding_window)


def prefill_work(
    num_tokens: int, tokens_per_job: int, kv_lens: Int[Array, " S"], cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""], block_k: int, num_items: int, sliding_window: int | None,
) -> Work:  # fmt: skip
    """Returns jobs of `tokens_per_job` tokens of one row each, for the rows from `num_decode_rows` on."""
    S = kv_lens.shape[0]
    q_lens = jnp.diff(cu_q_lens)
    counts = lax.div(q_lens + (tokens_per_job - 1), jnp.int32(tokens_per_job))
    counts = jnp.where(jnp.arange(S, dtype=jnp.int32) < num_decode_rows, 0, counts)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    job = jnp.arange(num_tokens // tokens_per_job + S, dtype=jnp.int32)
    row = jnp.sum(ends[None] <= job[:, None], axis=1, dtype=jnp.int32)
    active, row = row < S, jnp.minimum(row, S - 1)
    offset = (job - ends[row] + counts[row]) * tokens_per_job
    start = kv_lens[row] - q_lens[row]
    first = start + offset
    last = start + jnp.minimum(offset + tokens_per_job, q_lens[row]) - 1
    tokens = (cu_q_lens[row] + offset)[:, None] + jnp.arange(tokens_per_job, dtype=jnp.int32)[None]
    return _split(tokens, row, active, first, last, kv_lens[row], start, block_k, num_items, sliding_window)


def token_places(work: Work, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns for each query token its job, its place in the job, and whether any job has it."""
    jobs, size = work.tokens.shape
    token, job = jnp.arange(num_tokens, dtype=jnp.int32), jnp.arange(jobs, dtype=jnp.int32)
    starts = jnp.where(work.lengths > 0, work.tokens[:, 0], num_tokens)
    job = jnp.max(jnp.where(starts[None] <= token[:, None], job[None], 0), axis=1)  # jobs are in the order of tokens
    place = token - work.tokens[job, 0]
    has = (place >= 0) & (place < work.lengths[job])
    return job, jnp.clip(place, 0, size - 1), has


def _split(
    tokens: jax.Array, row: jax.Array, active: jax.Array, first: jax.Array, last: jax.Array, kv_len: jax.Array,
    start: jax.Array, block_k: int, num_items: int, sliding_window: int | None,
) -> Work:  # fmt: skip
    J = row.shape[0]
    begin = jnp.zeros_like(first)
    if sliding_window is not None:
        begin = lax.div(jnp.maximum(first - (sliding_window - 1), 0), jnp.int32(block_k))
    blocks = jnp.where(active, lax.div(last, jnp.int32(block_k)) + 1 - begin, 0)
    # sum(ceil(blocks / quota)) <= J + num_items, whatever the lengths
    quota = jnp.maximum(lax.div(jnp.sum(blocks) + (num_items - 1), jnp.int32(num_items)), 1)
    counts = lax.div(blocks + (quota - 1), quota)
    share = lax.div(blocks + jnp.maximum(counts, 1) - 1, jnp.maximum(counts, 1))
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    item = jnp.arange(J + num_items, dtype=jnp.int32)
    job = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
    is_item, job = job < J, jnp.minimum(job, J - 1)
    low = begin[job] + (item - ends[job] + counts[job]) * share[job]
    high = jnp.minimum(low + share[job], begin[job] + blocks[job])
    low = jnp.where(is_item, low, 0)
    high = jnp.where(is_item, jnp.maximum(high, low), 0)
    items = jnp.stack([job, row[job], low, high, first[job], last[job], kv_len[job], start[job]], axis=1)
    return Work(tokens, jnp.where(active, last - first + 1, 0), items, ends - counts, counts)
