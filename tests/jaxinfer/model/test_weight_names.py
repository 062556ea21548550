import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.model.params import abstract_params
from jaxinfer.model.weight_names import gguf_name, gguf_transform, hf_name, parameter_paths

SIZES = {
    "vocab_size": 10, "hidden_size": 8, "intermediate_size": 6, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 4, "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "rope_theta": 100.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "hf", "gguf"),
    [
        ("embed/weight", "model.embed_tokens.weight", "token_embd.weight"),
        ("final_norm/scale", "model.norm.weight", "output_norm.weight"),
        ("lm_head/weight", "lm_head.weight", "output.weight"),
        ("layers_0/attention_norm/scale", "model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("layers_12/attention/q/bias", "model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
        ("layers_1/attention/o/weight", "model.layers.1.self_attn.o_proj.weight", "blk.1.attn_output.weight"),
        ("layers_1/attention/k_norm/scale", "model.layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight"),
        ("layers_1/mlp_norm/scale", "model.layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight"),
        ("layers_1/mlp/down/bias", "model.layers.1.mlp.down_proj.bias", "blk.1.ffn_down.bias"),
    ],
)
def test_names(path, hf, gguf):
    assert (hf_name(path), gguf_name(path)) == (hf, gguf)


def test_every_leaf_has_its_own_name():
    config = ModelConfig("qwen3", **SIZES, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    abstract, axes = abstract_params(config, jnp.float32)
    paths = list(parameter_paths(abstract))
    assert len(paths) == 3 + 2 * (2 + 4 * 2 + 2 + 3 * 2)
    assert paths == list(parameter_paths(axes))
    assert len({hf_name(path) for path in paths}) == len({gguf_name(path) for path in paths}) == len(paths)


def test_gguf_transform_undoes_the_interleaving():
    """Rows (pair i, part j) of a head, stored at 2 i + j, go to j * half + i; q and k have their own head counts."""
    config = ModelConfig("llama", **SIZES)
    rows = np.arange(16)[:, None] * np.ones((1, 8))
    q = gguf_transform(config, "layers_1/attention/q/weight")(rows)
    assert q[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15]
    k = gguf_transform(config, "layers_0/attention/k/bias")(np.arange(8))
    assert k.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    for path in ("layers_0/attention/v/weight", "layers_0/attention/o/weight", "embed/weight"):
        assert gguf_transform(config, path) is None
    assert gguf_transform(ModelConfig("qwen2", **SIZES), "layers_0/attention/q/weight") is None
