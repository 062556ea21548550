"""Public functions of the KV write: shape checks and dispatch."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_write.reference import write_kv_reference
from pallas_kernels.page_copy.api import scatter_pages
from pallas_kernels.pages import FLOAT8, Pages, QuantizedPages, quantize
from pallas_kernels.target import require_hopper, require_tpu


def _mosaic_gpu(*args: Any, interpret: Any = False, **kwargs: Any) -> tuple[Pages, Pages]:
    require_hopper(interpret)  # before the import, which takes longer than a refusal should
    from pallas_kernels.kv_write.mosaic_gpu import write_kv_mosaic_gpu

    return write_kv_mosaic_gpu(*args, interpret=interpret, **kwargs)


def _mosaic_tpu(*args: Any, interpret: Any = False, **kwargs: Any) -> tuple[Pages, Pages]:
    require_tpu(interpret)
    from pallas_kernels.kv_write.mosaic_tpu import write_kv_mosaic_tpu

    return write_kv_mosaic_tpu(*args, interpret=interpret, **kwargs)


def _cpu(*args: Any, **kwargs: Any) -> tuple[Pages, Pages]:
    from pallas_kernels.kv_write.cpu import write_kv_cpu

    return write_kv_cpu(*args, **kwargs)


IMPLEMENTATIONS = {"mosaic_gpu": _mosaic_gpu, "mosaic_tpu": _mosaic_tpu, "cpu": _cpu, "xla": write_kv_reference}


def write_kv(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, "*K T"],
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> tuple[Pages, Pages]:
    """Returns both caches with token t's key and value at slot `slot_mapping[t]` = page * page_size + offset.

    In place when the pages are donated. Quantized pages (one scale a token) are quantized on the way; keys and
    values may be stored in different precision.

    Args:
        k_pages: key pages f32, bf16 or f16 [K, P, page_size, H], or QuantizedPages of axis "token".
        v_pages: value pages of the same (K, P, page_size, H).
        k: new keys, before the rotation if `rope` is given.
        v: new values.
        slot_mapping: i32, distinct but for padding tokens, which point into page 0: the null page, whose content
            nobody reads (some backends write it and some do not). i32[K, T] has a slot for each head.
        rope: cos and sin of every token's position, f32[T, rotary / 2] or f32[T, 1, rotary / 2], which rotate the
            first `rotary` channels of k in the half-rotation form; the result is rounded to k's dtype before it is
            stored, as if it had been rotated apart. None if k is rotated already, or not at all.
        implementation: "mosaic_gpu", "mosaic_tpu", "cpu", "xla", or None for the first that accepts the arguments.

    Raises:
        ValueError: shapes do not fit together, pages with a scale per channel, or an unknown implementation.
    """
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_pages(name, pages)
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages and v_pages must have one shape, got {k_pages.shape} and {v_pages.shape}")
    K, _, _, H = k_pages.shape
    for name, new in (("k", k), ("v", v)):
        if new.ndim != 3 or new.shape[1:] != (K, H):
            raise ValueError(f"{name} must have shape [T, K={K}, H={H}], got {new.shape}")
    T = k.shape[0]
    if v.shape != k.shape:
        raise ValueError(f"k and v must have one shape, got {k.shape} and {v.shape}")
    if slot_mapping.shape not in ((T,), (K, T)):
        raise ValueError(f"slot_mapping must have shape [T={T}] or [K={K}, T={T}], got {slot_mapping.shape}")
    if rope is not None:
        rope = _check_rope(rope, T, H)
    return dispatch("write_kv", IMPLEMENTATIONS, implementation, k_pages, v_pages, k, v, slot_mapping, rope=rope)


def write_full_pages(
    pages: QuantizedPages,
    values: Float[Array, "K C page_size H"],
    page_ids: Int[Array, " C"],
    *,
    implementation: str | None = None,
) -> QuantizedPages:
    """Returns `pages` with page `page_ids[i]` holding `values[:, i]`, quantized as a whole; in place when donated.

    The way into pages with a scale per channel, whose scales are known only when a page is full: keep a row's last,
    unfilled page in `quantize`'s input precision, and move it here when it is full.

    Args:
        pages: where to write; its bits, axis and dtype say how the values are quantized.
        values: full pages, f32, bf16 or f16.
        page_ids: distinct but for padding entries, which are 0: the null page, whose content nobody reads.
        implementation: of `scatter_pages`.

    Raises:
        ValueError: shapes do not fit together.
    """
    K, _, page_size, H = pages.shape
    if values.shape != (K, *page_ids.shape, page_size, H):
        raise ValueError(
            f"values must have shape [K={K}, C, page_size={page_size}, H={H}] and page_ids [C], "
            f"got {values.shape} and {page_ids.shape}"
        )
    full = quantize(values, pages.bits, pages.axis, float8=pages.data.dtype == FLOAT8)
    return scatter_pages(pages, full, page_ids, implementation=implementation)


def _check_pages(name: str, pages: Pages) -> None:
    if len(pages.shape) != 4:
        raise ValueError(f"{name} must have shape [K, P, page_size, H], got {pages.shape}")
    if not isinstance(pages, QuantizedPages):
        return
    if pages.axis != "token":
        raise ValueError(
            f"{name} have one scale per {pages.axis}: such a page must be quantized as a whole, when it is full (see "
            'write_full_pages); only pages of axis "token" can be written token by token'
        )
    if (pages.zero is None) != (pages.bits == 8):
        raise ValueError(f"{name} must have a zero point if, and only if, they have fewer than 8 bits: see quantize")


def _check_rope(rope: tuple[jax.Array, jax.Array], T: int, H: int) -> tuple[jax.Array, jax.Array]:
    cos, sin = rope
    half = cos.shape[-1] if cos.ndim else 0
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in ((T, half), (T, 1, half)) or not 1 <= half <= H // 2:
            raise ValueError(f"{name} must have shape [T={T}, rotary / 2 <= {H // 2}], got {table.shape}")
        if table.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, got {table.dtype}")
    return cos.reshape(T, half), sin.reshape(T, half)
