"""What the decoder is told of a step, besides parameters and cache."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NEVER = 2**31 - 1  # a position that no token has


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class H2ORows:
    """What each row keeps of its keys (H2O, Zhang et al., 2023); see `heavy_hitters.py`."""

    budget: jax.Array  # i32[S]  tokens kept
    recent: jax.Array  # i32[S]  of these, the newest
    first_eviction: jax.Array  # i32[S]  first position whose token takes the place of another; NEVER for plain rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """T tokens of S rows, flat and ragged; see `ragged_paged_attention` for the meaning of the row fields.

    The page table may leave out pages that no token of the step sees. `dead_lens` tokens of a row are in those, and
    `kv_lens` does not count them; positions do. They lie behind the pages of the attention sinks.
    """

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]  in the text
    slot_mapping: jax.Array  # i32[T]  page * page_size + offset of each new token
    page_indices: jax.Array  # i32[S, M]
    kv_lens: jax.Array  # i32[S]
    cu_q_lens: jax.Array  # i32[S + 1]
    num_decode_rows: jax.Array | None  # i32[], None: every row is a decode row
    slots: jax.Array | None = None  # i32[S]  the engine's slot of each row; caches with open pages need it
    h2o: H2ORows | None = None  # None: the attention that keys receive is not counted
    dead_lens: jax.Array | None = None  # i32[S]  a multiple of the page size; None: 0

    def places(self, rows: jax.Array | None = None) -> jax.Array:
        """Returns i32[T], where tokens of these rows (None: one a row) stand among the keys of the page table."""
        if self.dead_lens is None:
            return self.positions
        return self.positions - (self.dead_lens if rows is None else self.dead_lens[rows])


def decode_batch(
    token_ids: Int[Array, " S"],
    positions: Int[Array, " S"],
    page_indices: Int[Array, "S M"],
    active: Bool[Array, " S"],
    page_size: int,
    slots: Int[Array, " S"] | None = None,
    dead_lens: Int[Array, " S"] | None = None,
    h2o: H2ORows | None = None,
) -> TokenBatch:
    """Returns the batch of a decode step: one token a row, at `positions`; rows that are not active are empty."""
    S = token_ids.shape[0]
    places = positions if dead_lens is None else positions - dead_lens
    kv_lens, is_written = places + 1, active
    if h2o is not None:
        evicts = positions >= h2o.first_eviction
        kv_lens, is_written = jnp.where(evicts, h2o.budget, kv_lens), active & ~evicts
    page = jnp.take_along_axis(page_indices, (places // page_size)[:, None], axis=1, mode="clip")[:, 0]
    return TokenBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=jnp.where(is_written, page * page_size + places % page_size, 0),
        page_indices=page_indices,
        kv_lens=jnp.where(active, kv_lens, 0),
        cu_q_lens=jnp.arange(S + 1, dtype=jnp.int32),
        num_decode_rows=None,
        slots=slots,
        dead_lens=dead_lens,
        h2o=h2o,
    )
