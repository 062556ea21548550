"""The semantic of the KV write, which XLA lowers to an in-place scatter."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_kv_reference(
    pages: Float[Array, "K P page_size H"], new: Float[Array, "T K H"], slot_mapping: Int[Array, " T"]
) -> Float[Array, "K P page_size H"]:
    """See `write_kv`. Several padding tokens may share a slot of the null page; which of them stays is undefined."""
    K, P, page_size, H = pages.shape
    slots = pages.reshape(K, P * page_size, H)
    index = slot_mapping.astype(jnp.uint32)  # unsigned: no handling of negative values is compiled in
    slots = slots.at[:, index].set(new.transpose(1, 0, 2).astype(pages.dtype), mode="promise_in_bounds")
    return slots.reshape(pages.shape)
