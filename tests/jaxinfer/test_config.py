import dataclasses

import pytest

from jaxinfer.config import EngineConfig, ModelConfig

TINY = {
    "family": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be a positive integer, got -1"),
        ({"page_size": 16.0}, "page_size must be a positive integer, got 16.0"),
        ({"decode_steps": True}, "decode_steps must be a positive integer, got True"),
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2, or None, got 1"),
        ({"max_model_len": "4k"}, "max_model_len must be an integer of at least 2, or None, got '4k'"),
        ({"num_pages": 1}, "num_pages must be an integer of at least 2, or None, got 1"),
        ({"num_pages": True}, "num_pages must be an integer of at least 2, or None, got True"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "=8 must be at least max_num_seqs=9, so that every"),
        ({"memory_fraction": 0}, r"memory_fraction must be in \(0, 1\], got 0"),
        ({"memory_fraction": 1.01}, r"memory_fraction must be in \(0, 1\], got 1.01"),
        ({"memory_fraction": float("nan")}, r"memory_fraction must be in \(0, 1\], got nan"),
        ({"host_cache_bytes": -1}, "host_cache_bytes must be a number of bytes, got -1"),
        ({"host_cache_bytes": 1e9}, "host_cache_bytes must be a number of bytes, got 1000000000.0"),
        ({"host_cache_bytes": 1 << 30, "prefix_cache": False}, "host_cache_bytes needs prefix_cache=True"),
        ({"disk_cache_dir": "here"}, "disk_cache_dir needs host_cache_bytes"),
        ({"preemption": "swap"}, "preemption='swap' needs host_cache_bytes"),
        ({"preemption": "drop"}, "preemption must be 'auto', 'recompute' or 'swap', got 'drop'"),
        ({"policy": "lifo"}, "policy must be 'fcfs' or 'priority', got 'lifo'"),
        ({"attention_window": 0}, "attention_window must be a positive integer, got 0"),
        ({"attention_sinks": -1, "attention_window": 9}, "attention_sinks must be a non-negative integer, got -1"),
        ({"attention_sinks": 4}, "attention_sinks=4 needs attention_window, the recent tokens"),
        ({"seed": -1}, "seed must be a non-negative integer or None, got -1"),
        ({"seed": "x"}, "seed must be a non-negative integer or None, got 'x'"),
    ],
)
def test_engine_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_engine_config_takes_the_ends_of_every_range():
    EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2, page_size=1, num_pages=2, memory_fraction=1,
        policy="priority", decode_steps=1, seed=0,
    )  # fmt: skip


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().page_size = 8  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig(**TINY).num_layers = 8  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, f"{name} must be a positive integer, got {value!r}")
            for name in ("vocab_size", "num_layers", "num_kv_heads", "max_position_embeddings")
            for value in (0, -1, 2.0, None)
        ),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim must be even for rotary embeddings, got 15"),
        ({"layer_windows": (None,)}, "layer_windows must have 2 entries, got 1"),
        ({"layer_rope": (True,) * 3}, "layer_rope must have 2 entries, got 3"),
        ({"layer_windows": (8, None), "attention_sinks": 2}, r"need a sliding window in every layer, got \(8, None\)"),
        ({"layer_windows": (8, 0)}, r"sliding windows must be at least 1 token, got \(8, 0\)"),
    ],
)
def test_model_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**TINY | options)


def test_per_layer_options_default_to_full_attention_with_positions():
    config = ModelConfig(**TINY)
    assert config.layer_windows == (None, None)
    assert config.layer_rope == (True, True)


def test_number_of_parameters_by_hand():
    """Per layer q, k, v, o, two norms and three MLP matrices; embeddings, final norm, head."""
    layer = 64 * 64 + 2 * (32 * 64) + 64 * 64 + 2 * 64 + 3 * 64 * 96
    assert ModelConfig(**TINY).num_parameters == 2 * 320 * 64 + 64 + 2 * layer
    assert ModelConfig(**TINY, tie_word_embeddings=True).num_parameters == 320 * 64 + 64 + 2 * layer
    biases = (4 + 2 + 2) * 16 + 64 + 2 * 96 + 64 + 2 * 16  # q k v, o, gate up, down; q and k norms
    config = ModelConfig(**TINY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    assert config.num_parameters == 2 * 320 * 64 + 64 + 2 * (layer + biases)
