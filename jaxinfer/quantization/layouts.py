"""The two layouts of packed matrices and what makes them on the host."""

import enum
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import cpu_library, require_cpu
from pallas_kernels.packing import pack
from pallas_kernels.quantized_matmul import CpuWeight, QuantizedWeight, quantize_cpu_weight, repack_gguf, unpack_codes
from pallas_kernels.quantized_matmul.weights import PACK_BLOCK
from pallas_kernels.target import current_target

KEPT_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""GGUF types whose codes are kept as they are."""


class Layout(enum.Enum):
    """Where a packed matrix is multiplied; the value is what its inputs must be a multiple of."""

    CPU = 32  # CpuWeight, by the C++ kernels
    PLANES = 64  # QuantizedWeight, by all others

    @property
    def inputs(self) -> int:
        """What the number of inputs must be a multiple of."""
        return self.value


def current_layout() -> Layout:
    """Returns the layout for the default device; compiles the C++ kernels if that is a CPU."""
    return Layout.CPU if has_cpu_kernels() else Layout.PLANES


def packing_pays() -> bool:
    """Whether products with packed weights are at least as fast here as with expanded ones."""
    return current_target().platform != "cpu" or has_cpu_kernels()


def has_cpu_kernels() -> bool:
    """Whether the default device is a CPU for which the C++ kernels can be built."""
    try:
        require_cpu()
    except NotImplementedError:
        return False
    return True


def pack_gguf(rows: np.ndarray, *, stored: str, layout: Layout) -> CpuWeight | QuantizedWeight:
    """Returns the matrix of a GGUF tensor's rows, u8[N, bytes a row], of one of `KEPT_TYPES`."""
    return _in_layout(repack_gguf(rows, stored, cpu_library() if layout is Layout.CPU else None), layout)


def pack_matrix(matrix: np.ndarray, *, bits: int, group: int | None, layout: Layout) -> CpuWeight | QuantizedWeight:
    """Returns f[N, K] rounded to nearest: see `quantize_cpu_weight`."""
    return _in_layout(quantize_cpu_weight(matrix, bits, group), layout)


def _in_layout(weight: CpuWeight, layout: Layout) -> Any:
    return weight if layout is Layout.CPU else planes(weight)


def planes(weight: CpuWeight) -> QuantizedWeight:
    """Returns the same matrix for GPU, TPU and XLA, host arrays: 4 bits stay so, 5 and 6 become 8."""
    codes = np.array(unpack_codes(weight))
    N = len(codes)
    scale, offset = (_by_row(part, N) for part in (weight.scale, weight.offset))
    zero = None
    if offset is None and weight.bits < 8:
        zero = np.full_like(scale, 2.0 ** (weight.bits - 1))
    elif offset is not None:
        flat = scale == 0  # all values are the offset: (0 - zero) * 1
        codes.reshape(N, -1, weight.group)[flat] = 0
        scale = np.where(flat, np.float32(1), scale)
        zero = -offset / scale
    if weight.bits == 4:
        parts = np.asarray(pack(jnp.asarray(codes), 4, PACK_BLOCK)), scale, zero
    else:
        parts = codes.astype(np.int8), scale, zero
    data, scale, zero = cast(Any, parts)  # host arrays until they are placed
    return QuantizedWeight(data, scale, zero, 4 if weight.bits == 4 else 8, weight.group)


def _by_row(part: Any, N: int) -> Any:
    """[N / 8, groups, 8] -> f32[N, groups]."""
    if part is None:
        return None
    part = np.asarray(part, np.float32)
    return np.ascontiguousarray(part.swapaxes(1, 2).reshape(-1, part.shape[1])[:N])
