"""Stored weights as exact 16-bit floating point numbers, in registers.

A lane has 3.1 operations for each 4-bit weight when memory delivers them at 4.8 TB/s (132 multiprocessors, 128 lanes,
1.75 GHz). `nibbles` takes 0.9: of every eight codes in a word a shift, two masks and four byte permutations; the
subtraction of the offset 0.5, and bringing the word into the layout of wgmma 0.4 (a shuffle, a permutation).
The compiler's own widening of bytes takes three permutations for each pair, hence the few lines of inline code; the
interpreter runs the same function as array operations.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.quantized_matmul.weights import PACK_BLOCK

CODE_OFFSET = 7  # 4-bit codes come out as code - 7
PLANE = PACK_BLOCK // 2
NIBBLES = 0x0F0F0F0F
SPREAD = 0x4140, 0x4342  # `prmt` of a word and a byte: bytes 0, 4, 1, 4 and 2, 4, 3, 4, where 4 is the byte


def units(
    chunk: jax.Array, bits: int, unit: int, dtype: Any, float8: bool, inline: bool
) -> Iterator[tuple[int, jax.Array]]:
    """Yields (first input, dtype[64, unit]) of the weights of a chunk, in the layout of a left operand of wgmma.

    Args:
        chunk: u8[64, bytes] as stored, in any layout that `WGMMA` can be made from.
        bits: 8 or 4.
        unit: inputs a piece: PLANE for 4 bits, any divisor of the chunk for 8.
        dtype: bfloat16 or float16.
        float8: whether bytes are float8_e4m3fn, else int8.
        inline: whether to use inline code for 4 bits (the interpreter can not).
    """
    chunk = plgpu.layout_cast(chunk, plgpu.Layout.WGMMA)
    if bits == 8:
        for start in range(0, chunk.shape[1], unit):
            values = lax.slice(chunk, (0, start), (64, start + unit))
            yield start, _float8(values, dtype) if float8 else _int8(values, dtype)
        return
    for block in range(chunk.shape[1] // PLANE):
        packed = lax.slice(chunk, (0, block * PLANE), (64, (block + 1) * PLANE))
        for plane in range(2):
            yield block * PACK_BLOCK + plane * PLANE, _code(packed, plane * 4, dtype, inline)


def _code(packed: jax.Array, shift: int, dtype: Any, inline: bool) -> jax.Array:
    """A code less CODE_OFFSET: written into the mantissa of a power of two whose last place is 1."""
    power = 128 if dtype == jnp.bfloat16 else 1024
    high = 0x43 if dtype == jnp.bfloat16 else 0x64
    words = _inline_nibbles(packed, shift, high) if inline else _nibbles(packed, shift, high)
    return _bits(words, dtype) - dtype.type(power + CODE_OFFSET)


def _nibbles(packed: jax.Array, shift: int, high: int) -> jax.Array:
    """u16 of u8: bits `shift` to `shift` + 3 below a byte `high`."""
    return ((packed.astype(jnp.uint16) >> jnp.uint16(shift)) & jnp.uint16(15)) | jnp.uint16(high << 8)


def _inline_nibbles(packed: jax.Array, shift: int, high: int) -> jax.Array:
    """`_nibbles` of neighbouring registers at once: they are the halves of the word that was loaded."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(packed.shape, jnp.dtype(jnp.uint16), layout=layout)
    )
    def nibbles(_: Any, packed: Any) -> Any:
        i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), i16)

        def constant(value: int) -> Any:
            return arith.constant(i32, ir.IntegerAttr.get(i32, value))

        registers = np.empty_like(packed.registers)
        for index in np.ndindex(*registers.shape):
            if index[1] % 2:  # columns of 8: the second of a pair
                continue
            other = (index[0], index[1] + 1, *index[2:])
            word = utils.bitcast(utils.vector_concat([packed.registers[index], packed.registers[other]]), i32)
            word = arith.andi(arith.shrui(word, constant(shift)), constant(NIBBLES))
            for target, permutation in zip((index, other), SPREAD, strict=True):
                both = utils.prmt(word, constant(high), constant(permutation))
                registers[target] = utils.bitcast(both, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=packed.layout, _is_signed=False)

    return nibbles(packed)  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


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
