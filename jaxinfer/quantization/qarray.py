"""A matrix in few bits as one pytree node, in place of the array: the decoder does not see the difference.

Two layouts, one meaning: `CpuWeight` is tiled for the C++ kernels, `QuantizedWeight` is what GPU, TPU and XLA read.
"""

from typing import TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import quantized_matmul as packed
from pallas_kernels.quantized_matmul import CpuWeight, QuantizedWeight, dequantize_weight

type QArray = CpuWeight | QuantizedWeight


def is_packed(weight: object) -> TypeGuard[QArray]:
    """Whether a parameter is a packed matrix."""
    return isinstance(weight, CpuWeight | QuantizedWeight)


def take_rows(weight: QArray, rows: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Returns the given rows of the matrix, f32; a row out of range gives the nearest."""
    if isinstance(weight, CpuWeight):
        return packed.take_rows(weight, rows)
    taken = jax.tree.map(lambda part: jnp.take(part, rows, axis=0, mode="clip"), weight)
    return dequantize_weight(taken)
