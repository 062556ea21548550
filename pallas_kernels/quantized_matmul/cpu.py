"""The quantized matmul as a C++ kernel on a CPU, and the same product in jnp."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.cpu import Library, require_cpu
from pallas_kernels.quantized_matmul.cpu_weights import BITS, INPUTS, ROWS, CpuWeight, dequantize_cpu_weight

CPU_ACTIVATIONS = ("int16", "int8")
_BITS = {None: 32, "int16": 16, "int8": 8}
_TYPES = (jnp.float32, jnp.bfloat16)


def quantized_matmul_cpu(
    x: Float[Array, "M K"],
    *weights: CpuWeight,
    activations: str | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
    library: Library | None = None,
) -> tuple[jax.Array, ...]:
    """Returns `x @ dequantize_cpu_weight(weight).T`, f[M, N] of each weight, summed in f32, on the CPU's vector units.

    Weights of one format take one call, in which x is rounded once and threads meet once.

    Args:
        x: f32 or bf16.
        *weights: matrices f[N, K].
        activations: None for products of `x` as it is; "int16" and "int8" round it as `round_activations` does.
        out_dtype: f32 or bf16.
        library: the compiled kernels, by default those for the best instructions of this machine.

    Raises:
        NotImplementedError: not a CPU, no compiler, or other types.
    """
    library = library or require_cpu()
    for name, dtype in (("x", x.dtype), ("out_dtype", jnp.dtype(out_dtype))):
        if dtype not in _TYPES:
            raise NotImplementedError(f"cpu needs {name} in f32 or bf16, got {dtype}")
    if len({(weight.bits, weight.group, weight.offset is None) for weight in weights}) > 1:
        options = {"activations": activations, "out_dtype": out_dtype, "library": library}
        return tuple(quantized_matmul_cpu(x, weight, **options)[0] for weight in weights)
    operands = []
    for weight in weights:
        check_cpu_weight(weight)
        offset = jnp.zeros((0,), jnp.float16) if weight.offset is None else weight.offset
        operands += [weight.data, weight.scale, offset]
    bits, group = weights[0].bits, weights[0].group
    if activations is not None and group < INPUTS and bits != 6:
        raise NotImplementedError(f"cpu multiplies integers by groups of {group} for 6 bits only, not {bits}")
    shapes = tuple(jax.ShapeDtypeStruct((x.shape[0], weight.num_rows), out_dtype) for weight in weights)
    call = jax.ffi.ffi_call(library.target("quantized_matmul"), shapes, vmap_method="sequential")
    return tuple(call(x, *operands, activation_bits=np.int32(_BITS[activations])))


def quantized_matmul_jnp(
    x: Float[Array, "M K"], *weights: CpuWeight, activations: str | None, out_dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, ...]:
    """Returns the products of the dequantized matrices in f32: what the kernel has to compute; arguments as there."""
    values = x.astype(jnp.float32) if activations is None else round_activations(x, activations)
    one = values.shape[0] == 1  # XLA is slow at one row alone
    values = jnp.pad(values, ((0, 1), (0, 0))) if one else values
    contract_inputs = (((1,), (1,)), ((), ()))

    def product(weight: CpuWeight) -> jax.Array:
        matrix = dequantize_cpu_weight(weight)
        result = lax.dot_general(values, matrix, contract_inputs, precision=lax.Precision.HIGHEST)
        return (result[:1] if one else result).astype(out_dtype)

    return tuple(product(weight) for weight in weights)


def round_activations(x: Float[Array, "M K"], kind: str) -> Float[Array, "M K"]:
    """Returns f32 values of integer codes, one scale a row and 32 inputs.

    The largest magnitude becomes the largest code, 32767 ("int16") or 127 ("int8"). Rounding is to nearest, ties to
    even. A NaN or an infinity makes its block, hence its row of a product, NaN.
    """
    most = np.float32(jnp.iinfo(kind).max)
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, INPUTS)
    size = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), 1e-30)
    return (jnp.round(blocks * (most / size)) * (size * (1 / most))).reshape(x.shape)


def check_cpu_weight(weight: CpuWeight) -> None:
    """Checks the shapes and types of a weight.

    Raises:
        ValueError: they are not those of `CpuWeight`.
    """
    data, scale, N = weight.data, weight.scale, weight.num_rows
    if data.ndim != 5 or data.shape[2] not in BITS or data.shape[3:] != (ROWS, 4):
        raise ValueError(f"weight.data must be [N / 8, K / 32, bits of {BITS}, 8, 4], got {data.shape}; see pack_cpu")
    wanted = jnp.int8 if data.shape[2] == 8 else jnp.uint8
    if data.dtype != wanted:
        raise ValueError(f"weight.data of {data.shape[2]} bits must be {jnp.dtype(wanted)}, got {data.dtype}")
    rows, tiles = data.shape[:2]
    if rows != -(-N // ROWS):
        raise ValueError(f"weight.num_rows={N} does not fit weight.data with {rows} tiles of {ROWS} rows")
    if not tiles:
        raise ValueError("weight has no inputs: K = 0")
    for name, array in (("scale", scale), ("offset", weight.offset)):
        if array is None:
            continue
        if array.shape not in [(rows, tiles * n, ROWS) for n in (1, 2)] or array.dtype != jnp.float16:
            shape = f"{rows}, {tiles} or {2 * tiles}, {ROWS}"
            raise ValueError(f"weight.{name} must be f16[{shape}], got {array.dtype}{array.shape}")
    if weight.offset is not None and (weight.offset.shape != scale.shape or data.shape[2] == 8):
        raise ValueError("weight.offset must have the shape of weight.scale, and be None for 8 bits")
