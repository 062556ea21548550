"""Log-probabilities of tokens, computed from the hidden states of a step only when somebody wants them.

Kept out of the step: a second product with the head for those who ask, instead of a slower compilation and a
top-k over the vocabulary for everyone. One compiled shape serves prompts and new tokens alike.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.model.params import Params
from jaxinfer.model.spec import DecoderSpec
from jaxinfer.sampling.logprobs import token_logprobs
from jaxinfer.sampling.params import MAX_LOGPROBS

BLOCK = 32  # tokens whose [V] logits exist at once


@dataclasses.dataclass(frozen=True)
class ScoredTokens:
    """Log-probabilities of n tokens and of the most probable alternatives at their places."""

    logprob: np.ndarray  # f32[n]
    rank: np.ndarray  # i32[n]
    top_ids: np.ndarray  # i32[n, 20]
    top_logprobs: np.ndarray  # f32[n, 20]

    @property
    def candidates(self) -> tuple[list[int], list[float]]:
        """The alternatives to the first of the tokens."""
        return self.top_ids[0].tolist(), self.top_logprobs[0].tolist()


class Scorer:
    """Scores tokens given the hidden states from which they are predicted."""

    def __init__(self, decoder: DecoderSpec, params: Params):
        """Nothing is compiled before `warmup` or the first call."""
        self._params = params
        self._score_block = jax.jit(functools.partial(_score_block, decoder))
        self._width = decoder.config.hidden_size
        self._dtype = decoder.dtype

    def warmup(self) -> None:
        """Compiles the one shape there is."""
        self.score(jnp.zeros((1, self._width), self._dtype), np.zeros(1, np.int32), np.zeros(1, np.int32))

    def score(self, hidden: jax.Array, rows: np.ndarray, targets: np.ndarray) -> ScoredTokens:
        """Returns the scores of `targets` i32[n], predicted from the rows `rows` i32[n] of `hidden` f[..., D]."""
        flat = hidden.reshape(-1, self._width)
        blocks = []
        for start in range(0, len(rows), BLOCK):
            part = slice(start, start + BLOCK)
            padding = (0, BLOCK - len(rows[part]))
            index, target = (np.pad(x[part], padding).astype(np.int32) for x in (rows, targets))
            blocks.append(self._score_block(self._params, jnp.take(flat, index, axis=0), target))
        columns = [np.concatenate(column)[: len(rows)] for column in zip(*jax.device_get(blocks))]
        return ScoredTokens(*columns)


def _score_block(
    decoder: DecoderSpec, params: Params, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    from jaxinfer.model.decoder import head_logits  # heavy, and few requests want scores

    logits = head_logits(decoder.build(), params, hidden)
    return token_logprobs(logits, targets, MAX_LOGPROBS)
