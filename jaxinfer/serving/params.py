"""Sampling fields of a request -> `SamplingParams`."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.serving.errors import ApiError
from jaxinfer.serving.protocol import MAX_N, MAX_STRINGS, ChatBody, CompletionBody, GenerationBody

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default; a chat goes on until the model ends it or the context is full

SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) & {
    *GenerationBody.model_fields
}  # those whose names and meanings are the same


def sampling_params(body: CompletionBody | ChatBody, default: SamplingParams) -> SamplingParams:
    """Returns the parameters of a request.

    Args:
        body: the request.
        default: what the model's authors recommend, in the place of fields that the request lacks.

    Raises:
        ApiError: 400 that names the field.
    """
    values: dict[str, Any] = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    values["max_tokens"] = None if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
    given = {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
    values |= _form(body)
    values |= given | (_chat_fields(body, given) if isinstance(body, ChatBody) else _completion_fields(body))
    for name in ("stop", "bad_words"):
        if isinstance(values[name], list) and len(values[name]) > MAX_STRINGS:
            raise ApiError(400, f"{name} must hold at most {MAX_STRINGS} strings, got {len(values[name])}", param=name)
    with naming_the_field(body):
        params = SamplingParams.from_dict(values)
    for name, value in (("n", params.n), ("best_of", params.num_completions)):
        if value > MAX_N:
            raise ApiError(400, f"{name} must be at most {MAX_N}, got {value}", param=name)
    if body.stream and params.num_completions > params.n:
        raise ApiError(
            400, "best_of cannot be streamed: the best completions are known when all have ended", param="best_of"
        )
    return params


@contextmanager
def naming_the_field(body: GenerationBody) -> Iterator[None]:
    """Turns the ValueErrors of parameters and of the engine into 400s, with the field that the message names."""
    try:
        yield
    except ValueError as error:
        words = re.findall(r"\w+", str(error))
        param = next((word for word in words if word in type(body).model_fields), None)
        raise ApiError(400, str(error), param=param) from error


def _form(body: GenerationBody) -> dict[str, Any]:
    """Returns what `response_format` asks for, as `structured_outputs`."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return {}
    if body.structured_outputs is not None:
        raise ApiError(400, "response_format and structured_outputs: give one of them", param="response_format")
    if (wanted.json_schema is not None) != (wanted.type == "json_schema"):
        raise ApiError(
            400, "response_format.json_schema goes with the type json_schema, and only with it", param="response_format"
        )
    if wanted.json_schema is None:
        return {"structured_outputs": {"json_object": True}}
    return {"structured_outputs": {"json": wanted.json_schema.schema_}}


def _completion_fields(body: CompletionBody) -> dict[str, Any]:
    fields: dict[str, Any] = {} if body.best_of is None else {"best_of": body.best_of}
    if body.logprobs is not None:
        fields |= {"logprobs": body.logprobs} | ({"prompt_logprobs": body.logprobs} if body.echo else {})
    return fields


def _chat_fields(body: ChatBody, given: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        if given.get("max_tokens", body.max_completion_tokens) != body.max_completion_tokens:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
            )
        fields["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.logprobs:
        fields["logprobs"] = 0 if body.top_logprobs is None else body.top_logprobs
    return fields
