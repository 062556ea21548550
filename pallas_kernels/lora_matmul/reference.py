"""The semantic of the LoRA product in plain jnp, written to be read; memory O(T * R * (D_in + D_out))."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def lora_matmul_reference(
    x: Float[Array, "T D_in"],
    a: Float[Array, "A R D_in"],
    b: Float[Array, "A D_out R"],
    adapter_indices: Int[Array, " T"],
    *,
    scales: Float[Array, " A"] | None = None,
    base: Float[Array, "T D_out"] | None = None,
) -> Float[Array, "T D_out"]:
    """See `lora_matmul`."""
    has_adapter = (adapter_indices >= 0) & (adapter_indices < a.shape[0])
    i = jnp.where(has_adapter, adapter_indices, 0)
    h = jnp.einsum("td,trd->tr", x.astype(jnp.float32), a[i].astype(jnp.float32), precision="highest")
    if scales is not None:
        h = h * scales[i][:, None]
    h = h.astype(x.dtype).astype(jnp.float32)
    out = jnp.einsum("tr,tor->to", h, b[i].astype(jnp.float32), precision="highest")
    out = jnp.where(has_adapter[:, None], out, 0)  # not 0 * out: what no token uses may be NaN
    if base is not None:
        out = out + base.astype(jnp.float32)
    return out.astype(x.dtype)
