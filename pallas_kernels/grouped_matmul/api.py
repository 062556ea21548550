"""Public function of the grouped product: shape checks and dispatch."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla


def _mosaic_gpu(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu

    return grouped_matmul_mosaic_gpu(*args, **kwargs)


def _mosaic_tpu(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.grouped_matmul.mosaic_tpu import grouped_matmul_mosaic_tpu

    return grouped_matmul_mosaic_tpu(*args, **kwargs)


IMPLEMENTATIONS = {
    "mosaic_gpu": _mosaic_gpu,
    "mosaic_tpu": _mosaic_tpu,
    "xla": grouped_matmul_xla,
    "reference": grouped_matmul_reference,
}


def grouped_matmul(
    x: Float[Array, "T K"],
    weights: Float[Array, "E N K"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "T N"]:
    """Returns `x[t] @ weights[e].T` for the expert e of each row t, summed in f32.

    The first `group_sizes[0]` rows belong to expert 0, the next `group_sizes[1]` to expert 1, and so on; rows after
    their sum give 0, whatever they hold. Groups may be empty, and one may have all rows.

    Args:
        x: rows sorted by expert.
        weights: one matrix [out, in] an expert, of the type of `x`.
        group_sizes: rows of each expert (int32); their sum is at most T.
        implementation: "mosaic_gpu", "mosaic_tpu", "xla" (differentiable with respect to `x` and `weights`),
            "reference", or None for the fastest that accepts the arguments.

    Raises:
        ValueError: shapes or types do not fit together, or the implementation is unknown.
    """
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[2] or group_sizes.shape != weights.shape[:1]:
        raise ValueError(
            "x, weights and group_sizes must have shapes [T, K], [E, N, K] and [E], got "
            f"{x.shape}, {weights.shape} and {group_sizes.shape}"
        )
    if x.dtype != weights.dtype:
        raise ValueError(f"x and weights must have one type, got {x.dtype} and {weights.dtype}; cast one of them")
    if 0 in x.shape or 0 in weights.shape:
        raise ValueError(f"no dimension may be 0, got {x.shape} and {weights.shape}")
    return dispatch("grouped_matmul", IMPLEMENTATIONS, implementation, x, weights, group_sizes)
