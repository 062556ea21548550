"""Public function of the KV write: shape checks and dispatch."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_write.reference import write_kv_reference

IMPLEMENTATIONS = {"xla": write_kv_reference}


def write_kv(
    pages: Float[Array, "K P page_size H"],
    new: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "K P page_size H"]:
    """Returns the pages with token t's keys (or values) at slot `slot_mapping[t]` = page * page_size + offset.

    In place when `pages` is donated. Padding tokens point into page 0, the null page, whose content nobody reads.

    Raises:
        ValueError: shapes do not fit together, or the implementation is unknown.
    """
    K, _, _, H = pages.shape
    if new.ndim != 3 or new.shape[1:] != (K, H):
        raise ValueError(f"new must have shape [T, K={K}, H={H}], got {new.shape}")
    if slot_mapping.shape != new.shape[:1]:
        raise ValueError(f"slot_mapping must have shape [T={new.shape[0]}], got {slot_mapping.shape}")
    return dispatch("write_kv", IMPLEMENTATIONS, implementation, pages, new, slot_mapping)
