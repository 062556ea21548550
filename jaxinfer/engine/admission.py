"""Turns what a user asks into requests, after every check that can be made before the queue.

Several completions of one prompt are one request and its forks, which wait until it has computed the prompt.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.request import Request
from jaxinfer.loading import Model
from jaxinfer.sampling.params import SamplingParams, validate_token_ids
from jaxinfer.sampling.structured import StructuredOutputs


def make_requests(
    model: Model, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: int,
    cache_salt: str | None, max_model_len: int, seeds: np.random.Generator, is_steered: bool = False,
) -> list[Request]:  # fmt: skip
    """Returns the `params.num_completions` requests of one prompt.

    Raises:
        ValueError: see `Engine.add_request`.
    """
    vocab_size = model.config.vocab_size
    _check_params(params, vocab_size)
    if not isinstance(priority, int):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise ValueError(f"cache_salt must be a string that is not empty, or None, got {cache_salt!r}")
    text = prompt if isinstance(prompt, str) else None
    token_ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else _checked_ids(prompt, vocab_size)
    if not token_ids:
        raise ValueError("the prompt is empty: give at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens, and with at least one new token the limit is {max_model_len}; "
            "shorten it or raise max_model_len"
        )
    first, *others = _requests(
        model, request_id, params, max_model_len, seeds, prompt_token_ids=token_ids, prompt=text, priority=priority,
        cache_salt=cache_salt, is_steered=is_steered,
    )  # fmt: skip
    if params.structured_outputs is not None:
        if is_steered:
            raise ValueError("structured_outputs can not go with is_steered, where the caller chooses every token")
        first.grammar = model.grammars.compile(StructuredOutputs.of(params.structured_outputs))
    for other in others:
        other.grammar = first.grammar and first.grammar.fork()
        if params.h2o is None:  # each of those that forget computes the prompt, into pages of its own
            other.source = first
    return [first, *others]


def fork_requests(
    model: Model, request_id: str, source: Request, params: SamplingParams | None, max_model_len: int,
    seeds: np.random.Generator, token: int | None = None,
) -> list[Request]:  # fmt: skip
    """Returns `params.n` requests that go on from the tokens of `source` that the host knows, and from `token`.

    Raises:
        ValueError: see `Engine.fork`.
    """
    if source.is_finished:
        raise ValueError(
            f"{source.request_id} has ended and can not be forked: start a new request with its tokens, which the "
            "prefix cache finds"
        )
    if source.is_steered != (token is not None):
        raise ValueError(f"a fork of a steered request begins with a token, and no other does, got token={token!r}")
    if token is not None:
        [token] = _checked_ids([token], model.config.vocab_size)
    if params is None:
        params = dataclasses.replace(source.params, n=1, best_of=None, seed=None, prompt_logprobs=None)
    _check_params(params, model.config.vocab_size)
    if params.num_completions > params.n:
        raise ValueError("best_of chooses among completions that begin together: forks take n alone")
    if source.params.h2o is not None or params.h2o is not None:
        raise ValueError(
            "a request with h2o writes anew where it has forgotten and counts the attention of all its tokens: it can "
            "neither be forked nor be a fork; start a new request with its tokens"
        )
    if params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs of a fork are those of its source: leave them out")
    if params.structured_outputs != source.params.structured_outputs:
        raise ValueError("structured_outputs of a fork are those of its source, whose text it goes on with")
    if params.logprobs is not None and source.params.logprobs is None:
        raise ValueError("logprobs of a fork need a source with logprobs: its tokens so far have none")
    count = len(source.output_token_ids)
    if params.max_tokens is not None and params.max_tokens <= count:
        raise ValueError(
            f"max_tokens of a fork counts its source's {count} output tokens: give more than that, "
            f"got {params.max_tokens}"
        )
    requests = _requests(
        model, request_id, params, max_model_len, seeds, prompt_token_ids=source.prompt_token_ids,
        prompt=source.prompt, priority=source.priority, cache_salt=source.cache_salt, source=source,
        is_steered=source.is_steered,
    )  # fmt: skip
    for request in requests:
        request.output_token_ids += source.output_token_ids if token is None else [*source.output_token_ids, token]
        request.logprobs += source.logprobs if params.logprobs is not None else []
        request.grammar = source.grammar and source.grammar.fork()
    return requests


def _requests(
    model: Model, request_id: str, params: SamplingParams, max_model_len: int, seeds: np.random.Generator,
    *, prompt_token_ids: Sequence[int], **fields: Any,
) -> list[Request]:  # fmt: skip
    """Returns `params.num_completions` requests that differ in their seeds."""
    room = max_model_len - len(prompt_token_ids)
    eos = frozenset() if params.ignore_eos else frozenset(model.tokenizer.eos_token_ids)
    words = _bad_words(model, params.bad_words)
    seed = params.seed if params.seed is not None else int(seeds.integers(0, 1 << 63))
    return [
        Request(
            request_id=f"{request_id}#{i}",
            prompt_token_ids=prompt_token_ids,
            params=params,
            max_tokens=min(params.max_tokens or room, room),
            seed=(seed + i) % (1 << 63),
            stop_token_ids=eos | frozenset(params.stop_token_ids),
            banned_token_ids=tuple(word[0] for word in words if len(word) == 1),
            bad_words=tuple(word for word in words if len(word) > 1),
            **fields,
        )
        for i in range(params.num_completions)
    ]


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, got {params!r:.80}")
    validate_token_ids(params, vocab_size)


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
