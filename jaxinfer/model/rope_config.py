"""Reads rotary embedding options out of Hugging Face and GGUF metadata."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import RopeScaling
from jaxinfer.model.rope import yarn_mscale

SUPPORTED = ("default", "linear", "llama3", "yarn")


def rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns theta and the scaling of a config.json.

    `rope_parameters` (transformers 5) holds both; older files have `rope_theta` and `rope_scaling` apart.

    Raises:
        ValueError: the scaling is of an unsupported kind or lacks an entry.
    """
    options = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    theta = float(options.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    if float(hf.get("partial_rotary_factor", options.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ValueError("partial rotary embeddings (partial_rotary_factor other than 1) are not supported")
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in SUPPORTED:
        raise ValueError(f"unsupported rope scaling {kind!r}; supported are {', '.join(SUPPORTED)}")
    if kind == "default":
        return theta, None
    if "factor" not in options:
        raise ValueError(f"rope scaling {kind!r} needs a 'factor', got {options}")
    original = options.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
    given = {
        name: options[name]
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
                     "mscale_all_dim", "truncate")
        if options.get(name) is not None
    }  # fmt: skip
    return theta, RopeScaling(
        kind,
        factor=float(options["factor"]),
        original_max_position_embeddings=original or hf["max_position_embeddings"],
        **given,
    )


def rope_from_gguf(
    metadata: Mapping[str, Any], architecture: str, factors: tuple[float, ...]
) -> tuple[float, RopeScaling | None]:
    """Returns theta and the scaling of a GGUF file; `factors` (rope_freqs.weight) stand for Llama 3's scaling.

    Raises:
        ValueError: the scaling is of an unsupported kind or lacks an entry, or only part of a head is rotated.
    """

    def get(name: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.rope.{name}", default)

    theta = float(get("freq_base", 10_000.0))
    heads, width = metadata[f"{architecture}.attention.head_count"], metadata[f"{architecture}.embedding_length"]
    head_dim = metadata.get(f"{architecture}.attention.key_length", width // heads)
    if get("dimension_count", head_dim) != head_dim:
        raise ValueError(f"rope.dimension_count must be the head size {head_dim}, got {get('dimension_count', None)}")
    kind = get("scaling.type", "none")
    if kind == "none":
        return theta, RopeScaling("factors", factors=factors) if factors else None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"unsupported rope scaling {kind!r}; supported are none, linear, yarn")
    if factors:
        raise ValueError(f"rope scaling {kind!r} beside a rope_freqs.weight tensor is not supported")
    for name in ("alpha", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        if get(f"scaling.{name}", None) is not None:
            raise ValueError(f"{architecture}.rope.scaling.{name} is not supported")
    factor = get("scaling.factor", None)
    if factor is None:
        raise ValueError(f"rope scaling {kind!r} needs {architecture}.rope.scaling.factor")
    original = get("scaling.original_context_length", metadata[f"{architecture}.context_length"])
    extra = float(get("scaling.attn_factor", 1.0))  # llama.cpp multiplies YaRN's own factor by it
    attention_factor = extra * yarn_mscale(float(factor)) if kind == "yarn" else None
    return theta, RopeScaling(
        kind,
        factor=float(factor),
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        beta_fast=float(get("scaling.yarn_beta_fast", RopeScaling.beta_fast)),
        beta_slow=float(get("scaling.yarn_beta_slow", RopeScaling.beta_slow)),
    )
