"""Turns what a user asks into requests, after every check that can be made before the queue."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.request import Request, RequestMetrics
from jaxinfer.loading import Model
from jaxinfer.sampling.params import SamplingParams, validate_token_ids


def make_requests(
    model: Model, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: int,
    max_model_len: int, seeds: np.random.Generator,
) -> list[Request]:  # fmt: skip
    """Returns the `params.n` requests of one prompt.

    Raises:
        ValueError: see `Engine.add_request`.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, got {params!r:.80}")
    if not isinstance(priority, int):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    vocab_size = model.config.vocab_size
    validate_token_ids(params, vocab_size)
    text = prompt if isinstance(prompt, str) else None
    token_ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else _checked_ids(prompt, vocab_size)
    if not token_ids:
        raise ValueError("the prompt is empty: give at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens, and with at least one new token the limit is {max_model_len}; "
            "shorten it or raise max_model_len"
        )
    room = max_model_len - len(token_ids)
    eos = frozenset() if params.ignore_eos else frozenset(model.tokenizer.eos_token_ids)
    words = _bad_words(model, params.bad_words)
    base = Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        params=params,
        max_tokens=min(params.max_tokens or room, room),
        seed=0,
        stop_token_ids=eos | frozenset(params.stop_token_ids),
        banned_token_ids=tuple(word[0] for word in words if len(word) == 1),
        bad_words=tuple(word for word in words if len(word) > 1),
        priority=priority,
        prompt=text,
    )
    seed = params.seed if params.seed is not None else int(seeds.integers(0, 1 << 63))
    return [
        dataclasses.replace(
            base, request_id=f"{request_id}#{i}", seed=(seed + i) % (1 << 63),
            output_token_ids=[], logprobs=[], prompt_logprobs=[], pages=[], metrics=RequestMetrics(),
        )
        for i in range(params.n)
    ]  # fmt: skip


def _checked_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
        raise ValueError(f"a prompt must be text or a sequence of token ids, got {prompt!r:.80}")
    ids = list(prompt)
    for position, token in enumerate(ids):
        if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt token {position} must be an id in [0, {vocab_size}), the model's vocabulary, got {token!r}"
            )
    return [int(token) for token in ids]


def _bad_words(model: Model, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns the token sequences of each word, as it begins a text and as it follows a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in (word, " " + word.lstrip()):
            if ids := model.tokenizer.encode(spelling, add_special_tokens=False):
                found[tuple(ids)] = None
    return list(found)
