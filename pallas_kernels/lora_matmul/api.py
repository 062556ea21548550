"""Public function of the LoRA product: shape checks and dispatch."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.lora_matmul.reference import lora_matmul_reference
from pallas_kernels.lora_matmul.xla import lora_matmul_xla


def _mosaic_gpu(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.lora_matmul.mosaic_gpu import lora_matmul_mosaic_gpu

    return lora_matmul_mosaic_gpu(*args, **kwargs)


def _mosaic_tpu(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.lora_matmul.mosaic_tpu import lora_matmul_mosaic_tpu

    return lora_matmul_mosaic_tpu(*args, **kwargs)


IMPLEMENTATIONS = {
    "mosaic_gpu": _mosaic_gpu,
    "mosaic_tpu": _mosaic_tpu,
    "xla": lora_matmul_xla,
    "reference": lora_matmul_reference,
}


def lora_matmul(
    x: Float[Array, "T D_in"],
    a: Float[Array, "A R D_in"],
    b: Float[Array, "A D_out R"],
    adapter_indices: Int[Array, " T"],
    *,
    scales: Float[Array, " A"] | None = None,
    base: Float[Array, "T D_out"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T D_out"]:
    """Returns `base[t] + b[i] @ (scales[i] * (a[i] @ x[t]))` for the adapter i of each token t.

    Both products are summed in f32; between them, the scaled vector of length R is rounded to the type of `x`, as
    tensor cores want it (nothing is rounded in f32). Tokens may come in any order: they are sorted by adapter inside.

    Args:
        x: tokens.
        a: first matrices of the adapters (LoRA; Hu et al., 2022), of the type of `x`. An adapter of a rank below R is
            padded with zeros in `a` and `b`.
        b: second matrices, of the type of `x`.
        adapter_indices: adapter of each token (int32); any index outside of 0 to A - 1, say A, is no adapter: such a
            token keeps its `base`.
        scales: factor of each adapter, usually alpha / rank (float32); None is 1.
        base: what the product is added to, of the type of `x`; None is 0.
        implementation: "mosaic_gpu", "mosaic_tpu", "xla" (differentiable with respect to all floating-point
            arguments), "reference", or None for the fastest that accepts the arguments.

    Raises:
        ValueError: shapes or types do not fit together, or the implementation is unknown.
    """
    _check(x, a, b, adapter_indices, scales, base)
    return dispatch("lora_matmul", IMPLEMENTATIONS, implementation, x, a, b, adapter_indices, scales=scales, base=base)


def _check(
    x: jax.Array, a: jax.Array, b: jax.Array, adapter_indices: jax.Array, scales: jax.Array | None,
    base: jax.Array | None,
) -> None:  # fmt: skip
    if x.ndim != 2 or a.ndim != 3 or b.ndim != 3:
        raise ValueError(
            "x, a and b must have shapes [T, D_in], [A, R, D_in] and [A, D_out, R], got "
            f"{x.shape}, {a.shape} and {b.shape}"
        )
    wanted = {
        "a": (a, (*a.shape[:2], x.shape[1])),
        "b": (b, (a.shape[0], b.shape[1], a.shape[1])),
        "adapter_indices": (adapter_indices, x.shape[:1]),
        "scales": (scales, a.shape[:1]),
        "base": (base, (x.shape[0], b.shape[1])),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} must have shape {shape} beside x {x.shape} and a {a.shape}, got {array.shape}")
    for name, array in (("a", a), ("b", b), ("base", base)):
        if array is not None and array.dtype != x.dtype:
            raise ValueError(f"{name} must have the type of x, {x.dtype}, got {array.dtype}; cast it")
    if 0 in x.shape or 0 in b.shape:
        raise ValueError(f"no dimension may be 0, got x {x.shape}, b {b.shape}")
