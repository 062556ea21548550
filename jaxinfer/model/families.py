"""The supported model families as tables: what their configurations mean and what their weights are called.

A family is data, not a copy of the model: `config_from_hf` and `config_from_gguf` turn foreign metadata into a
`ModelConfig`, `hf_names` and `gguf_names` say where each parameter is stored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.model.rope_config import rope_from_gguf, rope_from_hf

Metadata = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family apart from Llama.

    Attributes:
        hf_model_type: `model_type` in config.json.
        gguf_architecture: `general.architecture` in a GGUF file.
        qkv_bias: biases on q, k and v whatever the configuration says.
        qk_norm: RMSNorm on every query and key head.
        windows_by_default: `sliding_window` holds unless `use_sliding_window` says otherwise.
        tied_by_default: value of `tie_word_embeddings` where config.json leaves it out.
        gguf_interleaved_rope: GGUF files store q and k rows permuted for interleaved rotation.
        no_rope_layer_interval: every n-th layer has no rotary embedding where the file does not say; 0 is never.
    """

    hf_model_type: str
    gguf_architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windows_by_default: bool = False
    tied_by_default: bool = False
    gguf_interleaved_rope: bool = False
    no_rope_layer_interval: int = 0


FAMILIES = (
    Family("llama", "llama", gguf_interleaved_rope=True),  # Llama 1 to 3.3, SmolLM, SmolLM2, TinyLlama, Yi, ...
    Family("mistral", "llama", windows_by_default=True, gguf_interleaved_rope=True),
    Family("qwen2", "qwen2", qkv_bias=True),
    Family("qwen3", "qwen3", qk_norm=True),
    Family("smollm3", "smollm3", tied_by_default=True, gguf_interleaved_rope=True, no_rope_layer_interval=4),
)


def config_from_hf(hf: Metadata) -> ModelConfig:
    """Returns the configuration that a Hugging Face config.json describes.

    Raises:
        ValueError: the model type or one of its options is not supported, or an entry is missing.
    """
    family = _find("hf_model_type", hf.get("model_type"), "model_type")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be 'silu', got {hf['hidden_act']!r}; other activations are not supported")
    _refuse_quantized(hf)
    num_heads, num_layers = _count(hf, "num_attention_heads"), _count(hf, "num_hidden_layers")
    hidden_size, max_positions = _count(hf, "hidden_size"), _count(hf, "max_position_embeddings")
    theta, scaling = rope_from_hf(hf)
    attention_bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        family=family.hf_model_type,
        vocab_size=_get(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_get(hf, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hidden_size // num_heads,
        max_position_embeddings=max_positions,
        rms_norm_eps=float(_get(hf, "rms_norm_eps")),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", family.tied_by_default)),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        layer_windows=_hf_windows(hf, family, num_layers),
        layer_rope=tuple(bool(use) for use in hf.get("no_rope_layers") or ())
        or _layer_rope(hf.get("no_rope_layer_interval", family.no_rope_layer_interval), num_layers),
    )


def config_from_gguf(metadata: Metadata, tensor_names: frozenset[str], rope_factors: tuple[float, ...]) -> ModelConfig:
    """Returns the configuration of a GGUF file.

    Args:
        metadata: the file's key-value pairs.
        tensor_names: tells whether the head is tied and which biases exist.
        rope_factors: content of the `rope_freqs.weight` tensor, empty where the file has none.

    Raises:
        ValueError: the architecture or one of its options is not supported, or an entry is missing.
    """
    architecture = metadata.get("general.architecture")
    family = _find("gguf_architecture", architecture, "general.architecture")

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        return _get(metadata, f"{architecture}.{name}") if value is None else value

    num_layers, num_heads, hidden_size, max_positions = (
        _count(metadata, f"{architecture}.{name}")
        for name in ("block_count", "attention.head_count", "embedding_length", "context_length")
    )
    head_dim = get("attention.key_length", hidden_size // num_heads)
    if (value_dim := get("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"key and value heads must have one size, got {head_dim} and {value_dim}")
    if get("expert_count", 0):
        raise ValueError(
            f"mixture-of-experts models are not supported, got {metadata['general.architecture']}.expert_count"
        )
    window = metadata.get(f"{architecture}.attention.sliding_window")
    theta, scaling = rope_from_gguf(metadata, family.gguf_architecture, rope_factors)
    return ModelConfig(
        family=family.hf_model_type,
        vocab_size=metadata.get(f"{architecture}.vocab_size") or len(_get(metadata, "tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=get("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        o_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        layer_windows=(window,) * num_layers if window else (),
        layer_rope=_layer_rope(family.no_rope_layer_interval, num_layers),
    )


def _find(field: str, name: Any, where: str) -> Family:
    for family in FAMILIES:
        if getattr(family, field) == name:
            return family
    supported = sorted({getattr(family, field) for family in FAMILIES})
    raise ValueError(f"unsupported {where} {name!r}; supported are {', '.join(supported)}")


def _get(metadata: Metadata, name: str) -> Any:
    if metadata.get(name) is None:
        raise ValueError(f"the model's metadata has no entry {name!r}, which is needed")
    return metadata[name]


def _count(metadata: Metadata, name: str) -> int:
    value = _get(metadata, name)
    if not isinstance(value, int) or value < 1:  # some architectures have a list, one number a layer
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _refuse_quantized(hf: Metadata) -> None:
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"quantized safetensors ({method}) are not supported; use the f32, f16 or bf16 checkpoint or a GGUF file"
        )


def _hf_windows(hf: Metadata, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window, kinds = hf.get("sliding_window"), hf.get("layer_types")
    if unknown := set(kinds or ()) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"unsupported layer_types {sorted(unknown)}; supported are full_attention, sliding_attention")
    if window is None or not hf.get("use_sliding_window", family.windows_by_default):
        return (None,) * num_layers
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = hf.get("max_window_layers", 0)  # Qwen: the layers before it see everything
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _layer_rope(interval: int, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3: every n-th layer has no rotary embedding."""
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers)) if interval else ()
