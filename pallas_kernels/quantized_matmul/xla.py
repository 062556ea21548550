"""The quantized matmul in the form that XLA compiles best on each platform."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8

from pallas_kernels.packing import unpack
from pallas_kernels.quantized_matmul.weights import PACK_BLOCK, QuantizedWeight, dequantize_weight
from pallas_kernels.target import current_target

_INPUTS = (((1,), (1,)), ((), ()))  # dot_general over the inputs of x[M, K] and w[N, K]
_NUM_DIGITS = 3  # of 8 bits, less sign: 23 bits below a row's largest magnitude, the precision of f32
_MAX_INPUTS = 2**31 // 127**2  # products of two int8 that a sum in 32 bits surely holds
_DIGIT_ROWS = 64  # rows up to which digits beat a converted weight (measured on a CPU with AMX)
_LOOP_ROWS = 4  # rows up to which a loop over packed groups beats an unpacked weight (as above)


def quantized_matmul_xla(
    x: Float[Array, "M K"],
    weight: QuantizedWeight,
    *,
    x_scale: Float[Array, " M"] | None,
    out_dtype: jax.typing.DTypeLike,
) -> Float[Array, "M N"]:
    """Returns the product as the reference does; arguments as there. Weights are never expanded to f32 where avoidable.

    GPU and TPU: with one scale an output, the codes go into the dot as they are (converted to the type of `x`, which
    both compilers fuse into the GEMM; integers by integers on the int8 units) and the scale multiplies its result, so
    the codes' rounding is the only one. Grouped scales multiply the weight, which is rounded to the type of `x`: XLA
    fuses that for one row and stores the matrix in 16 bits for more; the Pallas kernels do not.

    CPU: XLA converts a whole weight to floats before a dot, up to 20 times the work of a decode step. Few rows are
    therefore split into three signed 8-bit digits, base 254, which multiply the integer codes exactly; their sum has
    the precision of f32 relative to the row's largest magnitude. One scale an output: an int8 dot (VNNI, AMX); grouped
    or packed codes: a loop that unpacks as it multiplies. More rows take the converted weight, never as one row alone.

    Differentiable through `quantized_matmul` only: rounding to digits has no useful derivative of its own.
    """
    rows = _on_cpu if current_target().platform == "cpu" else _fused
    product = rows(x, weight, out_dtype)
    if x_scale is not None:
        product = product * x_scale[:, None]
    return product.astype(out_dtype)


def _fused(x: jax.Array, weight: QuantizedWeight, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the product in f32 for x of M rows, with the weight expanded at most to the type of the product."""
    floats = jnp.result_type(out_dtype) if x.dtype.itemsize == 1 else x.dtype
    if weight.group < weight.shape[1]:
        return _dot(x.astype(floats), dequantize_weight(weight).astype(floats))
    codes = unpack(weight.data, 4, PACK_BLOCK).astype(jnp.int8) if weight.bits == 4 else weight.data
    exact = x.dtype == codes.dtype and (x.dtype != jnp.int8 or x.shape[1] <= _MAX_INPUTS)
    product = (_dot(x, codes) if exact else _dot(x.astype(floats), codes.astype(floats))).astype(jnp.float32)
    if weight.zero is not None:
        product = product - jnp.sum(x.astype(jnp.float32), axis=1)[:, None] * weight.zero[None, :, 0]
    return product * weight.scale[None, :, 0]


def _on_cpu(x: jax.Array, weight: QuantizedWeight, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    M, K = x.shape
    integers = weight.data.dtype != jnp.float8_e4m3fn and K <= _MAX_INPUTS
    one_dot = weight.bits == 8 and weight.group == K and weight.zero is None
    if integers and one_dot and x.dtype == jnp.int8:
        return _rows(x, weight.data).astype(jnp.float32) * weight.scale[None, :, 0]
    most = _DIGIT_ROWS if one_dot else _LOOP_ROWS if _loops(weight) else 0
    if integers and most >= M:
        digits, place = (x, None) if x.dtype == jnp.int8 else _digits(x)
        if one_dot:
            product = _rows(digits, weight.data).astype(jnp.float32) * weight.scale[None, :, 0]
        else:
            product = _loop(digits, weight)
        return product if place is None else jnp.sum(product.reshape(-1, M, product.shape[1]) * place, axis=0)
    x = x if x.dtype.itemsize > 1 else x.astype(jnp.float32)
    return _rows(x, dequantize_weight(weight).astype(x.dtype))


def _digits(x: Float[Array, "M K"]) -> tuple[Int8[Array, "R K"], Float[Array, "D M 1"]]:
    """Returns D digits of a row, digit-major (R = D * M), and what a one in each stands for: x = sum(digit * value)."""
    values = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(values), axis=1, keepdims=True), 1e-30) / 127.0
    rest, digits = values / scale, []
    for _ in range(_NUM_DIGITS):
        digit = jnp.round(rest)
        digits.append(digit.astype(jnp.int8))
        rest = (rest - digit) * 254.0
    place = jnp.asarray([254.0**-i for i in range(_NUM_DIGITS)], jnp.float32)
    return jnp.concatenate(digits), place[:, None, None] * scale[None]


def _loop(digits: Int8[Array, "R K"], weight: QuantizedWeight) -> Float[Array, "R N"]:
    """Returns the product of integers, one group at a time, so written that the CPU never stores unpacked codes."""
    N, K = weight.shape
    R, group, half = digits.shape[0], weight.group, PACK_BLOCK // 2
    if weight.bits == 8:
        run = math.gcd(group, half)
        x = digits.reshape(R, 1, K // run, run).astype(jnp.int32)
        products = weight.data.reshape(1, N, K // run, run).astype(jnp.int32) * x
    else:
        x = digits.reshape(R, 1, K // PACK_BLOCK, 2, half).astype(jnp.int32)
        packed = weight.data.reshape(1, N, K // PACK_BLOCK, half)
        low, high = (packed & jnp.uint8(15)).astype(jnp.int32), (packed >> jnp.uint8(4)).astype(jnp.int32)
        products = low * x[..., 0, :], high * x[..., 1, :]
        products = jnp.stack(products, axis=-2) if group < PACK_BLOCK else products[0] + products[1]
    # Runs of 32 and then their sums: XLA:CPU stores the products of a longer run before it adds them.
    sums = jnp.sum(products.reshape(R, N, K // group, -1, min(half, products.shape[-1], group)), axis=(-2, -1))
    sums = sums.astype(jnp.float32)
    if weight.zero is not None:
        ones = jnp.sum(digits.reshape(R, 1, K // group, group).astype(jnp.int32), axis=-1).astype(jnp.float32)
        sums = sums - weight.zero[None] * ones
    return jnp.sum(sums * weight.scale[None], axis=-1)


def _loops(weight: QuantizedWeight) -> bool:
    """Whether `_loop` takes the group: in 4 bits it must not cut through a plane of PACK_BLOCK."""
    return weight.bits == 8 or weight.group % PACK_BLOCK == 0 or PACK_BLOCK // 2 % weight.group == 0


def _rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x @ w.T with one row padded to two: XLA:CPU upcasts the whole weight for one row alone."""
    return _dot(jnp.pad(x, ((0, 1), (0, 0))), w)[:1] if x.shape[0] == 1 else _dot(x, w)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    accumulator = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, w, _INPUTS, precision=precision, preferred_element_type=accumulator)
