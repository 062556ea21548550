"""Rotary position embeddings (RoFormer, Su et al. 2021) in the half-rotation form, and their scalings."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Returns the angle per position of each pair, f32[H / 2], and the factor on cos and sin (1 but for yarn)."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32), 1.0
    match scaling.kind:
        case "linear":
            frequencies, attention_factor = frequencies / scaling.factor, 1.0
        case "factors":
            if len(scaling.factors) != config.head_dim // 2:
                raise ValueError(f"rope factors must be {config.head_dim // 2} numbers, got {len(scaling.factors)}")
            frequencies, attention_factor = frequencies / np.asarray(scaling.factors), 1.0
        case "llama3":
            frequencies, attention_factor = _llama3(frequencies, scaling), 1.0
        case "yarn":
            frequencies = _yarn(frequencies, scaling, config)
            attention_factor = _yarn_attention_factor(scaling)
    return frequencies.astype(np.float32), attention_factor


def rope_tables(
    config: ModelConfig, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]:
    """Returns cos and sin of every position, f32[T, 1, H / 2], computed once a step for all layers."""
    frequencies, attention_factor = rope_frequencies(config)
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies)[None, None, :]
    tables = jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor
    return lax.optimization_barrier(tables)  # else XLA computes them again in each layer


def apply_rope(
    x: Float[Array, "T heads H"], cos: Float[Array, "T 1 half"], sin: Float[Array, "T 1 half"]
) -> Float[Array, "T heads H"]:
    """Returns x with every pair (x[i], x[i + H/2]) rotated by its position's angle."""
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths  # rotations within the trained context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: np.ndarray, scaling: RopeScaling, config: ModelConfig) -> np.ndarray:
    """NTK-by-parts (YaRN, section 3.2): dimensions that turn often extrapolate, slow ones interpolate."""

    def dimension_of(rotations: float) -> float:
        ratio = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (np.arange(config.head_dim // 2) - low) / max(high - low, 0.001)
    interpolated = np.clip(ramp, 0.0, 1.0)
    return interpolated * frequencies / scaling.factor + (1 - interpolated) * frequencies


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """Returns the factor on cos and sin that stands for YaRN's attention temperature (section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """As given, or from DeepSeek's pair of mscales, or from the factor."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)
