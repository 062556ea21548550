"""Makes weights for CPUs of the blocks of GGUF files, on the host: in C++ where it pays, else with NumPy."""

import numpy as np

from pallas_kernels.cpu import Library
from pallas_kernels.quantized_matmul import cpu_repack
from pallas_kernels.quantized_matmul.cpu_packing import interleave, pack_cpu, weight_of
from pallas_kernels.quantized_matmul.cpu_weights import ROWS, CpuWeight


def repack_gguf(blocks: np.ndarray, type_name: str, library: Library | None = None) -> CpuWeight:
    """Returns the weight (numpy arrays) of which the rows are GGUF blocks.

    Exact for Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1. The scales of Q4_K, Q5_K and Q6_K, products of two numbers there, are
    rounded to f16.

    Args:
        blocks: u8[N, bytes of a row], as the file has them.
        type_name: of those above.
        library: makes the same of Q8_0, Q4_0 and Q4_1 in a fraction of the time.

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
    if library is not None and type_name in cpu_repack.TYPES:
        return cpu_repack.repack_in_cpp(library, blocks, type_name)
    N = blocks.shape[0]
    step = max(ROWS, 2**18 // blocks.shape[1] // ROWS * ROWS)  # rows whose intermediate arrays stay in a cache
    parts = [unpack(blocks[i : i + step].reshape(min(step, N - i), -1, num_bytes)) for i in range(0, max(N, 1), step)]
    if len(parts) == 1:
        return parts[0]
    fields = zip(*((part.data, part.scale, part.offset) for part in parts))
    data, scale, offset = (None if field[0] is None else np.concatenate(field) for field in fields)
    return CpuWeight(data, scale, offset, N)


# Blocks of GGUF as [rows, blocks of a row, bytes] -> CpuWeight.


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _q8_0(blocks: np.ndarray) -> CpuWeight:
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return weight_of(interleave(codes, 4), _halves(blocks, 0), None, len(blocks))


def _q4_0(blocks: np.ndarray) -> CpuWeight:
    return weight_of(interleave(blocks[..., 2:], 2), _halves(blocks, 0), None, len(blocks))


def _q4_1(blocks: np.ndarray) -> CpuWeight:
    return weight_of(interleave(blocks[..., 4:], 2), _halves(blocks, 0), _halves(blocks, 2), len(blocks))


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
