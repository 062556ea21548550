"""Public function of the quantized matmul: checks, gradient and dispatch."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import dispatch
from pallas_kernels.pages import FLOAT8
from pallas_kernels.quantized_matmul.activations import ACTIVATIONS, quantize_per_token
from pallas_kernels.quantized_matmul.cpu import (
    CPU_ACTIVATIONS,
    check_cpu_weight,
    quantized_matmul_cpu,
    quantized_matmul_jnp,
)
from pallas_kernels.quantized_matmul.cpu_weights import CpuWeight, dequantize_cpu_weight
from pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from pallas_kernels.quantized_matmul.tpu_tiles import prefer_xla
from pallas_kernels.quantized_matmul.weights import PACK_BLOCK, QuantizedWeight, dequantize_weight
from pallas_kernels.quantized_matmul.xla import quantized_matmul_xla
from pallas_kernels.target import current_target

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def _mosaic_gpu(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.quantized_matmul.mosaic_gpu import quantized_matmul_mosaic_gpu

    return quantized_matmul_mosaic_gpu(*args, **kwargs)


def _mosaic_tpu(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.quantized_matmul.mosaic_tpu import quantized_matmul_mosaic_tpu

    return quantized_matmul_mosaic_tpu(*args, **kwargs)


def _cpu(*args: Any, **kwargs: Any) -> jax.Array:
    raise NotImplementedError("cpu needs a CpuWeight; pack it with quantize_cpu_weight, pack_cpu or repack_gguf")


def _not_of_cpu_weights(*args: Any, **kwargs: Any) -> tuple[jax.Array, ...]:
    raise NotImplementedError("a CpuWeight is laid out for CPUs; quantize_weight makes one for GPUs and TPUs")


IMPLEMENTATIONS = {
    "mosaic_gpu": _mosaic_gpu,
    "mosaic_tpu": _mosaic_tpu,
    "cpu": _cpu,
    "xla": quantized_matmul_xla,
    "reference": quantized_matmul_reference,
}
CPU_WEIGHT_IMPLEMENTATIONS = {  # the same names; these take several weights
    "mosaic_gpu": _not_of_cpu_weights,
    "mosaic_tpu": _not_of_cpu_weights,
    "cpu": quantized_matmul_cpu,
    "xla": quantized_matmul_jnp,
    "reference": quantized_matmul_jnp,
}


def quantized_matmul(
    x: Float[Array, "*batch K"],
    weight: QuantizedWeight | CpuWeight,
    *,
    activations: str | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch N"]:
    """Returns `x @ dequantize_weight(weight).T` (or `dequantize_cpu_weight`), summed in f32.

    Differentiable with respect to `x` by reverse mode, so that adapters train on a frozen quantized model: the
    gradient is that of the product with the dequantized weight in the type of `x` (with `activations`, as if they
    had not been rounded). Not differentiable with respect to the weight's scales and zero points, which raises.

    Args:
        x: bf16, f16 or f32.
        weight: the matrix f[N, K]: int8, float8 or 4 bits; a `CpuWeight` for CPUs.
        activations: None multiplies `x` as it is; "int8" and "float8" first quantize it, one scale a row (see
            `quantize_per_token`), for integer and for float8 weights: twice the arithmetic rate, some accuracy lost.
            A `CpuWeight` takes "int16" and "int8", with one scale a row and 32 inputs (see `round_activations`).
        out_dtype: floating type of the result, None for that of `x`.
        implementation: "mosaic_gpu", "mosaic_tpu", "cpu", "xla", "reference", or None for the fastest that accepts.

    Raises:
        ValueError: shapes or types do not fit together, the implementation is unknown, or a gradient with respect to
            the weight is asked for.
    """
    [product] = quantized_matmuls(
        x, (weight,), activations=activations, out_dtype=out_dtype, implementation=implementation
    )
    return product


def quantized_matmuls(
    x: Float[Array, "*batch K"],
    weights: Sequence[QuantizedWeight | CpuWeight],
    *,
    activations: str | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Returns `quantized_matmul(x, weight)` of each weight, all of one type; on a CPU in one call if of one format.

    Arguments and errors are those of `quantized_matmul`.
    """
    for weight in weights:
        _check(x, weight, activations)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype not in _FLOATS:
        raise ValueError(f"out_dtype must be bf16, f16, f32 or None, got {out_dtype}")
    if not x.size:
        return tuple(jnp.zeros((*x.shape[:-1], weight.shape[0]), out_dtype) for weight in weights)
    products = _products(x.reshape(-1, x.shape[-1]), tuple(weights), activations, out_dtype, implementation)
    return tuple(product.reshape(*x.shape[:-1], product.shape[1]) for product in products)


def _check(x: jax.Array, weight: QuantizedWeight | CpuWeight, activations: str | None) -> None:
    packed = isinstance(weight, CpuWeight)
    check_cpu_weight(weight) if packed else _check_weight(weight)
    K = weight.shape[1]
    if not x.ndim or x.shape[-1] != K:
        raise ValueError(f"x must have shape [..., K={K}], the inputs of the weight {weight.shape}, got {x.shape}")
    if x.dtype not in _FLOATS:
        raise ValueError(f'x must be bf16, f16 or f32, got {x.dtype}; to multiply integers set activations="int8"')
    known = {*CPU_ACTIVATIONS, *ACTIVATIONS}
    if activations not in (None, *known):
        raise ValueError(f"activations must be one of {sorted(known)} or None, got {activations!r}")
    fitting = CPU_ACTIVATIONS if packed else ("float8",) if weight.data.dtype == FLOAT8 else ("int8",)
    if activations not in (None, *fitting):
        choice = " or ".join(f'"{each}"' for each in fitting)
        raise ValueError(
            f"{activations=} does not go with {weight.data.dtype} weights in {type(weight).__name__}; "
            f"use {choice} or None"
        )


type _Weights = tuple[QuantizedWeight | CpuWeight, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _products(
    x: jax.Array, weights: _Weights, activations: str | None, out_dtype: jnp.dtype, implementation: str | None
) -> tuple[jax.Array, ...]:
    if isinstance(weights[0], CpuWeight):
        how = {"activations": activations, "out_dtype": out_dtype}
        return dispatch("quantized_matmul", CPU_WEIGHT_IMPLEMENTATIONS, implementation, x, *weights, **how)
    x_scale = None
    if activations is not None:
        x, x_scale = quantize_per_token(x, activations)

    def product(weight: Any) -> jax.Array:
        name = implementation
        if name is None and current_target().platform == "tpu" and prefer_xla(x.shape[0], weight):
            name = "xla"
        return dispatch("quantized_matmul", IMPLEMENTATIONS, name, x, weight, x_scale=x_scale, out_dtype=out_dtype)

    return tuple(product(weight) for weight in weights)


def _forward(x: Any, weights: Any, *static: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, _Weights]]:
    if any(leaf.perturbed for leaf in jax.tree.leaves(weights)):
        raise ValueError(
            "quantized_matmul has no gradient with respect to a quantized weight; differentiate with respect to x, "
            "and keep the weight out of the differentiated arguments or behind jax.lax.stop_gradient"
        )
    weights = jax.tree.map(_value, weights)
    empty = jnp.zeros((0,), x.value.dtype)  # carries the type of x
    return _products(x.value, weights, *static), (empty, weights)


def _backward(
    activations: str | None, out_dtype: jnp.dtype, implementation: str | None, kept: Any, cotangents: Any
) -> tuple[jax.Array | None, None]:
    empty, weights = kept
    precision = lax.Precision.HIGHEST if empty.dtype == jnp.float32 else None
    gradient = None
    for weight, cotangent in zip(weights, cotangents):
        if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            continue
        matrix = dequantize_cpu_weight(weight) if isinstance(weight, CpuWeight) else dequantize_weight(weight)
        matrix = matrix.astype(empty.dtype)
        part = lax.dot(cotangent.astype(empty.dtype), matrix, precision=precision, preferred_element_type=jnp.float32)
        gradient = part if gradient is None else gradient + part
    return None if gradient is None else gradient.astype(empty.dtype), None


def _value(primal: Any) -> jax.Array:
    return primal.value


_products.defvjp(_forward, _backward, symbolic_zeros=True)


def _check_weight(weight: QuantizedWeight) -> None:
    data, bits, group = weight.data, weight.bits, weight.group
    wanted = {4: (jnp.uint8,), 8: (jnp.int8, FLOAT8)}.get(bits)
    if wanted is None:
        raise ValueError(f"weight.bits must be 8 or 4, got {bits}")
    if data.ndim != 2 or data.dtype not in wanted:
        types = " or ".join(str(jnp.dtype(each)) for each in wanted)
        raise ValueError(f"weight.data of {bits} bits must be {types}[N, K * {bits} / 8], got {data.dtype}{data.shape}")
    N, K = weight.shape
    if group < 1 or K % group or (bits == 4 and K % PACK_BLOCK):
        multiple = f", and of {PACK_BLOCK} in 4 bits" if bits == 4 else ""
        raise ValueError(f"K={K} must be a multiple of weight.group{multiple}, got {group=}; see quantize_weight")
    for name, array in (("scale", weight.scale), ("zero", weight.zero)):
        if array is not None and (array.shape != (N, K // group) or array.dtype != jnp.float32):
            raise ValueError(
                f"weight.{name} must be f32[N={N}, K / group={K // group}], got {array.dtype}{array.shape}"
            )
