"""Host side of a row: what a request's parameters put into the device arrays; NumPy only, no jax."""

from collections.abc import Collection, Sequence

import numpy as np

from jaxinfer.sampling.params import SamplingParams

IN_PROMPT = 1  # flag bits
ENDS_REQUEST = 2


def uses_penalties(params: SamplingParams) -> bool:
    """Tells whether the logits depend on the tokens seen so far (only then are output tokens counted)."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def needs_state(params: SamplingParams) -> bool:
    """Tells whether the logits depend on the row's counts or bias: the value of `SamplingRows.needs_state`.

    Stop tokens alone do not count: they are looked up in any case.
    """
    return uses_penalties(params) or bool(params.logit_bias or params.bad_words or params.allowed_token_ids is not None)


def takes_best(params: SamplingParams) -> bool:
    """Tells whether every token is the most probable by the model's own logits, so that no sampler is needed."""
    return params.temperature == 0 and not params.min_tokens and not needs_state(params)


def needs_row(params: SamplingParams) -> bool:
    """Tells whether a request needs a row of its own: `build_row`, then `state.install_row`.

    Other requests use the row as `state.init_state` made it, at no cost. A slot is dirty after a request that
    needed a row: before a request without such a need takes it, install the row of default parameters.
    """
    return needs_state(params) or bool(params.stop_token_ids) or params.ignore_eos


def build_row(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: Collection[int],
    banned_ids: Collection[int],
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the row of a request that takes a slot, with or without (after preemption) output tokens.

    Args:
        params: The request's parameters, checked by `validate_token_ids`.
        prompt_ids: Its prompt.
        output_ids: Tokens it has generated before.
        stop_ids: The model's own end-of-sequence tokens; not used if `ignore_eos`.
        banned_ids: Tokens never to be generated: the bad words of one token.
        vocab_size: V, the number of logits.

    Returns:
        output_counts int32[V], flags uint8[V], bias float32[V].
    """
    counts = np.zeros(vocab_size, np.int32)
    if uses_penalties(params):
        counts += np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size).astype(np.int32)
    flags = np.zeros(vocab_size, np.uint8)
    flags[np.asarray(prompt_ids, np.int64)] |= IN_PROMPT
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(stop_ids))
    flags[np.asarray(sorted(ends), np.int64)] |= ENDS_REQUEST
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias.fill(-np.inf)
        bias[np.asarray(params.allowed_token_ids, np.int64)] = 0
    for token_id, value in dict(params.logit_bias or ()).items():
        bias[token_id] += value
    bias[np.asarray(sorted(banned_ids), np.int64)] = -np.inf
    return counts, flags, bias


def seed_words(seed: int) -> tuple[int, int]:
    """Returns the high and low 32-bit words of a seed below 2**64: the key data of `jax.random.key(seed)`."""
    return seed >> 32, seed & 0xFFFFFFFF
