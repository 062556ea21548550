"""How products with packed weights treat what they are multiplied with."""

from typing import Any

import jax

from jaxinfer.quantization.qarray import is_packed
from pallas_kernels.quantized_matmul import CpuWeight

ACTIVATIONS = ("float32", "int16", "int8")


def check_activations(activations: str | None) -> None:
    """Checks an option.

    Raises:
        ValueError: it is none of `ACTIVATIONS`, nor None.
    """
    if activations not in (*ACTIVATIONS, None):
        raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)} or None, got {activations!r}")


def chosen_activations(activations: str | None, params: Any) -> str | None:
    """Returns what the decoder is told for these parameters: how to round, or None to multiply floats.

    Raises:
        ValueError: nothing is packed, or not in a layout that goes with it.
    """
    if activations in (None, "float32"):
        return None  # as they are, which needs no packed weights
    packed = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(leaf)]
    if not packed:
        raise ValueError(f'{activations=} goes with packed weights, and none are: set quantize to "int8" or "int4"')
    if activations == "int16" and not any(isinstance(leaf, CpuWeight) for leaf in packed):
        raise ValueError('activations="int16" is for the C++ kernels of CPUs; use "int8" or "float32" here')
    return activations
