"""Public functions of RMS normalization: shape checks and dispatch."""

from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import dispatch
from pallas_kernels.rms_norm.reference import rms_norm_reference


def _cpu(*args: Any) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.rms_norm.cpu import rms_norm_cpu

    return rms_norm_cpu(*args)


IMPLEMENTATIONS = {"cpu": _cpu, "xla": rms_norm_reference}


def rms_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], eps: float, *, implementation: str | None = None
) -> Float[Array, "*rows D"]:
    """Returns x / rms(x) * scale over the last axis, in f32 up to the product with `scale` (Zhang and Sennrich, 2019).

    Args:
        x: f32, bf16 or f16.
        scale: of x's dtype.
        eps: added to the mean square.
        implementation: "cpu", "xla", or None for the first that accepts the arguments.

    Raises:
        ValueError: shapes do not fit together, or an unknown implementation.
    """
    return _rms_norm(x, None, scale, eps, implementation)[1]


def add_rms_norm(
    x: Float[Array, "*rows D"], y: Float[Array, "*rows D"], scale: Float[Array, " D"], eps: float, *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns x + y and its `rms_norm`: the residual sum of a transformer block and the norm that follows it.

    Arguments and errors are those of `rms_norm`; y is like x.
    """
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(f"y must be like x, {x.dtype}{list(x.shape)}, got {y.dtype}{list(y.shape)}")
    return _rms_norm(x, y, scale, eps, implementation)


def _rms_norm(
    x: jax.Array, y: jax.Array | None, scale: jax.Array, eps: float, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    if scale.shape != x.shape[-1:] or not x.shape:
        raise ValueError(f"scale must have the shape of x's last axis, x is {list(x.shape)}, got {list(scale.shape)}")
    return dispatch("rms_norm", IMPLEMENTATIONS, implementation, x, y, scale, eps)
