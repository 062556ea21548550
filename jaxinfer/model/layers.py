"""Linear, RMSNorm and the gated MLP: the layers without state.

Matrices are [out, in], the layout of Hugging Face and GGUF files, so that loading never transposes. `params.py` names
the parameters' axes.
"""

from typing import Any

import flax.linen as nn
import jax
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.quantization import is_packed, take_rows
from pallas_kernels.quantized_matmul import quantized_matmuls
from pallas_kernels.rms_norm import add_rms_norm, rms_norm

_matrix_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2)


def linear(
    x: Float[Array, "T D"], *weights: Any, preferred_element_type: Any = None, activations: str | None = None
) -> tuple[jax.Array, ...]:
    """Returns x @ weight.T for each weight f[F, D], an array or a `QArray`: the one matrix product of the decoder.

    `activations` is how `quantized_matmul` treats x; a weight that is not packed takes it as it is.
    """
    if all(is_packed(weight) for weight in weights):
        return quantized_matmuls(x, weights, activations=activations, out_dtype=preferred_element_type)

    def product(weight: Any) -> jax.Array:
        if is_packed(weight):
            return linear(x, weight, preferred_element_type=preferred_element_type, activations=activations)[0]
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=preferred_element_type)

    return tuple(product(weight) for weight in weights)


def parameter(module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Declares a parameter and returns its value: an array, or a packed matrix."""
    if module.has_variable("params", name) and is_packed(value := module.get_variable("params", name)):
        if value.shape != shape:
            raise ValueError(f"{'/'.join(module.path)}/{name} must have shape {shape}, got {value.shape} packed")
        return value
    return module.param(name, init, shape, dtype)


class Embedding(nn.Module):
    """A [V, D] matrix that is read row by row, or multiplied as the head."""

    vocab_size: int
    hidden_size: int
    dtype: Any

    def setup(self):
        """Declares the matrix."""
        shape = (self.vocab_size, self.hidden_size)
        self.weight = parameter(self, "weight", nn.initializers.normal(1.0), shape, self.dtype)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Returns the rows of these tokens; an id out of range gives the nearest row."""
        if is_packed(self.weight):
            return take_rows(self.weight, token_ids).astype(self.dtype)
        return self.weight.at[token_ids].get(mode="clip")


class Linear(nn.Module):
    """y = x @ weight.T + bias, with weight [out, in]."""

    features: int
    dtype: Any
    use_bias: bool = False
    activations: str | None = None

    @nn.compact
    def parameters(self, in_features: int) -> tuple[Any, Any]:
        """Returns the weight and the bias or None."""
        weight = parameter(self, "weight", _matrix_init, (self.features, in_features), self.dtype)
        if not self.use_bias:
            return weight, None
        return weight, parameter(self, "bias", nn.initializers.zeros_init(), (self.features,), self.dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        """Returns f[T, features]."""
        return project(x, self)[0]


def project(x: Float[Array, "T D"], *layers: Linear) -> tuple[jax.Array, ...]:
    """Returns `layer(x)` of each layer, in one product where that saves time."""
    weights, biases = zip(*(layer.parameters(x.shape[-1]) for layer in layers))
    outs = linear(x, *weights, activations=layers[0].activations)
    return tuple(y if bias is None else y + bias[None, :] for y, bias in zip(outs, biases))


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis; see `rms_norm`."""

    eps: float
    dtype: Any

    @nn.compact
    def parameters(self, features: int) -> jax.Array:
        """Returns the scale."""
        return parameter(self, "scale", nn.initializers.ones_init(), (features,), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array like x."""
        return rms_norm(x, self.parameters(x.shape[-1]), self.eps)

    def add(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x + y and its norm, both like x."""
        return add_rms_norm(x, y, self.parameters(x.shape[-1]), self.eps)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    intermediate_size: int
    use_bias: bool
    dtype: Any
    activations: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns f[T, D]."""
        inner, options = self.intermediate_size, (self.dtype, self.use_bias, self.activations)
        gate, up = project(x, *(Linear(inner, *options, name=name) for name in ("gate", "up")))
        return Linear(x.shape[-1], *options, name="down")(jax.nn.silu(gate) * up)
