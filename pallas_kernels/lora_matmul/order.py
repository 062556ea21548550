"""Tokens sorted by adapter."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def sort_by_adapter(
    adapter_indices: Int[Array, " T"], num_adapters: int
) -> tuple[Int[Array, " T"], Int[Array, " T"], Int[Array, " A"]]:
    """Returns the tokens in the order of their adapters, those adapters, and how many tokens each has.

    Tokens of one adapter keep their order, which makes the results reproducible; tokens without one (any index
    outside of the adapters) come last, as adapter A.
    """
    valid = (adapter_indices >= 0) & (adapter_indices < num_adapters)
    adapters = jnp.where(valid, adapter_indices, num_adapters).astype(jnp.int32)
    order = jnp.argsort(adapters, stable=True).astype(jnp.int32)
    sizes = jnp.zeros(num_adapters, jnp.int32).at[adapters].add(1, mode="drop")
    return order, adapters[order], sizes
