"""The one semantic of the quantized matmul."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.weights import QuantizedWeight, dequantize_weight


def quantized_matmul_reference(
    x: Float[Array, "M K"],
    weight: QuantizedWeight,
    *,
    x_scale: Float[Array, " M"] | None,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "M N"]:
    """Returns `x @ dequantize_weight(weight).T`, everything in f32; see `quantized_matmul`.

    Args:
        x: bf16, f16 or f32 with `x_scale` None, else int8 or float8_e4m3fn codes.
        weight: the matrix f[N, K].
        x_scale: row m of x stands for `x[m] * x_scale[m]`.
        out_dtype: of the result.
    """
    values = x.astype(jnp.float32)
    if x_scale is not None:
        values = values * x_scale[:, None]
    contract_inputs = (((1,), (1,)), ((), ()))
    product = lax.dot_general(values, dequantize_weight(weight), contract_inputs, precision=lax.Precision.HIGHEST)
    return product.astype(out_dtype)
