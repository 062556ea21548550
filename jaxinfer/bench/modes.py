"""A mode: how a model is loaded and run, written as "quantize=int8,activations=int8"."""

import json
import re
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.loading import load

LOAD_OPTIONS = ("dtype", "quantize", "activations")
DEFAULT_NAME = "as it is"  # of the mode without options


def parse_mode(text: str) -> dict[str, Any]:
    """Returns the options of a mode: those of `load` in `LOAD_OPTIONS`, and fields of `EngineConfig`.

    A value may hold a comma, as "kv_dtype=int8,bfloat16" does: what has no "=" belongs to the value before it.

    Raises:
        ValueError: an option is unknown, is given twice or has no value.
    """
    options: dict[str, Any] = {}
    for part in filter(None, re.split(r",(?=[^,]*=)", text)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        known = (*LOAD_OPTIONS, *EngineConfig.__dataclass_fields__)
        if not equals or not value or name in options or name not in known:
            raise ValueError(f"a mode is name=value,... with each name once, of {', '.join(known)}; got {text!r}")
        options[name] = _value(value)
    return options


def make_llm(model: Any, options: dict[str, Any]) -> LLM:
    """Loads a model in a mode; what `load` and `EngineConfig` refuse raises ValueError."""
    loaded = load(model, **{name: options[name] for name in LOAD_OPTIONS if name in options})
    return LLM(loaded, **{name: value for name, value in options.items() if name not in LOAD_OPTIONS})


def _value(text: str) -> Any:
    try:
        return json.loads(text)  # numbers, true, false, null
    except ValueError:
        return text
