"""`Plan`: everything that decides the programs to compile, as data that another process can read. Imports no jax."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.compile_check.devices import DEVICES, Device
from jaxinfer.config import EngineConfig, ModelConfig, RopeScaling
from jaxinfer.kv_spec import KVSpec

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_LENGTH = 8192  # tokens of a request that room is made for, unless the model or the user says otherwise


@dataclasses.dataclass(frozen=True)
class Plan:
    """One compile check.

    Attributes:
        model: shape of the model.
        target: name in `DEVICES`.
        engine: limits; `max_model_len` and `num_pages` are filled in.
        num_devices: size of the mesh axis "model".
        dtype: of weights and activations, and of the KV cache unless `engine.kv_dtype` says otherwise.
        context: keys of each row that the roofline of the decode step counts.
        lower_only: stop before the compiler, which needs no plugin.
    """

    model: ModelConfig
    target: str
    engine: EngineConfig
    num_devices: int = 1
    dtype: str = "bfloat16"
    context: int = DEFAULT_LENGTH // 2
    lower_only: bool = False

    @property
    def device(self) -> Device:
        """The device compiled for."""
        return DEVICES[self.target]

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return ITEMSIZE[self.dtype]

    @property
    def kv(self) -> KVSpec:
        """Precision of the KV cache."""
        return self.engine.kv_spec(self.dtype)

    def to_json(self) -> str:
        """Returns a text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Returns the plan that `to_json` wrote."""
        options = json.loads(text)
        options["model"] = _model_config(options["model"])
        options["engine"] = EngineConfig(**options["engine"])
        return cls(**options)


def make_plan(
    model: ModelConfig, target: str, *, num_devices: int = 1, dtype: str = "bfloat16", context: int | None = None,
    max_model_len: int | None = None, lower_only: bool = False, **engine: Any,
) -> Plan:  # fmt: skip
    """Returns a plan whose lengths are settled.

    Args:
        model: shape of the model.
        target: name in `DEVICES`.
        num_devices: devices that share each matrix.
        dtype: of weights and activations, and of the KV cache unless `kv_dtype` says otherwise.
        context: keys a row that the decode step's roofline counts; None takes half of `max_model_len`.
        max_model_len: longest request in tokens; None takes the model's limit, at most 8,192.
        lower_only: stop before the compiler.
        **engine: further fields of `EngineConfig`.

    Raises:
        ValueError: an option is out of range, or the model does not divide over so many devices.
    """
    if target not in DEVICES:
        raise ValueError(f"unknown target {target!r}; choose from {', '.join(DEVICES)}")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    if model.num_kv_heads % num_devices or model.vocab_size % num_devices or model.intermediate_size % num_devices:
        raise ValueError(
            f"{num_devices} devices cannot share this model: its {model.num_kv_heads} KV heads, MLP size "
            f"{model.intermediate_size} and vocabulary {model.vocab_size} must all divide by the size of the mesh"
        )
    length = max_model_len or min(model.max_position_embeddings, DEFAULT_LENGTH)
    if length > model.max_position_embeddings:
        raise ValueError(f"max_model_len={length} is more than the model's {model.max_position_embeddings} tokens")
    context = context or length // 2
    if not 1 <= context <= length:
        raise ValueError(f"context must be between 1 and max_model_len={length} tokens, got {context}")
    config = EngineConfig(max_model_len=length, **engine)
    DEVICES[target].topology(num_devices)
    return Plan(model, target, config, num_devices, dtype, context, lower_only)


def _model_config(stored: Mapping[str, Any]) -> ModelConfig:
    options = dict(stored)
    if scaling := options["rope_scaling"]:
        options["rope_scaling"] = RopeScaling(**scaling | {"factors": tuple(scaling["factors"])})
    for name in ("layer_windows", "layer_rope"):
        options[name] = tuple(options[name])
    return ModelConfig(**options)
