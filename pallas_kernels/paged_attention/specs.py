"""Cases of ragged paged attention for compile checks and benchmarks: the shapes of Llama-3-8B and a few edges."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.api import ragged_paged_attention
from pallas_kernels.pages import quantize
from pallas_kernels.specs import KernelSpec

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def _arguments(
    rows: tuple[tuple[int, int], ...], page_size: int, head_dim: int, formats: dict[str, Any] | None, is_decode: bool
) -> tuple[Any, ...]:
    """Random q and pages for `rows` of (q_len, kv_len), whose pages follow each other in the pool."""
    pages_per_row = max(-(-kv_len // page_size) for _, kv_len in rows)
    keys = jax.random.split(jax.random.key(0), 3)
    num_pages = 1 + len(rows) * pages_per_row
    q = jax.random.normal(keys[0], (sum(q_len for q_len, _ in rows), HEADS, head_dim), jnp.bfloat16)
    shape = (KV_HEADS, num_pages, page_size, head_dim)
    k_pages, v_pages = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:])
    if formats is not None:
        k_pages, v_pages = quantize(k_pages, **formats), quantize(v_pages, **formats)
    page_indices = 1 + jnp.arange(len(rows) * pages_per_row, dtype=jnp.int32).reshape(len(rows), -1)
    q_lens, kv_lens = (jnp.asarray(x, jnp.int32) for x in zip(*rows))
    cu_q_lens = jnp.pad(jnp.cumsum(q_lens, dtype=jnp.int32), (1, 0))
    return q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, None if is_decode else jnp.int32(0)


def _spec(
    name: str, rows: tuple[tuple[int, int], ...], *, page_size: int = 16, head_dim: int = HEAD_DIM,
    formats: dict[str, Any] | None = None, value_bytes: float = 2.0, **options: Any,
) -> KernelSpec:  # fmt: skip
    window = options.get("sliding_window")
    seen = [q_len * kv_len - q_len * (q_len - 1) // 2 for q_len, kv_len in rows]  # visible pairs
    loaded = [kv_len for _, kv_len in rows]
    if window is not None:
        seen = [min(s, q_len * window) for s, (q_len, _) in zip(seen, rows)]
        loaded = [min(kv_len, window + q_len) for q_len, kv_len in rows]
    return KernelSpec(
        name,
        functools.partial(ragged_paged_attention, scale=head_dim**-0.5, **options),
        functools.partial(_arguments, rows, page_size, head_dim, formats, all(q_len == 1 for q_len, _ in rows)),
        flops=4.0 * HEADS * head_dim * sum(seen),
        num_bytes=2.0 * KV_HEADS * head_dim * value_bytes * sum(loaded)
        + 4.0 * HEADS * head_dim * sum(q_len for q_len, _ in rows),
    )


SPECS = (
    _spec("decode 1 x 128k", ((1, 131_072),), page_size=64),
    _spec("decode 128 x 4k", ((1, 4096),) * 128),
    _spec("decode 128 x 4k, page 128", ((1, 4096),) * 128, page_size=128),
    _spec("decode 128 x 4k, H 64", ((1, 4096),) * 128, head_dim=64),
    _spec("decode 128 x 4k, H 256", ((1, 4096),) * 128, head_dim=256),
    _spec("decode 128 x 4k, int8", ((1, 4096),) * 128, page_size=64, formats={}, value_bytes=1 + 4 / 128),
    _spec("decode 128 x 4k, fp8", ((1, 4096),) * 128, page_size=64, formats={"float8": True}, value_bytes=1 + 4 / 128),
    _spec("decode 128 x 4k, int4", ((1, 4096),) * 128, page_size=64, formats={"bits": 4}, value_bytes=0.5 + 8 / 128),
    _spec(
        "decode 128 x 4k, int2 by channel", ((1, 4096),) * 128, page_size=64,
        formats={"bits": 2, "axis": "channel"}, value_bytes=0.25 + 8 / 64,
    ),
    _spec("decode 128 x 8k, window 1k", ((1, 8192),) * 128, sliding_window=1024),
    _spec("prefill 4 x 2k", ((2048, 2048),) * 4),
    _spec("prefill 4 x 2k, int8", ((2048, 2048),) * 4, page_size=64, formats={}, value_bytes=1 + 4 / 128),
    _spec("chunk of 512 at 32k, soft cap", ((512, 32_768),), soft_cap=50.0),
    _spec("mixed 64 x 2k and 1k", ((1, 2048),) * 64 + ((1024, 1024),)),
)  # fmt: skip
