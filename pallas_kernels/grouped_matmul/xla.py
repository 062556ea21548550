"""The grouped product as `jax.lax.ragged_dot_general`, which differentiates."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_BY_ROW_AND_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul_xla(
    x: Float[Array, "T K"], weights: Float[Array, "E N K"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T N"]:
    """See `grouped_matmul`.

    What XLA makes of it (jax 0.12, by compile; TPU not looked at): on CPU and GPU a dense product, every row times each
    expert, 2 * T * E * N * K FLOPs, with E masked copies of `x`; on an H200 at E = 8, N = 14336, K = 4096 and
    T = 4096 it also transposes all weights first (1.2 GB of temporary memory), at T = 16 it does not. Every expert is
    read, those without rows too.
    """
    out = lax.ragged_dot_general(
        x, weights, group_sizes, _BY_ROW_AND_EXPERT, preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )  # fmt: skip
    return out.astype(x.dtype)
