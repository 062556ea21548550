"""Weight matrices in 4, 5, 6 and 8 bits in tiles that CPUs read in order, made on the host with numpy."""

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

    data: jax.Array
    scale: jax.Array
    offset: jax.Array | None = None
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
    scale, offset = (None if x is None else x.swapaxes(1, 2) for x in (weight.scale, weight.offset))
    return _values(codes, scale, offset, weight.bits).reshape(-1, K)[:N]


def take_rows(weight: CpuWeight, ids: Int[Array, " S"]) -> Float[Array, "S K"]:
    """Returns rows `ids` of the matrix in f32 and reads no others; an id outside of it gives the nearest row."""
    ids = jnp.clip(ids, 0, weight.num_rows - 1)
    tile, row = ids // ROWS, ids % ROWS
    codes = _unpack(weight.data[tile, :, :, row], weight.bits)
    scale, offset = (None if x is None else x[tile, :, row] for x in (weight.scale, weight.offset))
    return _values(codes, scale, offset, weight.bits)


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


def pack_cpu(codes: np.ndarray, scale: np.ndarray, offset: np.ndarray | None, bits: int) -> CpuWeight:
    """Returns the weight (numpy arrays) of which element [n, k] is `codes[n, k] * scale[n, g] + offset[n, g]`.

    Args:
        codes: u8[N, K] below 2**bits, or int8[N, K] for 8 bits.
        scale: f[N, K / group]; groups of 16, 32 or a multiple of 32. Rounded to f16.
        offset: f[N, K / group], or None: see `CpuWeight`. Rounded to f16.
        bits: 4, 5, 6 or 8.

    Raises:
        ValueError: shapes, types or bits that have no place in the layout.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got {bits}")
    wanted = np.int8 if bits == 8 else np.uint8
    if codes.ndim != 2 or codes.dtype != wanted:
        raise ValueError(f"codes of {bits} bits must be {np.dtype(wanted)}[N, K], got {codes.dtype}{codes.shape}")
    N, K = codes.shape
    if not K or K % INPUTS:
        raise ValueError(f"K={K} must be a multiple of {INPUTS}")
    if bits == 8 and offset is not None:
        raise ValueError("8 bits are signed and have no offset, got one")
    for name, array in (("scale", scale), ("offset", offset)):
        if array is None:
            continue
        groups = array.shape[-1] if array.ndim == 2 and array.shape[0] == N else 0
        if not groups or K % groups or (K // groups != 16 and K // groups % INPUTS):
            raise ValueError(f"{name} must be [N={N}, K={K} / group], group 16 or a multiple of 32, got {array.shape}")
    if offset is not None and offset.shape != scale.shape:
        raise ValueError(f"offset must have the shape of scale {scale.shape}, got {offset.shape}")
    scale, offset = (None if x is None else _expand(np.asarray(x), K) for x in (scale, offset))
    chunks = _tiles(codes, 4)  # [N / 8, K / 32, 8 chunks, 8 rows, 4]
    if bits == 8:
        return _weight(chunks, scale, offset, N)
    data = np.empty((*chunks.shape[:2], bits, ROWS, 4), np.uint8)
    np.bitwise_or(chunks[:, :, :4] & 15, chunks[:, :, 4:] << 4, out=data[:, :, :4])
    width = bits - 4
    for i in range(8 if width else 0):
        plane, place = divmod(i * width, 8)
        high = chunks[:, :, i] >> 4 << place
        data[:, :, 4 + plane] = high if not place else data[:, :, 4 + plane] | high
    return _weight(data, scale, offset, N)


def repack_gguf(blocks: np.ndarray, type_name: str) -> CpuWeight:
    """Returns the weight (numpy arrays) of which the rows are GGUF blocks.

    Exact for Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1. The scales of Q4_K, Q5_K and Q6_K, products of two numbers there, are
    rounded to f16.

    Args:
        blocks: u8[N, bytes of a row], as the file has them.
        type_name: of those above.

    Raises:
        ValueError: a type with no such weight, or bytes that are not whole blocks of it.
    """
    if type_name not in _GGUF:
        raise ValueError(f"CPU weights are made of {', '.join(_GGUF)}, not of {type_name}")
    unpack, num_bytes = _GGUF[type_name]
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or not blocks.shape[1] or blocks.shape[1] % num_bytes:
        raise ValueError(
            f"blocks of {type_name} must be uint8[N, a multiple of {num_bytes}], got {blocks.dtype}{blocks.shape}"
        )
    N = blocks.shape[0]
    step = max(ROWS, 2**18 // blocks.shape[1] // ROWS * ROWS)  # rows whose intermediate arrays stay in a cache
    parts = [unpack(blocks[i : i + step].reshape(min(step, N - i), -1, num_bytes)) for i in range(0, max(N, 1), step)]
    if len(parts) == 1:
        return parts[0]
    fields = zip(*((part.data, part.scale, part.offset) for part in parts))
    data, scale, offset = (None if field[0] is None else np.concatenate(field) for field in fields)
    return CpuWeight(data, scale, offset, N)


def quantize_cpu_weight(matrix: np.ndarray, bits: int = 8, group: int | None = None) -> CpuWeight:
    """Returns `matrix` rounded to nearest (numpy arrays): 8 bits symmetric, 4 bits with an offset.

    Args:
        matrix: f[N, K].
        bits: 8 or 4.
        group: inputs with one scale: 16, a multiple of 32, or None for all of them.

    Raises:
        ValueError: unknown bits, or K is not a multiple of the group and of 32.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 8 or 4, got {bits}")
    N, K = matrix.shape
    group = group or K
    if group < 1 or K % group:
        raise ValueError(f"K={K} must be a multiple of {group=}")
    groups = np.asarray(matrix, np.float32).reshape(N, K // group, group)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    if bits == 8:
        scale, offset = _half(np.maximum(-low, high) / 127), None
        codes = _round(groups, scale, np.zeros_like(scale), -127, 127).astype(np.int8)
    else:
        offset = _half(low)
        scale = _half((high - offset) / 15)
        codes = _round(groups, scale, offset, 0, 15).astype(np.uint8)
    return pack_cpu(codes.reshape(N, K), scale, offset, bits)


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def _round(groups: np.ndarray, scale: np.ndarray, offset: np.ndarray, low: int, high: int) -> np.ndarray:
    safe = np.where(scale == 0, 1, scale)[..., None]
    return np.clip(np.rint((groups - offset[..., None]) / safe), low, high)


def _weight(data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None, N: int) -> Any:
    """Packs scales f[N, K / group]."""
    scale, offset = (None if x is None else _tile_scales(x) for x in (scale, offset))
    return CpuWeight(data, scale, offset, N)


def _expand(scale: np.ndarray, K: int) -> np.ndarray:
    group = K // scale.shape[1]
    return np.repeat(scale, group // INPUTS, axis=1) if group > INPUTS else scale


def _pad(rows: np.ndarray) -> np.ndarray:
    missing = -rows.shape[0] % ROWS
    return np.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1))) if missing else rows


def _tiles(bytes_of_rows: np.ndarray, width: int) -> np.ndarray:
    """Interleaves rows in pieces of 4 bytes: [N, K / 32 * n] -> [N / 8, K / 32, n / 4, 8, 4], n the bytes of a tile."""
    N = bytes_of_rows.shape[0]
    words = np.ascontiguousarray(_pad(bytes_of_rows.reshape(N, -1))).view(np.uint32)
    words = words.reshape(words.shape[0] // ROWS, ROWS, -1, 2 * width)
    tiles = np.ascontiguousarray(words.transpose(0, 2, 3, 1))
    return tiles.view(bytes_of_rows.dtype).reshape(*tiles.shape, 4)


def _tile_scales(scale: np.ndarray) -> np.ndarray:
    padded = _pad(scale.astype(np.float16, copy=False))
    return np.ascontiguousarray(padded.reshape(-1, ROWS, padded.shape[1]).swapaxes(1, 2))


# Blocks of GGUF as [rows, blocks of a row, bytes] -> CpuWeight.


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _q8_0(blocks: np.ndarray) -> CpuWeight:
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return _weight(_tiles(codes, 4), _halves(blocks, 0), None, len(blocks))


def _q4_0(blocks: np.ndarray) -> CpuWeight:
    return _weight(_tiles(blocks[..., 2:], 2), _halves(blocks, 0), None, len(blocks))


def _q4_1(blocks: np.ndarray) -> CpuWeight:
    return _weight(_tiles(blocks[..., 4:], 2), _halves(blocks, 0), _halves(blocks, 2), len(blocks))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., n] -> [..., 2, n]: all low nibbles, then all high ones."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    codes = _nibbles(blocks[..., at + 4 :]).reshape(len(blocks), -1)
    high = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little").reshape(codes.shape)
    return codes | high << 4


def _q5_0(blocks: np.ndarray) -> CpuWeight:
    return pack_cpu(_fifth_bits(blocks, 2), _halves(blocks, 0), None, 5)


def _q5_1(blocks: np.ndarray) -> CpuWeight:
    return pack_cpu(_fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2), 5)


def _super_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of the 8 groups of a superblock: two f16, then 8 times two numbers of 6 bits in 12 bytes."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    steps = np.concatenate((first & 63, third & 15 | first >> 2 & 48), axis=-1)
    mins = np.concatenate((second & 63, third >> 4 | second >> 2 & 48), axis=-1)
    scale = _halves(blocks, 0).astype(np.float32)[..., None] * steps
    offset = _halves(blocks, 2).astype(np.float32)[..., None] * mins
    return scale.reshape(len(blocks), -1), -offset.reshape(len(blocks), -1)


def _q4_k(blocks: np.ndarray) -> CpuWeight:
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return pack_cpu(codes.reshape(len(blocks), -1), *_super_scales(blocks), 4)


def _q5_k(blocks: np.ndarray) -> CpuWeight:
    codes = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return pack_cpu((codes | high << 4).reshape(len(blocks), -1), *_super_scales(blocks), 5)


def _q6_k(blocks: np.ndarray) -> CpuWeight:
    codes = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    steps = blocks[..., 192:208].view(np.int8)
    scale = _halves(blocks, 208).astype(np.float32)[..., None] * steps
    return pack_cpu((codes | high << 4).reshape(len(blocks), -1), scale.reshape(len(blocks), -1), None, 6)


_GGUF = {  # type -> its weight, bytes of a block
    "Q8_0": (_q8_0, 34),
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
}
