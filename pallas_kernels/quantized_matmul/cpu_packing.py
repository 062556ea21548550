"""Makes weights for CPUs on the host, with NumPy: from codes and scales, and by rounding."""

from typing import Any

import numpy as np

from pallas_kernels.quantized_matmul.cpu_weights import BITS, INPUTS, ROWS, CpuWeight


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
    scale = _expand(np.asarray(scale), K)
    offset = None if offset is None else _expand(np.asarray(offset), K)
    chunks = interleave(codes, 4)  # [N / 8, K / 32, 8 chunks, 8 rows, 4]
    if bits == 8:
        return weight_of(chunks, scale, offset, N)
    data = np.empty((*chunks.shape[:2], bits, ROWS, 4), np.uint8)
    np.bitwise_or(chunks[:, :, :4] & 15, chunks[:, :, 4:] << 4, out=data[:, :, :4])
    width = bits - 4
    for i in range(8 if width else 0):
        plane, place = divmod(i * width, 8)
        high = chunks[:, :, i] >> 4 << place
        data[:, :, 4 + plane] = high if not place else data[:, :, 4 + plane] | high
    return weight_of(data, scale, offset, N)


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
    size: int = group or K
    if size < 1 or K % size:
        raise ValueError(f"K={K} must be a multiple of {group=}")
    groups = np.asarray(matrix, np.float32).reshape(N, K // size, size)
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


def weight_of(data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None, N: int) -> Any:
    """Packs scales f[N, K / group]."""
    return CpuWeight(data, _tile_scales(scale), None if offset is None else _tile_scales(offset), N)


def _expand(scale: np.ndarray, K: int) -> np.ndarray:
    group = K // scale.shape[1]
    return np.repeat(scale, group // INPUTS, axis=1) if group > INPUTS else scale


def _pad(rows: np.ndarray) -> np.ndarray:
    missing = -rows.shape[0] % ROWS
    return np.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1))) if missing else rows


def interleave(bytes_of_rows: np.ndarray, width: int) -> np.ndarray:
    """Interleaves rows in pieces of 4 bytes: [N, K / 32 * n] -> [N / 8, K / 32, n / 4, 8, 4], n the bytes of a tile."""
    N = bytes_of_rows.shape[0]
    words = np.ascontiguousarray(_pad(bytes_of_rows.reshape(N, -1))).view(np.uint32)
    words = words.reshape(words.shape[0] // ROWS, ROWS, -1, 2 * width)
    tiles = np.ascontiguousarray(words.transpose(0, 2, 3, 1))
    return tiles.view(bytes_of_rows.dtype).reshape(*tiles.shape, 4)


def _tile_scales(scale: np.ndarray) -> np.ndarray:
    padded = _pad(scale.astype(np.float16, copy=False))
    return np.ascontiguousarray(padded.reshape(-1, ROWS, padded.shape[1]).swapaxes(1, 2))
