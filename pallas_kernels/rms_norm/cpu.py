"""RMS normalization on CPUs in C++ (`cpu.cc`): one call where XLA makes five of each norm and its residual sum.

Bytes: the operands and results once. FLOPs: about 4 an element. What it saves is compiled code and calls.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.cpu import Library, require_cpu
from pallas_kernels.rms_norm.reference import rms_norm_reference


def rms_norm_cpu(
    x: Float[Array, "*rows D"], y: Float[Array, "*rows D"] | None, scale: Float[Array, " D"], eps: float, *,
    library: Library | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `rms_norm_reference`, whose derivatives it has; `library` is one for another instruction set."""
    library = library or require_cpu()
    if x.dtype != jnp.float32 or scale.dtype != jnp.float32:
        raise NotImplementedError(f"cpu norms float32, got {x.dtype} and scale of {scale.dtype}")
    return _call(x, y, scale, eps, library)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _call(
    x: jax.Array, y: jax.Array | None, scale: jax.Array, eps: float, library: Library
) -> tuple[jax.Array, jax.Array]:
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if y is None:
        [norm] = jax.ffi.ffi_call(library.target("rms_norm"), (out,), vmap_method="sequential")(
            x, scale, eps=np.float32(eps)
        )
        return x, norm
    total, norm = jax.ffi.ffi_call(library.target("add_rms_norm"), (out, out), vmap_method="sequential")(
        x, y, scale, eps=np.float32(eps)
    )
    return total, norm


@_call.defjvp
def _jvp(eps: float, library: Library, primals: tuple, tangents: tuple) -> tuple:
    del library
    return jax.jvp(functools.partial(rms_norm_reference, eps=eps), primals, tangents)
