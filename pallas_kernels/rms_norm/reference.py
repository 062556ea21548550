"""RMS normalization in XLA, which fuses it on GPU and TPU by itself."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm_reference(
    x: Float[Array, "*rows D"], y: Float[Array, "*rows D"] | None, scale: Float[Array, " D"], eps: float
) -> tuple[jax.Array, jax.Array]:
    """Returns x + y (x where there is no y) and its norm; see `add_rms_norm`."""
    total = x if y is None else x + y
    z = total.astype(jnp.float32)
    z = z * lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + eps)
    return total, z.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))
