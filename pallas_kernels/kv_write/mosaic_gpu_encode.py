"""How a row of keys or values is stored, and the register arithmetic that makes it so."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_write.tiles import REGISTER_ROWS
from pallas_kernels.pages import FLOAT8, FLOAT8_MAX, Pages, QuantizedPages

LINE = 128  # bytes: where a TMA copy may start in shared memory


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """The rows of one cache.

    Attributes:
        H: channels.
        dtype: of the new rows.
        stored_dtype: of the pages' data.
        bits: of a packed or quantized value; None if the pages are plain arrays.
        half: pairs that are rotated, 0 for none.
    """

    H: int
    dtype: Any
    stored_dtype: Any
    bits: int | None
    half: int

    @classmethod
    def of(cls, pages: Pages, new: jax.Array, half: int) -> "RowFormat":
        """Returns the format in which `pages` hold rows of `new`."""
        if isinstance(pages, QuantizedPages):
            return cls(new.shape[-1], new.dtype, pages.data.dtype, pages.bits, half)
        return cls(new.shape[-1], new.dtype, pages.dtype, None, half)

    @property
    def is_copy(self) -> bool:
        """Whether rows are stored as they come."""
        return self.bits is None and self.dtype == self.stored_dtype and not self.half

    @property
    def width(self) -> int:
        """Elements of a stored row."""
        return self.H * (self.bits or 8) // 8 if self.stored_dtype == jnp.uint8 else self.H

    @property
    def piece(self) -> int:
        """Channels worked on at once: a divisor of the rotated half, of the planes of packed bytes, of the pitch."""
        return math.gcd(self.width, self.pitch, self.half)

    @property
    def refusal(self) -> str | None:
        """Why the kernel cannot store such rows, if it cannot."""
        size = self.stored_dtype.itemsize
        if self.width * size % 16:
            return f"rows of {self.width * size} bytes; the copy engine moves multiples of 16"
        if self.is_copy:
            return None
        if self.piece % 8:
            return f"pieces of {self.piece} channels; registers hold multiples of 8"
        if not self.swizzle and not hasattr(plgpu, "store"):
            return f"pieces of {self.piece * size} bytes; jax before 0.12 cannot store them to shared memory"
        return None

    @property
    def swizzle(self) -> int:
        """Bytes of the shared-memory swizzle of stored rows; 0 stores them plainly, with bank conflicts."""
        size = self.stored_dtype.itemsize
        if self.is_copy or self.pitch * size > (512 if size == 4 else 256):
            return 0
        sizes = (128, 64) if size == 1 else (128,)
        return next((s for s in sizes if self.piece * size % s == 0), 0)

    @property
    def pitch(self) -> int:
        """Elements from one stored row to the next in shared memory: whole lines."""
        size = self.stored_dtype.itemsize
        return -(-self.width * size // LINE) * LINE // size

    @property
    def num_scales(self) -> int:
        """0, 1 (scale) or 2 (scale and zero point)."""
        return 0 if self.bits is None else 1 if self.bits == 8 else 2

    @property
    def num_bytes(self) -> int:
        """Shared memory of `scratch`, without its alignment."""
        x = 0 if self.is_copy else self.H * self.dtype.itemsize
        return REGISTER_ROWS * (x + self.pitch * self.stored_dtype.itemsize + 4 * self.num_scales)

    @property
    def is_loaded_by_row(self) -> bool:
        """Whether a row is loaded by itself, as the lines where it goes have room between them."""
        return self.is_copy and self.pitch != self.width

    def num_loads(self, rows: int) -> int:
        """Copies that load `rows` rows."""
        return rows if self.is_loaded_by_row else 1

    def scratch(self) -> dict[str, Any]:
        """Returns the shared memory of one tile: `x` as it came, `stored` and `scales` as they are to be written."""
        # One row is one tile high, so that a TMA copy can take any row; the swizzle, a function of the address, keeps
        # eight rows of registers free of bank conflicts when they are stored.
        transforms = ()
        if self.swizzle:
            tile = (1, self.swizzle // self.stored_dtype.itemsize)
            transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(self.swizzle))  # pyright: ignore[reportAbstractUsage]
        stored = plgpu.SMEM((REGISTER_ROWS, self.pitch), self.stored_dtype, transforms=transforms)
        scales = [plgpu.SMEM((REGISTER_ROWS,), jnp.float32) for _ in range(self.num_scales)]
        x = {} if self.is_copy else {"x": plgpu.SMEM((REGISTER_ROWS, self.H), self.dtype)}
        return {"stored": stored, "scales": scales, **x}


def encode_tile(f: RowFormat, case: dict[str, Any], tables: Any) -> None:
    """Rotates and quantizes the rows of `case["x"]` into `case["stored"]` and `case["scales"]`."""
    w = f.piece

    def load(ref: Any, i: int) -> jax.Array:
        x = plgpu.load(ref.at[:, pl.ds(i * w, w)], layout=plgpu.Layout.WGMMA, optimized=False)
        return x.astype(jnp.float32)

    pieces = [load(case["x"], i) for i in range(f.H // w)]
    for i in range(f.half // w):
        j = i + f.half // w
        cos, sin = (load(table, i) for table in tables)
        x1, x2 = pieces[i], pieces[j]
        # Rounded as the unfused rotation is, so that fusing changes nothing.
        pieces[i] = (x1 * cos - x2 * sin).astype(f.dtype).astype(jnp.float32)
        pieces[j] = (x2 * cos + x1 * sin).astype(f.dtype).astype(jnp.float32)
    stored = case["stored"]
    if f.bits is None:
        for i, x in enumerate(pieces):
            _store(f, stored, i, x)
    elif f.bits == 8:
        limit = FLOAT8_MAX if f.stored_dtype == FLOAT8 else 127.0
        highest = _reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1) for x in pieces])
        scale = jnp.maximum(highest, np.float32(1e-12)) / np.float32(limit)
        case["scales"][0][...] = scale
        for i, x in enumerate(pieces):
            x = x / _columns(scale, w)
            _store(f, stored, i, x if f.stored_dtype == FLOAT8 else jnp.round(x))
    else:
        _pack(f, case, pieces)


def _pack(f: RowFormat, case: dict[str, Any], pieces: list[jax.Array]) -> None:
    """Writes codes of 4 or 2 bits, plane by plane (see `packing.pack` with a block of one row)."""
    assert f.bits is not None
    w, top = f.piece, float(2**f.bits - 1)
    low = _reduce(jnp.minimum, [jnp.min(x, axis=1) for x in pieces])
    high = _reduce(jnp.maximum, [jnp.max(x, axis=1) for x in pieces])
    scale = jnp.maximum(high - low, np.float32(1e-12)) / np.float32(top)
    zero = -low / scale
    case["scales"][0][...] = scale
    case["scales"][1][...] = zero
    columns = f.width // w
    for i in range(columns):
        packed = None
        for plane in range(8 // f.bits):
            x = pieces[plane * columns + i]
            code = jnp.round(x / _columns(scale, w) + _columns(zero, w))
            code = jnp.minimum(jnp.maximum(code, np.float32(0)), np.float32(top)).astype(jnp.int32)
            code = code * np.int32(1 << (plane * f.bits))
            packed = code if packed is None else packed | code
        _store(f, case["stored"], i, packed)


def _store(f: RowFormat, ref: Any, i: int, x: jax.Array | None) -> None:
    assert x is not None
    target = ref.at[:, pl.ds(i * f.piece, f.piece)]
    if f.swizzle:
        target[...] = x.astype(f.stored_dtype)
    else:
        plgpu.store(target, x.astype(f.stored_dtype), optimized=False)


def _columns(x: jax.Array, w: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (x.shape[0], w), [0])


def _reduce(function: Any, values: list[jax.Array]) -> jax.Array:
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result
