"""The semantic of the KV write, which XLA lowers to an in-place scatter."""

from jaxtyping import Array, Float, Int


def write_kv_reference(
    pages: Float[Array, "K P page_size H"], new: Float[Array, "T K H"], slot_mapping: Int[Array, " T"]
) -> Float[Array, "K P page_size H"]:
    """See `write_kv`. Several padding tokens may share a slot of the null page; which of them stays is undefined."""
    page_size = pages.shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    return pages.at[:, page, offset].set(new.transpose(1, 0, 2).astype(pages.dtype), mode="promise_in_bounds")
