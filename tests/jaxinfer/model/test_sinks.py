"""Attention sinks against StreamingLLM in plain numpy: a list of keys, not rotated, and positions within that list."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeScaling
from jaxinfer.model.decoder import Decoder
from jaxinfer.model.params import random_params
from jaxinfer.model.rope import rope_frequencies
from tests.helpers import PagedRow

YARN = RopeScaling("yarn", factor=2.0, original_max_position_embeddings=16)
CONFIG = ModelConfig("llama", 40, 16, 24, 2, 4, 2, 8, 32, 1e-6, 100.0, rope_scaling=YARN, layer_rope=(True, False))
TOKENS = np.random.default_rng(3).integers(0, 40, 60)  # beyond the 32 of the model


@functools.cache
def params():
    """Attention that looks at some tokens more than at others."""
    params = random_params(CONFIG)
    return jax.tree.map_with_path(lambda path, x: x * (3 if "attention" in str(path) and x.ndim > 1 else 1), params)


class Reference:
    """The decoder in float64, with every layer's unrotated keys and values in lists."""

    def __init__(self, params, config, sinks, window):
        self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.config, self.sinks, self.window = config, sinks, window
        self.keys, self.values = ([[] for _ in range(config.num_layers)] for _ in range(2))

    def feed(self, tokens):
        return np.stack([self.next_logits(token) for token in tokens])

    def next_logits(self, token):
        p = self.params
        x = p["embed"]["weight"][token]
        for i in range(self.config.num_layers):
            layer = p[f"layers_{i}"]
            x = x + self.attention(i, layer["attention"], self.norm(x, layer["attention_norm"]))
            y, mlp = self.norm(x, layer["mlp_norm"]), layer["mlp"]
            gate = mlp["gate"]["weight"] @ y
            x = x + mlp["down"]["weight"] @ (gate / (1 + np.exp(-gate)) * (mlp["up"]["weight"] @ y))
        return p["lm_head"]["weight"] @ self.norm(x, p["final_norm"])

    def attention(self, i, layer, x):
        c = self.config
        q, k, v = ((layer[name]["weight"] @ x).reshape(-1, c.head_dim) for name in "qkv")
        self.keys[i].append(k)
        self.values[i].append(v)
        size = len(self.keys[i])
        window = min(self.window, c.layer_windows[i] or self.window)
        first = max(0, size - window)  # of the most recent tokens
        seen = [*range(min(self.sinks, first)), *range(first, size)]
        keys, values = np.stack([self.keys[i][j] for j in seen]), np.stack([self.values[i][j] for j in seen])
        if c.layer_rope[i]:
            keys = self.rotate(keys, np.arange(len(seen)))
            q = self.rotate(q[None], np.array([len(seen) - 1]))[0]
        group = c.num_heads // c.num_kv_heads
        keys, values = (np.repeat(part, group, axis=1) for part in (keys, values))
        weights = np.exp(np.einsum("nh,snh->ns", q, keys) * c.head_dim**-0.5)
        weights /= weights.sum(axis=1, keepdims=True)
        return layer["o"]["weight"] @ np.einsum("ns,snh->nh", weights, values).ravel()

    def rotate(self, x, positions):
        frequencies, factor = rope_frequencies(self.config)
        angles = positions[:, None, None] * np.float64(frequencies)
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def norm(self, x, layer):
        return x / np.sqrt((x * x).mean() + self.config.rms_norm_eps) * layer["scale"]


@pytest.mark.parametrize(
    ("sinks", "window", "windows", "implementation"),
    [
        (4, 10, (None, None), None),
        pytest.param(10, 3, (5, 2), "xla", marks=pytest.mark.slow),  # sinks in two pages; layers of other windows
        pytest.param(0, 7, (None, None), None, marks=pytest.mark.slow),
        pytest.param(1, 1, (None, None), "reference", marks=pytest.mark.slow),
        pytest.param(8, 24, (None, None), None, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_streaming_llm(sinks, window, windows, implementation):
    config = dataclasses.replace(CONFIG, layer_windows=windows)
    wanted = Reference(params(), config, sinks, window).feed(TOKENS)
    decoder = Decoder(config.streaming(sinks, window), implementation=implementation)
    in_chunks = PagedRow(decoder, params()).feed_in_chunks(TOKENS[:47], 21)
    np.testing.assert_allclose(in_chunks, wanted[:47], atol=1e-4)
    one_by_one = PagedRow(decoder, params())
    one_by_one.feed(TOKENS[:13])
    np.testing.assert_allclose(one_by_one.feed_in_chunks(TOKENS[13:], 1), wanted[13:], atol=1e-4)
