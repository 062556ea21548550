"""The KV write on CPUs in C++ (`cpu.cc`), in place: keys are rotated, and both are quantized, on the way.

Bytes: k and v once, what is stored of them once; FLOPs: 3 an element for the rotation, about 4 for quantization.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import Library, require_cpu
from pallas_kernels.pages import Pages, QuantizedPages

DTYPES = (jnp.float32, jnp.bfloat16)
MAX_HEAD_DIM = 1024


def write_kv_cpu(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, "*K T"],
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
    library: Library | None = None,
) -> tuple[Pages, Pages]:
    """See `write_kv`; slots out of range are dropped. `library` is one for another instruction set."""
    library = library or require_cpu()
    if slot_mapping.ndim > 1:
        raise NotImplementedError("cpu: a slot for each head")
    for name, x in (("key pages", k_pages), ("value pages", v_pages), ("keys", k), ("values", v)):
        if not isinstance(x, QuantizedPages) and x.dtype not in DTYPES:
            raise NotImplementedError(f"cpu writes float32 and bfloat16, the {name} are {x.dtype}")
    if k.shape[2] > MAX_HEAD_DIM:
        raise NotImplementedError(f"cpu needs head_dim to be at most {MAX_HEAD_DIM}, got {k.shape[2]}")
    cos, sin = rope or (jnp.zeros((k.shape[0], 0)), jnp.zeros((k.shape[0], 0)))
    leaves, structure = jax.tree.flatten((k_pages, v_pages))
    operands = (k, v, slot_mapping.astype(jnp.int32), cos, sin)
    call = jax.ffi.ffi_call(
        library.target("write_kv"),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves),
        input_output_aliases={len(operands) + i: i for i in range(len(leaves))},
        vmap_method="sequential",
    )
    return jax.tree.unflatten(structure, call(*operands, *leaves))
