"""Foreign metadata to `ModelConfig`: what is read, what is defaulted, and what is refused."""

import pytest

from jaxinfer.config import RopeScaling
from jaxinfer.model.families import config_from_gguf, config_from_hf

HF = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.vocab_size": 100,
}
OPTIONAL = {"general.architecture", "llama.vocab_size", "llama.attention.head_count_kv"}
NAMES = frozenset({"token_embd.weight", "output.weight"})
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def hf(**changes):
    return config_from_hf({k: v for k, v in (HF | changes).items() if v != "missing"})


def gguf(changes=None, names=NAMES, factors=(), architecture="llama"):
    metadata = {k.replace("llama.", f"{architecture}."): v for k, v in (GGUF | (changes or {})).items()}
    metadata["general.architecture"] = architecture
    return config_from_gguf({k: v for k, v in metadata.items() if v != "missing"}, names, factors)


def test_hf_sizes_and_defaults():
    config = hf()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (100, 32, 64, 4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (128, 1e-6)
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, None)
    for name in ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        assert getattr(config, name) is False
    assert config.layer_windows == (None,) * 4
    assert config.layer_rope == (True,) * 4
    assert hf(num_key_value_heads="missing").num_kv_heads == 4
    assert hf(head_dim=12).head_dim == 12
    assert hf(head_dim=None).head_dim == 8


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"model_type": "qwen2"}, {"qkv_bias": True, "o_bias": False, "qk_norm": False}),
        ({"model_type": "qwen3"}, {"qkv_bias": False, "qk_norm": True}),
        ({"model_type": "smollm3"}, {"tie_word_embeddings": True, "layer_rope": (True, True, True, False)}),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0]}, {"layer_rope": (True, False, True, False)}),
        ({"model_type": "smollm3", "no_rope_layer_interval": 2}, {"layer_rope": (True, False, True, False)}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        ({"mlp_bias": True}, {"mlp_bias": True, "qkv_bias": False}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"model_type": "mistral", "sliding_window": 8}, {"layer_windows": (8,) * 4}),
        ({"model_type": "mistral", "sliding_window": None}, {"layer_windows": (None,) * 4}),
        ({"model_type": "qwen2", "sliding_window": 8}, {"layer_windows": (None,) * 4}),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            {"layer_windows": (None, None, None, 8)},
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            {"layer_windows": (8, None, 8, None)},
        ),
    ],
)
def test_hf_options(options, wanted):
    config = hf(**options)
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    ],
    ids=["transformers 5", "transformers 4", "older"],
)
def test_hf_rope_forms(options):
    config = hf(**options)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0)


def test_hf_yarn_options():
    given = {"beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.4, "mscale": 2.0, "mscale_all_dim": 0.5}
    scaling = hf(rope_parameters={"rope_type": "yarn", "factor": 4.0, "truncate": False, **given}).rope_scaling
    assert scaling == RopeScaling("yarn", 4.0, 128, truncate=False, **given)  # 128: max_position_embeddings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "gpt2"}, "unsupported model_type 'gpt2'; supported are llama, mistral, qwen2, qwen3, smollm3"),
        ({"model_type": "missing"}, "unsupported model_type None; supported are llama"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "unsupported rope scaling 'dynamic'; supported are def"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'; supported are default, linear, ll"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' needs a 'factor'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized safetensors \(gptq\).*GGUF"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types.*linear_attention.*supported are"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a positive integer, got '4'"),
        ({"vocab_size": 1.5}, "vocab_size must be a positive integer, got 1.5"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding windows must be at least 1"),
        ({"head_dim": 7}, "head_dim must be even"),
    ],
)
def test_hf_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        hf(**options)


@pytest.mark.parametrize("name", sorted(HF.keys() - {"model_type", "num_key_value_heads"}))
@pytest.mark.parametrize("scaling", [None, {"type": "yarn", "factor": 2.0}])
def test_hf_needs(name, scaling):
    with pytest.raises(ValueError, match=f"no entry '{name}', which is needed"):
        hf(**{name: "missing"}, rope_scaling=scaling)


def test_gguf_sizes_and_defaults():
    assert gguf() == hf()
    assert gguf({"llama.attention.key_length": 12, "llama.attention.value_length": 12}).head_dim == 12
    assert gguf({"llama.attention.head_count_kv": "missing"}).num_kv_heads == 4
    assert gguf({"llama.vocab_size": "missing", "tokenizer.ggml.tokens": ["a"] * 7}).vocab_size == 7
    assert gguf({"llama.rope.freq_base": 5e5}).rope_theta == 5e5
    assert gguf({"llama.attention.sliding_window": 8}).layer_windows == (8,) * 4


def test_gguf_options_of_tensor_names():
    assert gguf(names=frozenset({"token_embd.weight"})).tie_word_embeddings
    assert gguf(names=NAMES | {"blk.0.attn_q.bias"}).qkv_bias
    assert gguf(names=NAMES | {"blk.0.attn_output.bias"}).o_bias
    assert gguf(names=NAMES | {"blk.0.ffn_up.bias"}).mlp_bias
    assert gguf(names=NAMES | {"blk.0.attn_q_norm.weight"}, architecture="qwen3").qk_norm
    assert gguf(architecture="smollm3").layer_rope == (True, True, True, False)


def test_gguf_rope():
    assert gguf(factors=(1.0, 2.0, 4.0, 8.0)).rope_scaling == RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert gguf(linear).rope_scaling == RopeScaling("linear", 4.0, 128)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.attn_factor": 0.5,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    scaling = gguf(yarn).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 32)
    assert (scaling.beta_fast, scaling.beta_slow) == (16.0, 1.0)
    assert scaling.attention_factor == pytest.approx(0.5 * (1 + 0.1 * 1.3862943611))  # 0.5 * (1 + 0.1 ln 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts models are not supported"),
        ({"llama.attention.value_length": 4}, "key and value heads must have one size, got 8 and 4"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count must be the head size 8, got 4"),
        ({"llama.rope.scaling.type": "longrope"}, "unsupported rope scaling 'longrope'; supported are none, linear, y"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' needs llama.rope.scaling.factor"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            "llama.rope.scaling.yarn_log_multiplier is not supported",
        ),
        ({"llama.attention.head_count": [4, 8]}, r"head_count must be a positive integer, got \[4, 8\]"),
        ({"llama.vocab_size": "missing"}, "no entry 'tokenizer.ggml.tokens'"),
    ],
)
def test_gguf_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        gguf(changes)


def test_gguf_refuses_other_architectures():
    with pytest.raises(ValueError, match=r"unsupported general\.architecture 'gemma3'; supported are llama, qwen2"):
        gguf(architecture="gemma3")
    with pytest.raises(ValueError, match=r"rope scaling 'linear' beside a rope_freqs\.weight tensor is not supported"):
        gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, factors=(1.0,) * 4)


@pytest.mark.parametrize("name", sorted(GGUF.keys() - OPTIONAL))
@pytest.mark.parametrize("scaling", [{}, {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}])
def test_gguf_needs(name, scaling):
    with pytest.raises(ValueError, match=f"no entry '{name}', which is needed"):
        gguf(scaling | {name: "missing"})
