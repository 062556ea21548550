"""Linear, RMSNorm and the gated MLP: the layers without state.

Parameters carry logical axis names (`sharding.AxisRules` maps them to mesh axes); matrices are [out, in], the
layout of Hugging Face and GGUF files, so that loading never transposes.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_matrix_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2)


def linear(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], preferred_element_type: Any = None
) -> Float[Array, "T F"]:
    """Returns x @ weight.T, the one matrix product of the decoder."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=preferred_element_type)


def parameter(
    module: nn.Module, name: str, init: Any, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Declares a parameter with its logical axes and returns its value."""
    value: Any = module.param(name, nn.with_partitioning(init, axes), shape, dtype)
    return value


class Embedding(nn.Module):
    """A [V, D] matrix that is read row by row, or multiplied as the head."""

    vocab_size: int
    hidden_size: int
    dtype: Any

    def setup(self):
        """Declares the matrix."""
        shape = (self.vocab_size, self.hidden_size)
        self.weight = parameter(self, "weight", nn.initializers.normal(1.0), ("vocab", "embed"), shape, self.dtype)


class Linear(nn.Module):
    """y = x @ weight.T + bias, with weight [out, in]."""

    features: int
    axes: tuple[str, str]
    dtype: Any
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        """Returns f[T, features]."""
        y = linear(x, parameter(self, "weight", _matrix_init, self.axes, (self.features, x.shape[-1]), self.dtype))
        if self.use_bias:
            zeros = nn.initializers.zeros_init()
            y += parameter(self, "bias", zeros, self.axes[:1], (self.features,), self.dtype)[None, :]
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in f32 (Zhang and Sennrich, 2019)."""

    eps: float
    dtype: Any
    axis: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array like x."""
        scale = parameter(self, "scale", nn.initializers.ones_init(), (self.axis,), (x.shape[-1],), self.dtype)
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    intermediate_size: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns f[T, D]."""
        inner = self.intermediate_size
        gate = Linear(inner, ("mlp", "embed"), self.dtype, self.use_bias, name="gate")(x)
        up = Linear(inner, ("mlp", "embed"), self.dtype, self.use_bias, name="up")(x)
        return Linear(x.shape[-1], ("embed", "mlp"), self.dtype, self.use_bias, name="down")(jax.nn.silu(gate) * up)
