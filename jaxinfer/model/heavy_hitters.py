"""Attention of rows that forget: H2O, the heavy-hitter oracle (Zhang et al., 2023), over paged memory.

For each layer and KV head on its own, a log holds beside every key the attention that it has received: the sum of its
probabilities over all queries so far and over the query heads of its KV head. A prompt is computed with all its keys;
then `compact_layer` keeps the greatest sums among the older tokens, and the newest tokens. From there on each new token
takes the place of the one with the least sum among those that are not recent, so that a row's memory stays the same
(the paper's Algorithm 1, but that the eviction comes before the attention of the new token and not after it). The
order of places is of no matter: keys carry their own rotation, and a row's one query sees all of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.model.batch import NEVER, TokenBatch
from jaxinfer.model.join import Part
from jaxinfer.model.key_mass import add_key_mass
from jaxinfer.model.kv_cache import KeyLog
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import Schedule, make_schedule, ragged_paged_attention
from pallas_kernels.pages import Pages

PLACES_PER_BLOCK = 256  # whose sums are compared at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class H2OPlan:
    """What a step counts and forgets; made once for all layers."""

    schedule: Schedule  # of the rows with H2O alone
    evicts: jax.Array  # bool[R]  whether token t, that of row t, takes another's place; R = min(T, S)
    newest: jax.Array  # i32[R]  highest position that may be forgotten for it
    num_blocks: jax.Array  # i32[]  blocks of places to be searched, 0 if no row evicts


def plan_h2o(batch: TokenBatch, page_size: int) -> H2OPlan:
    """Returns the plan of a step. Rows that evict have one token, and such rows come first."""
    assert batch.h2o is not None, "key logs need rows that say what is kept"
    h2o, T = batch.h2o, batch.token_ids.shape[0]
    R = min(T, batch.kv_lens.shape[0])
    counted = jnp.where(h2o.first_eviction == NEVER, 0, batch.kv_lens)
    schedule = make_schedule(T, page_size, batch.page_indices.shape[1], counted, batch.cu_q_lens, batch.num_decode_rows)
    positions = batch.positions[:R]
    has_one_token = jnp.diff(batch.cu_q_lens)[:R] == 1
    evicts = has_one_token & (batch.kv_lens[:R] > 0) & (positions >= h2o.first_eviction[:R])
    if batch.num_decode_rows is not None:
        evicts &= jnp.arange(R, dtype=jnp.int32) < batch.num_decode_rows
    block = _pages_per_block(page_size) * page_size
    num_blocks = lax.div(jnp.max(jnp.where(evicts, h2o.budget[:R], 0)) + (block - 1), jnp.int32(block))
    return H2OPlan(schedule, evicts, positions - h2o.recent[:R], num_blocks)


def attend(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: tuple[Pages, Pages],
    log: KeyLog, batch: TokenBatch, schedule: Schedule, plan: H2OPlan, *,
    rope: tuple[jax.Array, jax.Array] | None, scale: float, window: int | None, implementation: str | None,
    write_implementation: str | None,
) -> tuple[Part, tuple[Pages, Pages], KeyLog]:  # fmt: skip
    """Returns the attention of the step's tokens with its log-sum-exp, the layer's pages and its log.

    Rows without H2O get what they get in a step without it: their tokens are in the log, and nobody reads them there.

    Args:
        q: queries, rotated.
        k: new keys, rotated by `rope`.
        v: new values.
        pages: keys and values.
        log: of the layer.
        batch: the step's tokens; the null page is where tokens that evict are written first.
        schedule: of all rows.
        plan: see `plan_h2o`.
        rope: see `write_kv`.
        scale: see `ragged_paged_attention`, as the next two.
        window: None: no row could forget otherwise.
        implementation: of attention.
        write_implementation: of `write_kv`.
    """
    assert window is None, "a layer with a sliding window has a rule of its own for what it forgets"
    K, R = k.shape[1], plan.evicts.shape[0]
    victims = _victims(log, batch, plan)
    pages = write_kv(*pages, k, v, batch.slot_mapping, rope=rope, implementation=write_implementation)
    first = None if rope is None else (rope[0][:R], rope[1][:R])
    pages = write_kv(*pages, k[:R], v[:R], victims, rope=first, implementation=write_implementation)
    slots = jnp.broadcast_to(batch.slot_mapping, (K, batch.slot_mapping.shape[0]))
    for places, positions in ((slots, batch.positions), (victims, batch.positions[:R])):
        log = _begin(log, places, positions)
    out, lse = ragged_paged_attention(
        q, *pages, batch.page_indices, batch.kv_lens, batch.cu_q_lens, batch.num_decode_rows, scale=scale,
        schedule=schedule, return_lse=True, implementation=implementation,
    )  # fmt: skip
    mass = add_key_mass(log.mass, q, pages[0], lse, batch.page_indices, plan.schedule, scale=scale)
    return (out, lse), pages, dataclasses.replace(log, mass=mass)


def compact_layer(
    pages: tuple[Pages, Pages], log: KeyLog, page_indices: Int[Array, " M"], num_tokens: Int[Array, ""],
    heavy: Int[Array, ""], recent: Int[Array, ""],
) -> tuple[tuple[Pages, Pages], KeyLog]:  # fmt: skip
    """Returns a layer in which the first of a row's pages hold what it keeps of `num_tokens` tokens.

    Args:
        pages: keys and values whose scales, if any, are those of tokens: they move as they are stored.
        log: of the layer.
        page_indices: the row's pages, which lie in order of position; then the null page.
        num_tokens: in these pages, more than `heavy + recent`.
        heavy: how many of the older tokens are kept; of equal sums, those of the first.
        recent: newest tokens, kept.
    """
    K, _, page_size = log.mass.shape
    place = jnp.arange(page_indices.shape[0] * page_size, dtype=jnp.int32)
    mass = log.mass[:, page_indices].reshape(K, -1)
    loss = jnp.where(place < num_tokens - recent, -mass, -jnp.inf)
    loss = jnp.where(place < num_tokens, loss, jnp.inf)
    kept = jnp.argsort(loss, axis=1, stable=True)  # the recent ones, then the heavy ones, then the others
    page = jnp.arange(page_indices.shape[0], dtype=jnp.int32)
    destination = jnp.where(page * page_size < heavy + recent, page_indices, 0)

    def move(x: jax.Array) -> jax.Array:
        tokens = x[:, page_indices].reshape(K, place.shape[0], *x.shape[3:])
        tokens = jnp.take_along_axis(tokens, kept.reshape(*kept.shape, *(1,) * (tokens.ndim - 2)), axis=1)
        return x.at[:, destination].set(tokens.reshape(K, page_indices.shape[0], *x.shape[2:]))

    return jax.tree.map(move, (pages, log))


def _begin(log: KeyLog, slots: Int[Array, "K T"], positions: Int[Array, " T"]) -> KeyLog:
    """Returns the log with new tokens at `slots` = page * page_size + offset: they have received nothing."""

    def put(x: jax.Array, values: jax.Array) -> jax.Array:
        K = x.shape[0]
        head = jnp.arange(K, dtype=jnp.uint32)[:, None]
        return x.reshape(K, -1).at[head, slots.astype(jnp.uint32)].set(values).reshape(x.shape)

    return KeyLog(put(log.mass, jnp.zeros((), jnp.float32)), put(log.positions, positions[None]))


def _victims(log: KeyLog, batch: TokenBatch, plan: H2OPlan) -> Int[Array, "K R"]:
    """Returns the slot whose token each evicting row forgets, 0 (of the null page) for the other rows.

    Of those that are not recent, the one with the least sum; of equal ones, the oldest.
    """
    assert batch.h2o is not None
    budget = batch.h2o.budget
    (K, _, page_size), R = log.mass.shape, plan.evicts.shape[0]
    count = _pages_per_block(page_size)
    pages = jnp.pad(batch.page_indices[:R], ((0, 0), (0, count)))

    def block(i: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        index = lax.dynamic_slice_in_dim(pages, i * count, count, axis=1)
        mass, positions = (x[:, index].reshape(K, R, -1) for x in (log.mass, log.positions))
        offset = jnp.arange(count * page_size, dtype=jnp.int32)
        is_held = plan.evicts[:, None] & ((i * count * page_size + offset)[None] < budget[:R, None])
        may_go = is_held[None] & (positions <= plan.newest[None, :, None])
        mass, positions = jnp.where(may_go, mass, jnp.inf), jnp.where(may_go, positions, NEVER)
        least = jnp.min(mass, axis=2)
        positions = jnp.where(mass == least[..., None], positions, NEVER)
        oldest, at = jnp.min(positions, axis=2), jnp.argmin(positions, axis=2).astype(jnp.int32)
        page = index[jnp.arange(R, dtype=jnp.int32), at // page_size]
        found = (least, oldest, page * page_size + at % page_size)
        better = (least < best[0]) | ((least == best[0]) & (oldest < best[1]))
        return tuple(jnp.where(better, new, old) for new, old in zip(found, best))

    none = (jnp.full((K, R), jnp.inf), jnp.full((K, R), NEVER, jnp.int32), jnp.zeros((K, R), jnp.int32))
    return lax.fori_loop(0, plan.num_blocks, block, none)[2]


def _pages_per_block(page_size: int) -> int:
    return max(1, PLACES_PER_BLOCK // page_size)
