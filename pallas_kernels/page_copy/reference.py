"""The semantic of page copies, which XLA lowers to a gather and an in-place scatter."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def copy_pages_reference(
    pages: Any, source: Int[Array, " C"], destination: Int[Array, " C"], *, disjoint: bool = False
) -> Any:
    """See `copy_pages`; right for any sets, so `disjoint` changes nothing here."""
    del disjoint
    return scatter_pages_reference(pages, gather_pages_reference(pages, source), destination)


def gather_pages_reference(pages: Any, source: Int[Array, " C"]) -> Any:
    """See `gather_pages`."""
    index = source.astype(jnp.uint32)  # unsigned: no handling of negative values is compiled in
    return jax.tree.map(lambda array: array.at[:, index].get(mode="promise_in_bounds"), pages)


def scatter_pages_reference(pages: Any, staged: Any, destination: Int[Array, " C"]) -> Any:
    """See `scatter_pages`."""
    index = destination.astype(jnp.uint32)
    return jax.tree.map(lambda array, new: array.at[:, index].set(new, mode="promise_in_bounds"), pages, staged)
