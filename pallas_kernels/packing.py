"""Several small unsigned integers in one byte, in planes.

Of every `block` consecutive values, byte j holds value j in its lowest bits, value j + block * bits / 8 in the next,
and so on: unpacking gives whole runs of neighbours (planes) by one shift and one mask, with no interleaving, on
every machine. GGUF's Q4_0 is the same with blocks of 32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8


def pack(values: Int[Array, "... n"], bits: int, block: int) -> UInt8[Array, "... m"]:
    """Returns u8[..., n * bits / 8] of values in [0, 2**bits); `bits` is 2, 4 or 8 and n a multiple of `block`."""
    count = _planes(bits, block, values.shape[-1])
    planes = values.reshape(*values.shape[:-1], -1, count, block // count).astype(jnp.uint8)
    packed = planes[..., 0, :]
    for i in range(1, count):
        packed = packed | (planes[..., i, :] << jnp.uint8(i * bits))
    return packed.reshape(*values.shape[:-1], -1)


def unpack(packed: UInt8[Array, "... m"], bits: int, block: int) -> UInt8[Array, "... n"]:
    """Returns what `pack` was given, as u8[..., m * 8 / bits]."""
    count = _planes(bits, block, packed.shape[-1] * 8 // bits)
    blocks = packed.reshape(*packed.shape[:-1], -1, 1, block // count)
    shifts = (jnp.arange(count, dtype=jnp.uint8) * jnp.uint8(bits))[:, None]
    shifts = jnp.broadcast_to(shifts, (*(1,) * (blocks.ndim - 2), count, 1))
    values = jax.lax.shift_right_logical(*jnp.broadcast_arrays(blocks, shifts)) & jnp.uint8(2**bits - 1)
    return values.reshape(*packed.shape[:-1], -1)


def _planes(bits: int, block: int, length: int) -> int:
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8, got {bits}")
    count = 8 // bits
    if block % count or length % block:
        raise ValueError(f"{length} values can not be packed in blocks of {block} with {count} values a byte")
    return count
