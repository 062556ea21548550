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
    """T tokens of S rows, flat and ragged; see `ragged_paged_attention` for the meaning of the row fields."""

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    slot_mapping: jax.Array  # i32[T]  page * page_size + offset of each new token
    page_indices: jax.Array  # i32[S, M]
    kv_lens: jax.Array  # i32[S]
    cu_q_lens: jax.Array  # i32[S + 1]
    num_decode_rows: jax.Array | None  # i32[], None: every row is a decode row
    slots: jax.Array | None = None  # i32[S]  the engine's slot of each row; caches with open pages need it
    h2o: H2ORows | None = None  # None: the attention that keys receive is not counted


def decode_batch(
    token_ids: Int[Array, " S"],
    positions: Int[Array, " S"],
    page_indices: Int[Array, "S M"],
    active: Bool[Array, " S"],
    page_size: int,
    slots: Int[Array, " S"] | None = None,
    h2o: H2ORows | None = None,
) -> TokenBatch:
    """Returns the batch of a decode step: one token a row, at `positions`; rows that are not active are empty."""
    S = token_ids.shape[0]
    kv_lens, is_written = positions + 1, active
    if h2o is not None:
        evicts = positions >= h2o.first_eviction
        kv_lens, is_written = jnp.where(evicts, h2o.budget, kv_lens), active & ~evicts
    page = jnp.take_along_axis(page_indices, (positions // page_size)[:, None], axis=1, mode="clip")[:, 0]
    return TokenBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=jnp.where(is_written, page * page_size + positions % page_size, 0),
        page_indices=page_indices,
        kv_lens=jnp.where(active, kv_lens, 0),
        cu_q_lens=jnp.arange(S + 1, dtype=jnp.int32),
        num_decode_rows=None,
        slots=slots,
        h2o=h2o,
    )
