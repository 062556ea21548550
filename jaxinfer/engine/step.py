"""`model_step`: parameters, state and batch in, tokens and state out; what the engine compiles.

Both forms run the same decoder and sampler: `ragged_step` once over rows of any length, `decode_steps` in a
loop over rows of one token, feeding each sampled token back without the host.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.engine.batch import BatchShape, StepBatch
from jaxinfer.engine.state import EngineState, StepOutput
from jaxinfer.model.batch import decode_batch
from jaxinfer.model.decoder import Decoder, forward, head_logits
from jaxinfer.model.params import Params
from jaxinfer.sampling.rows import ENDS_REQUEST
from jaxinfer.sampling.sampler import SamplingRows, sample


def jit_step(decoder: Decoder) -> Any:
    """Returns the jitted, donated step `(shape, max_steps, params, state, ints, floats, token_mask)` of a model."""
    return jax.jit(functools.partial(model_step, decoder), static_argnums=(0, 1), donate_argnames=("state",))


def model_step(
    decoder: Decoder, shape: BatchShape, max_steps: int, params: Params, state: EngineState, ints: jax.Array,
    floats: jax.Array, token_mask: jax.Array,
) -> tuple[EngineState, StepOutput]:  # fmt: skip
    """Runs a packed batch; `jit_step` says which arguments are static or donated."""
    batch = StepBatch.unpack(ints, floats, shape)
    if shape.is_decode:
        return decode_steps(decoder, params, state, batch, token_mask, shape.takes_best, max_steps)
    return ragged_step(decoder, params, state, batch, token_mask, shape.takes_best)


def ragged_step(
    decoder: Decoder, params: Params, state: EngineState, batch: StepBatch, token_mask: jax.Array, takes_best: bool
) -> tuple[EngineState, StepOutput]:
    """Runs one step over rows of any length."""
    T, S = batch.tokens.token_ids.shape[0], batch.logits_indices.shape[0]
    row = jnp.minimum(jnp.arange(T, dtype=jnp.int32), S - 1)  # decode rows come first: token t is row t
    token_ids = _known_tokens(batch.tokens.token_ids, state.last_tokens, batch.sampling.slots[row])
    tokens = dataclasses.replace(batch.tokens, token_ids=token_ids)
    hidden, cache = forward(decoder, params, state.cache, tokens)
    state = dataclasses.replace(state, cache=cache)
    hidden_last = hidden[batch.logits_indices]
    state, sampled, _ = _sample(decoder, params, state, hidden_last, batch.sampling, token_mask, takes_best)
    return state, StepOutput(sampled[None], hidden)


def decode_steps(
    decoder: Decoder, params: Params, state: EngineState, batch: StepBatch, token_mask: jax.Array, takes_best: bool,
    max_steps: int,
) -> tuple[EngineState, StepOutput]:  # fmt: skip
    """Runs up to `max_steps` decode steps, fewer when every row has its `num_samples` tokens or has stopped."""
    S, D = batch.logits_indices.shape[0], decoder.config.hidden_size
    page_size, slots = state.cache.page_size, batch.tokens.slots
    first_positions = batch.tokens.positions
    output = StepOutput(jnp.full((max_steps, S), -1, jnp.int32), jnp.zeros((max_steps, S, D), decoder.dtype))
    token_ids = _known_tokens(batch.tokens.token_ids, state.last_tokens, batch.sampling.slots)

    def is_active(step: jax.Array, stopped: jax.Array) -> jax.Array:
        return ~stopped & (step < batch.num_samples)

    def body(carry: tuple) -> tuple:
        step, token_ids, stopped, state, output = carry
        active = is_active(step, stopped)
        tokens = decode_batch(token_ids, first_positions + step, batch.tokens.page_indices, active, page_size, slots)
        hidden, cache = forward(decoder, params, state.cache, tokens)
        state = dataclasses.replace(state, cache=cache)
        rows = dataclasses.replace(batch.sampling, positions=batch.sampling.positions + step, active=active)
        state, sampled, now_stopped = _sample(decoder, params, state, hidden, rows, token_mask, takes_best)
        output = StepOutput(output.token_ids.at[step].set(sampled), output.hidden.at[step].set(hidden))
        return step + 1, jnp.where(active, sampled, token_ids), stopped | now_stopped, state, output

    def goes_on(carry: tuple) -> jax.Array:
        return (carry[0] < max_steps) & is_active(carry[0], carry[2]).any()

    carry = (jnp.int32(0), token_ids, jnp.zeros(S, bool), state, output)
    _, _, _, state, output = lax.while_loop(goes_on, body, carry)
    return state, output


def _known_tokens(token_ids: jax.Array, last_tokens: jax.Array, slots: jax.Array) -> jax.Array:
    return jnp.where(token_ids < 0, last_tokens[slots], token_ids)


def _sample(
    decoder: Decoder, params: Params, state: EngineState, hidden: jax.Array, rows: SamplingRows,
    token_mask: jax.Array, takes_best: bool,
) -> tuple[EngineState, jax.Array, jax.Array]:  # fmt: skip
    """Returns the state, the token of each row (-1 for none) and whether the row has stopped."""
    logits = head_logits(decoder, params, hidden)
    tokens, sampler, stopped = sample(logits, rows, state.sampler, token_mask, takes_best=takes_best)
    assert sampler is not None
    slots = jnp.where(rows.active, rows.slots, state.last_tokens.shape[0])  # out of range: dropped
    last_tokens = state.last_tokens.at[slots].set(tokens, mode="drop")
    ends = (sampler.flags[rows.slots, tokens] & ENDS_REQUEST) > 0
    tokens = jnp.where(rows.active & ~(stopped & ~ends), tokens, -1)  # stopped for want of an allowed token
    return EngineState(state.cache, sampler, last_tokens), tokens, stopped
