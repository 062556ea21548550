"""The semantic of the grouped product in plain jnp, written to be read; memory O(T * N * K)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul_reference(
    x: Float[Array, "T K"], weights: Float[Array, "E N K"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T N"]:
    """See `grouped_matmul`."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    group = jnp.searchsorted(ends, jnp.arange(x.shape[0], dtype=jnp.int32), side="right", method="compare_all")
    mine = weights[jnp.minimum(group, weights.shape[0] - 1)].astype(jnp.float32)  # [T, N, K]
    out = jnp.einsum("tk,tnk->tn", x.astype(jnp.float32), mine, precision="highest")
    return jnp.where(group[:, None] < weights.shape[0], out, 0).astype(x.dtype)
