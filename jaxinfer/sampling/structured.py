"""`StructuredOutputs`: what form a text must have; names as in vLLM; no jax."""

import dataclasses
import json as json_module
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxinfer.sampling import checks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    r"""The form of an answer: exactly one of the following.

    Attributes:
        json: a JSON schema, as a mapping or as text; kept as text.
        json_object: True for any JSON object.
        regex: a regular expression that the whole text matches (Rust's syntax, without look-around).
        choice: one of these strings.
        grammar: a context-free grammar: Lark, or GBNF (llama.cpp's EBNF).

    Raises:
        ValueError: none or several are given, or one has the wrong type. Whether a schema or grammar can be compiled is
            known when a request is added.

    Example:
        >>> StructuredOutputs(json={"type": "object", "properties": {"age": {"type": "integer"}}}).kind
        'json'
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        checks.boolean("structured_outputs.json_object", self.json_object)
        given = [name for name in _names() if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must say one of {', '.join(_names())}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", checks.strings("structured_outputs.choice", self.choice))
            if not self.choice:
                raise ValueError("structured_outputs.choice must hold at least one string, got none")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name} must be a str that is not empty, got {value!r}")

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(name for name in _names() if getattr(self, name) not in (None, False))

    @classmethod
    def of(cls, value: Any) -> Self:
        """Returns `value`, or what a mapping of these names describes.

        Raises:
            ValueError: an unknown name, or see the class.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"structured_outputs must be StructuredOutputs or a mapping, got {value!r:.80}")
        if unknown := value.keys() - set(_names()):
            raise ValueError(f"unknown structured_outputs.{min(map(str, unknown))}; there are {', '.join(_names())}")
        return cls(**value)


def _names() -> list[str]:
    return [field.name for field in dataclasses.fields(StructuredOutputs)]


def _schema_text(schema: Any) -> str:
    try:
        value = json_module.loads(schema) if isinstance(schema, str) else schema
        text = json_module.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError) as error:
        raise ValueError(f"structured_outputs.json must be a JSON schema: {error}") from error
    if not isinstance(value, Mapping | bool):
        raise ValueError(f"structured_outputs.json must be a JSON schema, an object, got {text:.80}")
    return text
