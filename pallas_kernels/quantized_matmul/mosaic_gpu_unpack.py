"""Stored weights as exact 16-bit floating point numbers, in registers."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul.weights import PACK_BLOCK

CODE_OFFSET = 7  # 4-bit codes come out as code - 7
PLANE = PACK_BLOCK // 2


def units(chunk: jax.Array, bits: int, unit: int, dtype: Any, float8: bool) -> Iterator[tuple[int, jax.Array]]:
    """Yields (first input, dtype[64, unit]) of the weights of a chunk, in the layout of a left operand of wgmma.

    Args:
        chunk: u8[64, bytes] as stored, in any layout that `WGMMA` can be made from.
        bits: 8 or 4.
        unit: inputs a piece: PLANE for 4 bits, any divisor of the chunk for 8.
        dtype: bfloat16 or float16.
        float8: whether bytes are float8_e4m3fn, else int8.
    """
    chunk = plgpu.layout_cast(chunk, plgpu.Layout.WGMMA)
    if bits == 8:
        for start in range(0, chunk.shape[1], unit):
            values = lax.slice(chunk, (0, start), (64, start + unit))
            yield start, _float8(values, dtype) if float8 else _int8(values, dtype)
        return
    for block in range(chunk.shape[1] // PLANE):
        packed = lax.slice(chunk, (0, block * PLANE), (64, (block + 1) * PLANE)).astype(jnp.uint16)
        yield block * PACK_BLOCK, _low(packed, dtype)
        yield block * PACK_BLOCK + PLANE, _high(packed, dtype)


def _low(packed: jax.Array, dtype: Any) -> jax.Array:
    """Bits 0-3 less CODE_OFFSET: written into the mantissa of a power of two whose last place is 1."""
    one = 0x4300 if dtype == jnp.bfloat16 else 0x6400  # 128 or 1024
    return _bits((packed & jnp.uint16(15)) | jnp.uint16(one), dtype) - dtype.type(
        (128 if dtype == jnp.bfloat16 else 1024) + CODE_OFFSET
    )


def _high(packed: jax.Array, dtype: Any) -> jax.Array:
    """Bits 4-7 less CODE_OFFSET, without a shift (16-bit shifts are not packed in pairs).

    float16 has room for the four bits, as 1024 + 16 * code. bfloat16 has seven bits of mantissa, so that bit 7 is the
    last of the exponent: of 8, whose last mantissa place is 1/16. Bits 4-6, flipped and negated, give
    -(8 + 7 - code % 8), bit 7 doubles another 8; their sum is code - 7.
    """
    if dtype == jnp.float16:
        return _bits((packed & jnp.uint16(0xF0)) | jnp.uint16(0x6400), dtype) * dtype.type(1 / 16) - dtype.type(
            64 + CODE_OFFSET
        )
    lower = _bits((packed & jnp.uint16(0x70)) ^ jnp.uint16(0xC170), dtype)
    return lower + _bits((packed & jnp.uint16(0x80)) | jnp.uint16(0x4100), dtype)


def _int8(values: jax.Array, dtype: Any) -> jax.Array:
    """Signed bytes; float16, for which there is no fast conversion, by the mantissa of 1024 again."""
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(values, jnp.int8).astype(dtype)
    biased = (values ^ jnp.uint8(0x80)).astype(jnp.uint16)
    return _bits(biased | jnp.uint16(0x6400), dtype) - dtype.type(1024 + 128)


def _float8(values: jax.Array, dtype: Any) -> jax.Array:
    """e4m3 bytes: Hopper converts them to float16 only."""
    half = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float16)
    return half if dtype == jnp.float16 else half.astype(jnp.float32).astype(dtype)


def _bits(values: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(values, dtype)
