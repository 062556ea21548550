"""jaxinfer: LLM inference in pure-functional JAX.

    from jaxinfer import LLM, SamplingParams
    LLM("smollm2-135m").generate("The capital of France is", SamplingParams(temperature=0))

Names are imported when they are first used, so that `import jaxinfer` and the command line start quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig, ModelConfig
    from jaxinfer.engine.async_engine import AsyncEngine
    from jaxinfer.engine.outputs import CompletionChunk, CompletionOutput, RequestOutput
    from jaxinfer.generation import GenerateOutput, generate
    from jaxinfer.llm import LLM
    from jaxinfer.loading import Model, load
    from jaxinfer.sampling.beam import BeamSearchParams
    from jaxinfer.sampling.h2o import H2O
    from jaxinfer.sampling.params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxinfer.llm",
    "SamplingParams": "jaxinfer.sampling.params",
    "BeamSearchParams": "jaxinfer.sampling.beam",
    "H2O": "jaxinfer.sampling.h2o",
    "EngineConfig": "jaxinfer.config",
    "ModelConfig": "jaxinfer.config",
    "Model": "jaxinfer.loading",
    "load": "jaxinfer.loading",
    "generate": "jaxinfer.generation",
    "GenerateOutput": "jaxinfer.generation",
    "AsyncEngine": "jaxinfer.engine.async_engine",
    "RequestOutput": "jaxinfer.engine.outputs",
    "CompletionOutput": "jaxinfer.engine.outputs",
    "CompletionChunk": "jaxinfer.engine.outputs",
}

__all__ = [
    "H2O",
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionChunk",
    "CompletionOutput",
    "EngineConfig",
    "GenerateOutput",
    "Model",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "generate",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
