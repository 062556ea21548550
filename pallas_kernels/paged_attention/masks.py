"""Which keys a query token sees beyond plain causality: the tree masks of speculative decoding."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32


def row_starts(num_tokens: int, kv_lens: Int[Array, " S"], cu_q_lens: Int[Array, " S+1"]) -> Int[Array, " T"]:
    """Returns the position of the first query token of each token's row; 0 for padding."""
    S = kv_lens.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
    return jnp.where(row < S, (kv_lens - jnp.diff(cu_q_lens))[jnp.minimum(row, S - 1)], 0)


def tree_visible(
    tree_mask: UInt32[Array, "Q W"], starts: Int[Array, " Q"], positions: Int[Array, " Q"], keys: Int[Array, " J"]
) -> Bool[Array, "Q J"]:
    """Returns whether the tree lets a token see the keys at positions `keys`; causality is left to the caller."""
    index = keys[None] - starts[:, None]
    word = jnp.clip(lax.shift_right_arithmetic(index, jnp.int32(5)), 0, tree_mask.shape[1] - 1)
    bit = jnp.bitwise_and(index, jnp.int32(31)).astype(jnp.uint32)
    chosen = lax.shift_right_logical(jnp.take_along_axis(tree_mask, word, axis=1), bit)
    is_ancestor = jnp.bitwise_and(chosen, jnp.uint32(1)) == jnp.uint32(1)
    is_ancestor &= index < 32 * tree_mask.shape[1]
    no_tree = jnp.all(tree_mask == jnp.uint32(0), axis=1)[:, None]
    return no_tree | is_ancestor | (index < 0) | (keys[None] == positions[:, None])
