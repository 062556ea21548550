"""Activations in 8 bits, one scale a token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pages import FLOAT8, FLOAT8_MAX

ACTIVATIONS = ("int8", "float8")
_SMALLEST = 1e-30  # a row of zeros gets a scale that divides without overflow, and codes of zero


def quantize_per_token(x: Float[Array, "M K"], kind: str) -> tuple[jax.Array, Float[Array, " M"]]:
    """Returns codes of the shape of `x` and their scale f32[M], so that row m is about `codes[m] * scale[m]`.

    Symmetric: the largest magnitude of a row becomes 127 ("int8") or 448 ("float8", e4m3). Rounding is to nearest,
    ties to even, in f32: an integer is at most half a scale off; a float8 at most 2**-4 of itself, or 2**-10 scales.
    A row of zeros gives zeros. A NaN or an infinity makes the scale NaN or infinite, hence its own row of a product
    NaN, and touches no other row.

    Raises:
        ValueError: unknown `kind`.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"activations must be one of {ACTIVATIONS} or None, got {kind!r}")
    values = x.astype(jnp.float32)
    limit = FLOAT8_MAX if kind == "float8" else 127.0
    scale = jnp.maximum(jnp.max(jnp.abs(values), axis=-1), _SMALLEST) / limit
    scaled = values / scale[:, None]
    return scaled.astype(FLOAT8) if kind == "float8" else jnp.round(scaled).astype(jnp.int8), scale
