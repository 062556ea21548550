"""Rotary embeddings against complex numbers and against each paper's formula, written out frequency by frequency."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeScaling
from jaxinfer.model.rope import apply_rope, rope_frequencies, rope_tables

H, THETA, TRAINED = 16, 50.0, 64


def config(scaling=None):
    return ModelConfig("llama", 10, 32, 64, 1, 2, 2, H, 1024, 1e-6, THETA, scaling)


def frequencies(scaling):
    return rope_frequencies(config(scaling))


PLAIN = [1 / THETA ** (2 * i / H) for i in range(H // 2)]


def test_plain():
    found, factor = frequencies(None)
    np.testing.assert_allclose(found, PLAIN, rtol=1e-6)
    assert (found.dtype, factor) == (np.float32, 1.0)


def test_linear_and_factors():
    found, factor = frequencies(RopeScaling("linear", 4.0))
    np.testing.assert_allclose(found, np.array(PLAIN) / 4, rtol=1e-6)
    found, _ = frequencies(RopeScaling("factors", factors=tuple(range(1, 9))))
    np.testing.assert_allclose(found, [f / d for f, d in zip(PLAIN, range(1, 9))], rtol=1e-6)
    assert factor == 1.0
    with pytest.raises(ValueError, match="rope factors must be 8 numbers, got 3"):
        frequencies(RopeScaling("factors", factors=(1.0, 2.0, 3.0)))


def test_llama3():
    low, high, factor, wanted, seen = 1.0, 4.0, 8.0, [], set()
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        if wavelength < TRAINED / high:
            wanted.append(frequency)
            seen.add("short")
        elif wavelength > TRAINED / low:
            wanted.append(frequency / factor)
            seen.add("long")
        else:
            smooth = (TRAINED / wavelength - low) / (high - low)
            wanted.append((1 - smooth) * frequency / factor + smooth * frequency)
            seen.add("between")
    found, attention = frequencies(RopeScaling("llama3", factor, TRAINED))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert (attention, len(seen)) == (1.0, 3)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate):
    fast, slow, factor = 8.0, 0.5, 4.0

    def dimension(turns):  # inverse of: turns within TRAINED positions of dimension d
        return H / 2 * math.log(TRAINED / (2 * math.pi * turns), THETA)

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, H - 1)
    assert 0 <= low < high < H // 2 + 4
    wanted = []
    for i, frequency in enumerate(PLAIN):
        gamma = min(max((i - low) / (high - low), 0), 1)
        wanted.append(gamma * frequency / factor + (1 - gamma) * frequency)
    scaling = RopeScaling("yarn", factor, TRAINED, beta_fast=fast, beta_slow=slow, truncate=truncate)
    found, attention = frequencies(scaling)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert attention == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factor():
    def factor(scale=4.0, **options):
        return frequencies(RopeScaling("yarn", scale, TRAINED, **options))[1]

    assert factor(attention_factor=1.4, mscale=2.0, mscale_all_dim=0.5) == 1.4
    assert factor(mscale=2.0, mscale_all_dim=0.5) == pytest.approx((0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert factor(mscale=2.0) == pytest.approx(0.1 * math.log(4) + 1)  # DeepSeek's pair counts only whole
    assert factor(scale=0.5) == 1.0


def test_rotation_is_multiplication_of_complex_numbers(rng):
    x = rng.standard_normal((5, 2, H)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 900], np.int32)
    wanted = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * positions[:, None, None] * np.array(PLAIN))
    found = apply_rope(jnp.asarray(x), *rope_tables(config(), jnp.asarray(positions)))
    np.testing.assert_allclose(found, np.concatenate([wanted.real, wanted.imag], -1), atol=3e-4)


def test_scores_depend_on_distance_only_and_dtype_stays(rng):
    q, k = (jnp.asarray(rng.standard_normal((2, 1, H)), jnp.float32) for _ in range(2))
    q, k = q[:1].repeat(2, 0), k[:1].repeat(2, 0)
    rotated_q = apply_rope(q, *rope_tables(config(), jnp.array([10, 110])))
    rotated_k = apply_rope(k, *rope_tables(config(), jnp.array([3, 103])))
    scores = (rotated_q * rotated_k).sum(-1)
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
    assert apply_rope(q.astype(jnp.bfloat16), *rope_tables(config(), jnp.array([1, 2]))).dtype == jnp.bfloat16


def test_attention_factor_scales_the_tables():
    cos, sin = rope_tables(config(RopeScaling("yarn", 4.0, TRAINED, attention_factor=1.5)), jnp.arange(3))
    np.testing.assert_allclose(cos**2 + sin**2, 2.25, rtol=1e-5)
