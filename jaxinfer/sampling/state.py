"""Persistent device state of the rows: what depends on a request's own tokens."""

import dataclasses
import functools
from collections.abc import Collection

import jax
import numpy as np

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.rows import build_row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """State of the R rows (slots) of an engine, each lent to one running request; 9 bytes per row and token.

    Attributes:
        output_counts: Times each token was generated; counted only for requests with penalties.
        flags: Bit 0: the token occurs in the prompt. Bit 1: it ends the request.
        bias: Added to the logits; -inf forbids a token.
    """

    output_counts: jax.Array  # int32[R, V]
    flags: jax.Array  # uint8[R, V]
    bias: jax.Array  # float32[R, V]


def init_state(num_rows: int, vocab_size: int, stop_ids: Collection[int]) -> SamplerState:
    """Returns the state whose rows all suit a default request.

    Args:
        num_rows: R, the engine's `max_num_seqs`.
        vocab_size: V, the number of logits.
        stop_ids: The model's own end-of-sequence tokens.
    """
    row = build_row(SamplingParams(), (), (), stop_ids, (), vocab_size)
    counts, flags, bias = (to_device(np.tile(x, (num_rows, 1))) for x in row)  # on the host: nothing to compile
    return SamplerState(counts, flags, bias)


def to_device(array: np.ndarray) -> jax.Array:
    """Returns a copy on the default device; `jnp.asarray` would compile one, 20 ms for each new shape."""
    return jax.device_put(array, may_alias=False)


@functools.partial(jax.jit, donate_argnames="state")
def install_row(
    state: SamplerState, slot: jax.Array, output_counts: jax.Array, flags: jax.Array, bias: jax.Array
) -> SamplerState:
    """Returns the state with row `slot` replaced by what `rows.build_row` made; `state` is donated.

    Args:
        state: The state of all rows.
        slot: int32 scalar, as an array: a Python int would be traced too, but with a weak type.
        output_counts: int32[V].
        flags: uint8[V].
        bias: float32[V].
    """
    return SamplerState(
        state.output_counts.at[slot].set(output_counts),
        state.flags.at[slot].set(flags),
        state.bias.at[slot].set(bias),
    )
