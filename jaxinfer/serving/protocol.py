"""The bodies of requests, and their JSON schema.

Types and ranges of sampling fields are checked by `SamplingParams`, which says more about an error than a schema
could; here they only have their schemas. Every other field is checked by pydantic or where it is used.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from jaxinfer.serving import refused
from jaxinfer.serving.refused import check_fields

MAX_N = 128  # completions of a prompt, as in OpenAI's API
MAX_STRINGS = 64  # stop strings or bad words of a request: each costs time in every step of everybody


def _schema(*types: str, **more: Any) -> Any:
    return WithJsonSchema({"anyOf": [{"type": name, **more} for name in types] + [{"type": "null"}]})


type Number = Annotated[Any, _schema("number")]
type Integer = Annotated[Any, _schema("integer")]
type Boolean = Annotated[Any, _schema("boolean")]
type Strings = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
type Integers = Annotated[Any, _schema("array", items={"type": "integer"})]
type Bias = Annotated[Any, _schema("object", additionalProperties={"type": "number"})]
type Budget = Annotated[
    Any,
    WithJsonSchema({
        "anyOf": [
            {
                "type": "object",
                "required": ["heavy", "recent"],
                "additionalProperties": False,
                "properties": {
                    "heavy": {"type": "integer", "minimum": 0}, "recent": {"type": "integer", "minimum": 1}
                },
            },
            {"type": "null"},
        ]
    }),
]  # fmt: skip
type Prompt = Annotated[
    Any,
    WithJsonSchema({
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
        ]
    }),
]  # fmt: skip
type Messages = Annotated[
    Any,
    WithJsonSchema({
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "additionalProperties": False,
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "additionalProperties": False,
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                        },
                    ]
                },
            },
        },
    }),
]  # fmt: skip


class Body(BaseModel):
    """An object of which every field is known."""

    model_config = ConfigDict(extra="forbid", strict=True)
    refused_fields: ClassVar[refused.Refused] = {}
    path: ClassVar[str] = ""  # of the object in the request

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        return check_fields(given, known, cls.refused_fields, cls.path)


class StreamOptions(Body):
    """Options of a stream."""

    refused_fields: ClassVar[refused.Refused] = refused.STREAM_OPTIONS
    path: ClassVar[str] = "stream_options."

    include_usage: bool = Field(default=False, description="End with a chunk that holds the usage and no choices.")


class JsonSchema(Body):
    """The schema of `response_format`."""

    path: ClassVar[str] = "response_format.json_schema."

    name: str = Field(default="answer", description="For the reader; it changes nothing.")
    description: str | None = Field(default=None, description="For the reader; it changes nothing.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="Accepted; the answer always keeps to the schema.")


class ResponseFormat(Body):
    """The form of an answer, as in OpenAI's API."""

    path: ClassVar[str] = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """What completions and chats have in common. Null is as good as absent."""

    model: str | None = Field(default=None, description="The name under which the model is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, description="Goes to the server's log, and nowhere else.")
    priority: int | None = Field(default=None, description="Lower goes first; the server must run that policy.")

    cache_salt: str | None = Field(default=None, description="Only requests of one salt share cached prefixes.")

    n: Integer = None
    temperature: Number = None
    top_p: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: Bias = None
    seed: Integer = None
    stop: Strings = None
    max_tokens: Integer = None

    top_k: Integer = None
    min_p: Number = None
    typical_p: Number = None
    repetition_penalty: Number = None
    min_tokens: Integer = None
    ignore_eos: Boolean = None
    stop_token_ids: Integers = None
    bad_words: Strings = None
    allowed_token_ids: Integers = None
    include_stop_str_in_output: Boolean = None
    skip_special_tokens: Boolean = None
    h2o: Budget = None

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="One of json, json_object, regex, choice and grammar, as in vLLM."
    )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    refused_fields: ClassVar[refused.Refused] = refused.COMPLETION

    prompt: Prompt
    best_of: Integer = None
    echo: bool | None = None
    logprobs: Integer = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    refused_fields: ClassVar[refused.Refused] = refused.CHAT

    messages: Messages
    max_completion_tokens: Integer = None
    logprobs: bool | None = None
    top_logprobs: Integer = None
    safety_identifier: str | None = Field(default=None, description="As `user`.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the model's chat template, such as enable_thinking."
    )


class TokenizeBody(Body):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
