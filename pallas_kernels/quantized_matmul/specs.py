"""Cases of the quantized matmul at the matrices of Llama 3 8B; those named cpu have the layout for CPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.pages import FLOAT8
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.cpu_weights import INPUTS, ROWS, CpuWeight
from pallas_kernels.quantized_matmul.weights import QuantizedWeight
from pallas_kernels.specs import KernelSpec

_MATRICES = {"up": (14336, 4096), "down": (4096, 14336)}  # name -> N, K: into the hidden layer of the MLP, out of it
_ROWS = {"up": (1, 16, 64, 2048), "down": (1, 16)}
# name -> type of the stored weight, bits, group (0 for K), zero point, activations, arithmetic
_FORMATS = {
    "int8": (jnp.int8, 8, 0, False, None, "bf16"),
    "int4_g128": (jnp.uint8, 4, 128, False, None, "bf16"),
    "int4_g32_zero": (jnp.uint8, 4, 32, True, None, "bf16"),
    "w8a8": (jnp.int8, 8, 0, False, "int8", "int8"),
    "float8": (FLOAT8, 8, 0, False, "float8", "fp8"),
}


def bf16_matmul(
    x: Float[Array, "M K"], weight: Float[Array, "N K"], *, implementation: str | None = None
) -> Float[Array, "M N"]:
    """Returns `x @ weight.T` by XLA: the product that a quantized one has to beat.

    Raises:
        NotImplementedError: an implementation other than "xla" or None.
    """
    if implementation not in (None, "xla"):
        raise NotImplementedError("this case is XLA's own bf16 product, which the others have to beat")
    product = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def _rows(M: int, K: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)


def _bf16_arguments(M: int, N: int, K: int) -> tuple[jax.Array, jax.Array]:
    return _rows(M, K), jax.random.normal(jax.random.key(1), (N, K), jnp.bfloat16) * jnp.bfloat16(K**-0.5)


def _arguments(name: str, M: int, N: int, K: int) -> tuple[jax.Array, QuantizedWeight]:
    """Random codes and one scale for all: products of size near 1."""
    dtype, bits, group, zero_point, *_ = _FORMATS[name]
    group = group or K
    data = jax.random.bits(jax.random.key(1), (N, K * bits // 8), jnp.uint8)
    if dtype == FLOAT8:  # uniform bits would hold NaN
        data = jax.random.normal(jax.random.key(1), data.shape, jnp.bfloat16).astype(FLOAT8)
    elif dtype == jnp.int8:
        data = lax.bitcast_convert_type(data, jnp.int8)
    spread = {jnp.int8: 74.0, jnp.uint8: 4.6}.get(dtype, 1.0)  # standard deviation of the codes
    scale = jnp.full((N, K // group), K**-0.5 / spread, jnp.float32)
    zero = jnp.full_like(scale, 8.0) if bits == 4 else None
    if zero_point:
        zero = jax.random.randint(jax.random.key(2), scale.shape, 6, 11).astype(jnp.float32)
    return _rows(M, K), QuantizedWeight(data, scale, zero, bits, group)


def _spec(name: str, M: int, matrix: str) -> KernelSpec:
    N, K = _MATRICES[matrix]
    flops, ends = 2.0 * M * N * K, 2.0 * M * (N + K)
    if name == "bf16":
        arguments = functools.partial(_bf16_arguments, M, N, K)
        return KernelSpec(f"{matrix}_bf16_m{M}", bf16_matmul, arguments, flops, ends + 2.0 * N * K)
    _, bits, group, _, activations, peak = _FORMATS[name]
    groups = N * K / (group or K)
    num_bytes = ends + N * K * bits / 8 + 4.0 * groups * (2 if bits == 4 else 1)
    function = functools.partial(quantized_matmul, activations=activations)
    return KernelSpec(
        f"{matrix}_{name}_m{M}", function, functools.partial(_arguments, name, M, N, K), flops, num_bytes, peak
    )


def _cpu_arguments(bits: int, M: int, N: int, K: int) -> tuple[jax.Array, CpuWeight]:
    """Random codes and one scale for all, in the layout for CPUs: products of size near 1."""
    shape = (N // ROWS, K // INPUTS, bits, ROWS, 4)
    data = jax.random.bits(jax.random.key(1), shape, jnp.uint8)
    data = lax.bitcast_convert_type(data, jnp.int8) if bits == 8 else data
    scale = jnp.full((N // ROWS, K // INPUTS, ROWS), K**-0.5 / (0.29 * 2**bits), jnp.float16)
    return _rows(M, K), CpuWeight(data, scale, None, N)


def _cpu_spec(bits: int, M: int, matrix: str) -> KernelSpec:
    N, K = _MATRICES[matrix]
    num_bytes = 2.0 * M * (N + K) + N * K * bits / 8 + 2.0 * N * K / INPUTS
    arguments = functools.partial(_cpu_arguments, bits, M, N, K)
    function = functools.partial(quantized_matmul, activations="int16")
    return KernelSpec(f"{matrix}_cpu{bits}_m{M}", function, arguments, 2.0 * M * N * K, num_bytes, "int8")


SPECS: tuple[KernelSpec, ...] = tuple(
    _spec(name, M, matrix) for matrix, rows in _ROWS.items() for M in rows for name in ("bf16", *_FORMATS)
) + tuple(_cpu_spec(bits, M, "up") for M in (1, 16) for bits in (4, 8))
