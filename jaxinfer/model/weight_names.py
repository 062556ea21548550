"""Where each parameter is stored: names in Hugging Face and in GGUF files, the same for every family."""

from collections.abc import Callable, Iterator

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.model.families import FAMILIES

# parameter module: (Hugging Face, GGUF)
_MODEL = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "lm_head": ("lm_head", "output"),
}
_LAYER = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention/q": ("self_attn.q_proj", "attn_q"),
    "attention/k": ("self_attn.k_proj", "attn_k"),
    "attention/v": ("self_attn.v_proj", "attn_v"),
    "attention/o": ("self_attn.o_proj", "attn_output"),
    "attention/q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention/k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp/gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp/up": ("mlp.up_proj", "ffn_up"),
    "mlp/down": ("mlp.down_proj", "ffn_down"),
}

# Stored beside the weights but not parameters: rotary tables, which are computed.
IGNORED = (r"rope_freqs\.weight", r".*rotary_emb\.inv_freq")

Transform = Callable[[np.ndarray], np.ndarray]


def hf_name(path: str) -> str:
    """Returns the Hugging Face tensor name of the parameter at `path` such as "layers_0/attention/q/weight"."""
    return _name(path, 0, "model.layers.")


def gguf_name(path: str) -> str:
    """Returns the GGUF tensor name of the parameter at `path`."""
    return _name(path, 1, "blk.")


def gguf_transform(config: ModelConfig, path: str) -> Transform | None:
    """Returns what turns a GGUF tensor into ours, None for most.

    Files of llama-like architectures hold the rows of q and k permuted within each head for the interleaved form
    of rotary embeddings; ours are the halves form of Hugging Face.
    """
    family = next(family for family in FAMILIES if family.hf_model_type == config.family)
    if not family.gguf_interleaved_rope:
        return None
    heads = {"attention/q": config.num_heads, "attention/k": config.num_kv_heads}.get(_split(path)[1])
    return None if heads is None else lambda tensor: _unpermute(tensor, heads)


def _unpermute(tensor: np.ndarray, heads: int) -> np.ndarray:
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, half, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _split(path: str) -> tuple[str | None, str, str]:
    """Splits a path into layer number, module and leaf."""
    module, leaf = path.rsplit("/", 1)
    if not module.startswith("layers_"):
        return None, module, leaf
    layer, module = module.removeprefix("layers_").split("/", 1)
    return layer, module, leaf


def _name(path: str, column: int, layer_prefix: str) -> str:
    layer, module, leaf = _split(path)
    suffix = "bias" if leaf == "bias" else "weight"
    if layer is None:
        return f"{_MODEL[module][column]}.{suffix}"
    return f"{layer_prefix}{layer}.{_LAYER[module][column]}.{suffix}"


def parameter_paths(tree: dict, prefix: str = "") -> Iterator[str]:
    """Yields the path of every leaf of a parameter tree."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from parameter_paths(value, f"{prefix}{name}/")
        else:
            yield prefix + name
