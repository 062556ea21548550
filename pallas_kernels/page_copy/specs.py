"""Named cases of the page copy: forks in the cache of an 8B model, 32 layers with 8 KV heads of 128."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.page_copy.api import copy_pages
from pallas_kernels.pages import Pages, quantize
from pallas_kernels.specs import KernelSpec

LAYERS, K, PAGE_SIZE, H = 32, 8, 16, 128


def _arguments(count: int, kind: str) -> tuple[list[Pages], jax.Array, jax.Array]:
    values = jnp.zeros((K, 1 + 2 * count, PAGE_SIZE, H), jnp.bfloat16)
    pages: list[Any] = [values + i if kind == "bf16" else quantize(values + i, 4) for i in range(2 * LAYERS)]
    source = 1 + jnp.arange(count, dtype=jnp.int32)
    return pages, source, source + count


def _copy(disjoint: bool, *arguments: Any, implementation: str | None = None) -> Any:
    return copy_pages(*arguments, disjoint=disjoint, implementation=implementation)


def _spec(count: int, kind: str, disjoint: bool) -> KernelSpec:
    page_bytes = PAGE_SIZE * (2 * H if kind == "bf16" else H // 2 + 8)
    return KernelSpec(
        f"{count} pages, {kind}, {'disjoint' if disjoint else 'staged'}",
        functools.partial(_copy, disjoint),
        functools.partial(_arguments, count, kind),
        flops=0.0,
        num_bytes=float(2 * count * 2 * LAYERS * K * page_bytes),
    )


SPECS: tuple[KernelSpec, ...] = (
    _spec(8, "bf16", True),
    _spec(64, "bf16", True),
    _spec(64, "bf16", False),
    _spec(64, "int4", True),
)
