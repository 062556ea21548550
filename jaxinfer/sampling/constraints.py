"""What changes the logits before temperature: penalties, bias, token masks, min_tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.rows import ENDS_REQUEST, IN_PROMPT
from jaxinfer.sampling.state import SamplerState


def penalize(
    logits: jax.Array,
    counts: jax.Array,
    in_prompt: jax.Array,
    repetition: jax.Array,
    presence: jax.Array,
    frequency: jax.Array,
) -> jax.Array:
    """Returns the logits with the repetition (CTRL) and presence and frequency (OpenAI) penalties.

    Rows with penalties 1, 0, 0 pass bit for bit.

    Args:
        logits: float32[S, V].
        counts: int32[S, V], occurrences in the output.
        in_prompt: bool[S, V].
        repetition: float32[S], over prompt and output.
        presence: float32[S], over the output.
        frequency: float32[S], over the output.
    """
    repetition, presence, frequency = repetition[:, None], presence[:, None], frequency[:, None]
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(in_prompt | (counts > 0), repeated, logits)
    penalty = frequency * counts.astype(jnp.float32) + presence
    return jnp.where(counts > 0, logits - penalty, logits)


def allowed_by(token_mask: jax.Array, vocab_size: int) -> jax.Array:
    """Returns bool[S, V] from uint32[S, ceil(V/32)]: bit i of word w stands for token 32 * w + i."""
    bits = (token_mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & np.uint32(1)
    return bits.reshape(token_mask.shape[0], -1)[:, :vocab_size] == 1


def forbid_ends(logits: jax.Array, ends: jax.Array, early: jax.Array) -> jax.Array:
    """Returns the logits without tokens that end the request, in rows where it is too early to end.

    A row that would be left without any token keeps its ends: nothing else can be generated.

    Args:
        logits: float32[S, V].
        ends: bool[S, V].
        early: bool[S].
    """
    masked = jnp.where(ends, -jnp.inf, logits)
    possible = jnp.max(masked, axis=1) > -jnp.inf
    return jnp.where((early & possible)[:, None], masked, logits)


class Constraints(NamedTuple):
    """What `constrain` needs to know of the S rows of a step.

    Attributes:
        slots: Row of the state that belongs to each.
        uses_bias: Rows with a bias.
        uses_penalties: Rows with a penalty.
        early: Rows in which it is too early for a token that ends the request.
        repetition: Penalty over prompt and output.
        presence: Penalty over the output.
        frequency: Penalty per occurrence in the output.
    """

    slots: jax.Array  # int32[S]
    uses_bias: jax.Array  # bool[S]
    uses_penalties: jax.Array  # bool[S]
    early: jax.Array  # bool[S]
    repetition: jax.Array  # float32[S]
    presence: jax.Array  # float32[S]
    frequency: jax.Array  # float32[S]


def constrain(
    logits: jax.Array, rows: Constraints, state: SamplerState | None, token_mask: jax.Array | None
) -> jax.Array:
    """Returns the logits after every constraint that some row uses, in the order penalties, bias, mask, ends.

    Args:
        logits: float32[S, V].
        rows: Which row uses what.
        state: The rows' state; None: no penalties, bias, ends.
        token_mask: uint32[S, ceil(V/32)] or None.
    """
    # One fused pass over all rows: with conds around each part XLA would copy the logits, taken or not.
    if state is not None:
        counts, flags, bias = (x[rows.slots] for x in (state.output_counts, state.flags, state.bias))
        in_prompt = (flags & IN_PROMPT) > 0
        penalized = penalize(logits, counts, in_prompt, rows.repetition, rows.presence, rows.frequency)
        logits = jnp.where(rows.uses_penalties[:, None], penalized, logits)
        logits = jnp.where(rows.uses_bias[:, None], logits + bias, logits)
    if token_mask is not None:
        logits = jnp.where(allowed_by(token_mask, logits.shape[1]), logits, -jnp.inf)
    if state is not None:
        logits = forbid_ends(logits, (state.flags[rows.slots] & ENDS_REQUEST) > 0, rows.early)
    return logits
