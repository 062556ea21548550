"""GGUF blocks to weights by the C++ library (`cpu_repack.cc`): ten times as fast as NumPy, outside Python's lock."""

import ctypes
import math
from typing import Any

import numpy as np

from pallas_kernels.cpu import Library
from pallas_kernels.quantized_matmul.cpu_weights import ROWS, CpuWeight

ALIGNMENT = 64  # bytes at which XLA on CPU takes a host array without copying it

TYPES = {"Q8_0": (8, False), "Q4_0": (4, False), "Q4_1": (4, True)}  # bits, whether there are offsets


def repack_in_cpp(library: Library, blocks: np.ndarray, type_name: str) -> CpuWeight:
    """Returns what `repack_gguf` makes of the same blocks u8[N, bytes of a row], of one of `TYPES`."""
    bits, has_offset = TYPES[type_name]
    blocks = np.ascontiguousarray(blocks)
    rows = len(blocks)
    tiles, row_blocks = -(-rows // ROWS), blocks.shape[1] // (4 * bits + 2 + 2 * has_offset)
    data = _aligned_empty((tiles, row_blocks, bits, ROWS, 4), np.int8 if bits == 8 else np.uint8)
    scale = _aligned_empty((tiles, row_blocks, ROWS), np.float16)
    offset = _aligned_empty(scale.shape, np.float16) if has_offset else None
    repack = library.function("repack_blocks")
    repack.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3]
    repack.restype = None
    repack(
        blocks.ctypes.data, rows, row_blocks, bits, *(x if x is None else x.ctypes.data for x in (data, scale, offset))
    )
    return CpuWeight(data, scale, offset, rows)


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
