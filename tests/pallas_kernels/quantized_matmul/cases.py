"""Cases of the quantized matmul, shared by the tests of all backends."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul.activations import quantize_per_token
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, quantize_weight

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}

# name -> bits, group (0 for K), float8, zero point
FORMATS = {
    "int8": (8, 0, False, False),
    "int8_g32": (8, 32, False, False),
    "int8_g128": (8, 128, False, False),
    "float8": (8, 0, True, False),
    "float8_g64": (8, 64, True, False),
    "int4": (4, 0, False, False),
    "int4_g32": (4, 32, False, False),
    "int4_g32_zero": (4, 32, False, True),
    "int4_g64_zero": (4, 64, False, True),
    "int4_g128": (4, 128, False, False),
    "int4_g128_zero": (4, 128, False, True),
    "int4_zero": (4, 0, False, True),
}
SHAPES = [(1, 64, 8), (2, 192, 40), (7, 512, 129), (8, 128, 64), (9, 192, 33), (65, 512, 24)]  # M, K, N


@dataclasses.dataclass(frozen=True)
class Case:
    """x[M, K] of `dtype` times a weight [N, K] of a format, with activations as they are, "int8" or "float8"."""

    format: str
    M: int
    K: int
    N: int
    dtype: str = "float32"
    activations: str | None = None

    def __str__(self) -> str:
        how = self.activations or self.dtype
        return f"{self.format}-{self.M}x{self.K}x{self.N}-{how}"


def cases() -> list[Case]:
    """Every format x shape (where the group divides K) x arithmetic."""
    found = []
    for (name, (_, group, float8, _)), (M, K, N) in itertools.product(FORMATS.items(), SHAPES):
        if group and K % group:
            continue
        found += [Case(name, M, K, N, dtype) for dtype in ("float32", "bfloat16")]
        found.append(Case(name, M, K, N, "float32", "float8" if float8 else "int8"))
    found += [Case("int8", 7, 128, 40, "float16"), Case("int4_g64_zero", 3, 128, 40, "float16")]
    found += [Case("int8", 9, 128, 40, "bfloat16", "int8"), Case("float8", 9, 128, 40, "bfloat16", "float8")]
    return found


quantize = jax.jit(quantize_weight, static_argnames=("bits", "group", "float8", "zero_point"))


def make_weight(name: str, N: int, K: int, seed: int = 0) -> QuantizedWeight:
    """A weight whose rows and groups differ in magnitude and mean, so that a wrong scale or zero point shows."""
    bits, group, float8, zero = FORMATS[name]
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((N, K)) + rng.normal(0, 0.5, (N, 1))
    matrix = matrix * rng.uniform(0.5, 2, (N, 1)) * np.repeat(rng.uniform(0.5, 2, (N, K // 32)), 32, axis=1)
    return quantize(jnp.asarray(matrix, jnp.float32), bits, group or None, float8, zero)


def make(case: Case) -> tuple[jax.Array, jax.Array | None, QuantizedWeight]:
    """x (or its codes), the scales of its rows or None, and the weight."""
    seed = zlib.crc32(str(case).encode())
    weight = make_weight(case.format, case.N, case.K, seed)
    rng = np.random.default_rng(seed + 1)
    x = jnp.asarray(rng.standard_normal((case.M, case.K)) * rng.uniform(0.1, 10, (case.M, 1)), case.dtype)
    if case.activations is None:
        return x, None, weight
    codes, scale = quantize_per_token(x, case.activations)
    return codes, scale, weight


def dequantized(weight: QuantizedWeight) -> np.ndarray:
    """The matrix in f64, decoded element by element as the docstring of QuantizedWeight has it."""
    data = np.asarray(weight.data)
    N, K = weight.shape
    if weight.bits == 4:
        values = np.empty((N, K))
        for k in range(K):
            block, place = divmod(k, 64)
            byte = data[:, block * 32 + place % 32]
            values[:, k] = byte % 16 if place < 32 else byte // 16
    else:
        values = data.astype(np.float64)
    if weight.zero is not None:
        values = values - np.repeat(np.asarray(weight.zero, np.float64), weight.group, axis=1)
    return values * np.repeat(np.asarray(weight.scale, np.float64), weight.group, axis=1)


def expect(x: jax.Array, x_scale: jax.Array | None, weight: QuantizedWeight) -> np.ndarray:
    """The product in f64."""
    values = np.asarray(x).astype(np.float64)
    if x_scale is not None:
        values = values * np.asarray(x_scale, np.float64)[:, None]
    return values @ dequantized(weight).T


def check(function: Callable[..., jax.Array], case: Case, jit: bool = True) -> None:
    """Runs `function(x, weight, x_scale=..., out_dtype=...)` twice: as exact as its type, and the same bits."""
    x, x_scale, weight = make(case)
    out_dtype = jnp.dtype(case.dtype)

    def product(x: jax.Array, x_scale: jax.Array | None, weight: QuantizedWeight) -> jax.Array:
        return function(x, weight, x_scale=x_scale, out_dtype=out_dtype)

    run = jax.jit(product) if jit else product
    out = run(x, x_scale, weight)
    assert out.shape == (case.M, case.N)
    assert out.dtype == out_dtype
    assert_close(np.asarray(out).astype(np.float64), x, x_scale, weight, case.dtype)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(run(x, x_scale, weight)))


def assert_close(
    actual: np.ndarray, x: jax.Array, x_scale: jax.Array | None, weight: QuantizedWeight, dtype: str
) -> None:
    """Compares with the f64 product at the tolerance of `dtype`, relative to what K random terms sum to."""
    values = np.asarray(x).astype(np.float64) * (1 if x_scale is None else np.asarray(x_scale)[:, None])
    matrix = dequantized(weight)
    magnitude = np.sqrt(np.sum(values**2, 1)[:, None] * np.mean(matrix**2, 1)[None])
    error = np.abs(actual - values @ matrix.T)
    worst = np.unravel_index(np.argmax(error / magnitude), error.shape)
    limit = TOLERANCE[dtype]
    assert (error <= limit * np.maximum(magnitude, np.abs(values @ matrix.T))).all(), (
        f"error {error[worst]:.3g} of magnitude {magnitude[worst]:.3g} at {worst}"
    )
