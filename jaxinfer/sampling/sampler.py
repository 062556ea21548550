"""`sample`: one token for each row of a step, as a pure function inside the engine's jit."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.sampling import rows as host
from jaxinfer.sampling.constraints import Constraints, constrain
from jaxinfer.sampling.draw import draw, random_words
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.state import SamplerState
from jaxinfer.sampling.threshold import masses as masses_of
from jaxinfer.sampling.truncation import truncate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Parameters of the S rows of a step; the attributes are those of `SamplingParams` where the names agree.

    Attributes:
        slots: Row of `SamplerState` that belongs to the request.
        temperature: 0 is greedy.
        top_k: 0 or less is off.
        top_p: 1 is off.
        min_p: 0 is off.
        typical_p: 1 is off.
        repetition_penalty: 1 is off.
        presence_penalty: 0 is off.
        frequency_penalty: 0 is off.
        seeds: High and low words of the request's seed (`rows.seed_words`).
        positions: Absolute position of the token being sampled; it and the seed decide the random number.
        min_positions: Tokens that end the request are forbidden at positions below this.
        needs_state: Whether the row's logits depend on counts or bias (`rows.needs_state`).
        active: Whether the row samples in this step; others return token 0 and leave the state alone.
    """

    slots: jax.Array  # int32[S]
    temperature: jax.Array  # float32[S]
    top_k: jax.Array  # int32[S]
    top_p: jax.Array  # float32[S]
    min_p: jax.Array  # float32[S]
    typical_p: jax.Array  # float32[S]
    repetition_penalty: jax.Array  # float32[S]
    presence_penalty: jax.Array  # float32[S]
    frequency_penalty: jax.Array  # float32[S]
    seeds: jax.Array  # uint32[S, 2]
    positions: jax.Array  # int32[S]
    min_positions: jax.Array  # int32[S]
    needs_state: jax.Array  # bool[S]
    active: jax.Array  # bool[S]


def make_rows(
    params: Sequence[SamplingParams],
    *,
    slots: Sequence[int],
    seeds: Sequence[int],
    positions: Sequence[int],
    prompt_lens: Sequence[int],
    num_rows: int | None = None,
) -> SamplingRows:
    """Returns the rows of a step as NumPy arrays, padded with inactive greedy rows to `num_rows`.

    Args:
        params: Parameters of each request.
        slots: Its slot.
        seeds: Its seed (`params.seed`, or one the engine drew), below 2**64.
        positions: Absolute position of its next token.
        prompt_lens: Number of its prompt tokens.
        num_rows: S; None is len(params).
    """
    num_rows = len(params) if num_rows is None else num_rows

    def column(values: Sequence[object], dtype: type, fill: float = 0) -> Any:  # NumPy for jax.Array
        out = np.full(num_rows, fill, dtype)
        out[: len(params)] = values
        return out

    words: Any = np.zeros((num_rows, 2), np.uint32)
    words[: len(params)] = np.asarray([host.seed_words(seed) for seed in seeds], np.uint32).reshape(-1, 2)
    return SamplingRows(
        slots=column(slots, np.int32),
        temperature=column([p.temperature for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float32, 1),
        min_p=column([p.min_p for p in params], np.float32),
        typical_p=column([p.typical_p for p in params], np.float32, 1),
        repetition_penalty=column([p.repetition_penalty for p in params], np.float32, 1),
        presence_penalty=column([p.presence_penalty for p in params], np.float32),
        frequency_penalty=column([p.frequency_penalty for p in params], np.float32),
        seeds=words,
        positions=column(positions, np.int32),
        min_positions=column([n + p.min_tokens for n, p in zip(prompt_lens, params, strict=True)], np.int32),
        needs_state=column([host.needs_state(p) for p in params], np.bool_),
        active=column([True] * len(params), np.bool_),
    )


def sample(
    logits: jax.Array, rows: SamplingRows, state: SamplerState | None, token_mask: jax.Array | None = None, *,
    takes_best: bool = False,
) -> tuple[jax.Array, SamplerState | None, jax.Array]:  # fmt: skip
    """Returns the next token of each row, the state that counts it, and whether it ends the request.

    The token of a row depends on its own logits, parameters, state, seed and position only. Whatever only
    some rows use runs only if an active row uses it: a greedy batch costs one argmax. Ties at a top_k, top_p
    or typical_p threshold are all kept; greedy ties go to the lowest id. If constraints forbid every token of
    a row, it returns token 0 and `stopped`: there is nothing it could say.

    Args:
        logits: float32[S, V] of the model.
        rows: Parameters of the rows.
        state: State of all slots; None (for a pure `generate()`): no penalties, bias, min_tokens, stops.
        token_mask: uint32[S, ceil(V/32)]; bit i of word w allows token 32 * w + i. None allows all.
        takes_best: the caller's promise that all active rows are greedy and none is constrained (`rows.takes_best`),
            nor is any token masked: the same result from a quarter of the code.

    Returns:
        token_ids int32[S], the new state (None if None was given), stopped bool[S].
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, got {logits.dtype}")
    if token_mask is not None and token_mask.shape != (num_rows, -(-vocab_size // 32)):
        raise ValueError(f"token_mask must have shape {(num_rows, -(-vocab_size // 32))}, got {token_mask.shape}")
    active, positions = rows.active, rows.positions
    random = active & (rows.temperature > 0)
    uses_bias = active & rows.needs_state
    uses_penalties = uses_bias & (
        (rows.repetition_penalty != 1) | (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)
    )
    early = active & (positions < rows.min_positions)
    temperature = jnp.where(random, rows.temperature, np.float32(1))
    constraints = Constraints(
        slots=rows.slots,
        uses_bias=uses_bias,
        uses_penalties=uses_penalties,
        early=early,
        repetition=rows.repetition_penalty,
        presence=rows.presence_penalty,
        frequency=rows.frequency_penalty,
    )
    constrained = jnp.array(False) if state is None else jnp.any(uses_bias | early)
    if token_mask is not None:
        constrained |= jnp.any(token_mask != np.uint32(0xFFFF_FFFF))

    def greedy_token(x: jax.Array) -> jax.Array:
        return jnp.argmax(x, axis=1).astype(jnp.int32)

    def plain() -> tuple[jax.Array, jax.Array]:
        return greedy_token(logits), jnp.zeros_like(active)

    def general() -> tuple[jax.Array, jax.Array]:
        # Both branches make a new array: if one passed the logits on, XLA would copy them, even for greedy.
        y, impossible = lax.cond(
            constrained,
            lambda: log_weights(constrain(logits, constraints, state, token_mask), temperature),
            lambda: log_weights(logits, temperature),
        )
        greedy = lax.cond(jnp.any(active & ~random), greedy_token, lambda _: jnp.zeros_like(positions), y)
        drawn = lax.cond(
            jnp.any(random), lambda y: draw_tokens(y, rows, random), lambda _: jnp.zeros_like(positions), y
        )
        return jnp.where(random, drawn, greedy), impossible

    token_ids, impossible = plain() if takes_best else lax.cond(constrained | jnp.any(random), general, plain)
    token_ids = jnp.where(active & ~impossible, token_ids, 0)
    if state is None:
        return token_ids, None, active & impossible
    ends = (state.flags[rows.slots, token_ids] & host.ENDS_REQUEST) > 0
    counts = state.output_counts.at[rows.slots, token_ids].add(uses_penalties.astype(jnp.int32))
    return token_ids, dataclasses.replace(state, output_counts=counts), active & (ends | impossible)


def log_weights(logits: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (logits - greatest) / temperature, float32[S, V], and which rows (bool[S]) are all -inf.

    The greatest of a row becomes 0, so that no temperature overflows.

    Args:
        logits: float32[S, V].
        temperature: float32[S], above 0.
    """
    highest = jnp.max(logits, axis=1)
    impossible = highest == -jnp.inf
    highest = jnp.where(impossible, np.float32(0), highest)
    return (logits - highest[:, None]) / temperature[:, None], impossible


def draw_tokens(y: jax.Array, rows: SamplingRows, random: jax.Array) -> jax.Array:
    """Returns int32[S] tokens drawn after top_k, top_p, min_p and typical_p.

    Args:
        y: float32[S, V] of `log_weights`.
        rows: Parameters of the rows.
        random: bool[S], the rows whose token is used.
    """
    masses = masses_of(y)
    kept = truncate(
        y,
        masses,
        top_k=jnp.where(random, rows.top_k, 0),
        top_p=jnp.where(random, rows.top_p, np.float32(1)),
        min_p=rows.min_p,
        typical_p=jnp.where(random, rows.typical_p, np.float32(1)),
    )
    return draw(masses, y, kept, random_words(rows.seeds, rows.positions))
