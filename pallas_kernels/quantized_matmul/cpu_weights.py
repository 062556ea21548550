"""Weight matrices in 4, 5, 6 and 8 bits in tiles that CPUs read in order; `cpu_packing` makes them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

ROWS = 8  # rows of a tile: the f32 lanes of a vector register
INPUTS = 32  # inputs of a tile: a block of GGUF
BITS = (4, 5, 6, 8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CpuWeight:
    """A matrix f[N, K] (outputs, inputs), stored as `scale * code + offset` in tiles of 8 rows x 32 inputs.

    A tile is `bits` planes of 32 bytes; byte (r, j) of a plane belongs to row r. Chunk c is the inputs 4c .. 4c+3.

    8 bits: plane c is the signed codes of chunk c, input 4c + j in byte j. Below 8 bits the codes are unsigned and
    planes 0..3 hold their low 4 bits: plane c has chunk c in its low nibbles, chunk c + 4 in the high ones. Plane 4 of
    5 bits has bit 4 of chunk i in bit i; planes 4 and 5 of 6 bits have bits 4 and 5 of chunks 0..3 and of chunks 4..7,
    those of chunk i in the bits 2 (i mod 4) and the next.

    The rows are padded to a multiple of 8 with scales and offsets of 0.

    Attributes:
        data: u8[N / 8, K / 32, bits, 8, 4], int8 for 8 bits.
        scale: f16[N / 8, K / group, 8], group 32 or 16.
        offset: f16[N / 8, K / group, 8]; None for `-scale * 2**(bits - 1)`, and 0 for 8 bits, which are signed.
        num_rows: N.
    """

    data: Any  # a jax.Array, or NumPy's on the host
    scale: Any
    offset: Any = None
    num_rows: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.data.shape[-3]

    @property
    def group(self) -> int:
        """Inputs with one scale."""
        return self.shape[1] // self.scale.shape[-2]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.num_rows, self.data.shape[-4] * INPUTS


def unpack_codes(weight: CpuWeight) -> Integer[Array, "N K"]:
    """Returns the codes, u8 below 8 bits and int8 for 8."""
    codes = _unpack(jnp.transpose(weight.data, (0, 3, 1, 2, 4)), weight.bits)
    return codes.reshape(-1, weight.shape[1])[: weight.num_rows]


def dequantize_cpu_weight(weight: CpuWeight) -> Float[Array, "N K"]:
    """Returns the matrix in f32."""
    N, K = weight.shape
    codes = _unpack(jnp.transpose(weight.data, (0, 3, 1, 2, 4)), weight.bits)  # [N / 8, 8, K]
    offset = None if weight.offset is None else weight.offset.swapaxes(1, 2)
    return _values(codes, weight.scale.swapaxes(1, 2), offset, weight.bits).reshape(-1, K)[:N]


def take_rows(weight: CpuWeight, ids: Int[Array, " S"]) -> Float[Array, "S K"]:
    """Returns rows `ids` of the matrix in f32 and reads no others; an id outside of it gives the nearest row."""
    ids = jnp.clip(ids, 0, weight.num_rows - 1)
    tile, row = ids // ROWS, ids % ROWS
    codes = _unpack(weight.data[tile, :, :, row], weight.bits)
    offset = None if weight.offset is None else weight.offset[tile, :, row]
    return _values(codes, weight.scale[tile, :, row], offset, weight.bits)


def _unpack(data: jax.Array, bits: int) -> jax.Array:
    """Returns the codes [..., K] of rows' planes [..., K / 32, bits, 4]."""
    if bits < 8:
        low = data[..., :4, :]
        codes = jnp.concatenate((low & 15, low >> 4), axis=-2)
        width = bits - 4
        if width:
            shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
            high = (data[..., 4:, None, :] >> shifts.reshape((1,) * (data.ndim - 1) + shifts.shape)) & (2**width - 1)
            codes = codes | (high.reshape(codes.shape) << 4)
        data = codes
    return data.reshape(*data.shape[:-3], -1)


def _values(codes: jax.Array, scale: jax.Array, offset: jax.Array | None, bits: int) -> jax.Array:
    if offset is None and bits < 8:
        codes = codes.astype(jnp.int8) - 2 ** (bits - 1)
    groups = codes.astype(jnp.float32).reshape(*scale.shape, -1) * scale.astype(jnp.float32)[..., None]
    if offset is not None:
        groups = groups + offset.astype(jnp.float32)[..., None]
    return groups.reshape(codes.shape)
