"""What every implementation of flash attention may rely on."""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.float8 import SCALE_BLOCK
from pallas_kernels.pages import FLOAT8

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, FLOAT8)


def check_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None,
    scales: tuple[jax.Array | None, jax.Array | None, jax.Array | None], causal: bool, sliding_window: int | None,
    soft_cap: float | None,
) -> None:  # fmt: skip
    """Checks arguments of `flash_attention`.

    Raises:
        ValueError: naming what was wanted and what was given.
    """
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q must have shape [B, T, N, H] without zeros, got {q.shape}")
    B, T, N, H = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape or (x.shape[0], x.shape[3]) != (B, H):
            raise ValueError(f"{name} must have shape [B={B}, S, K, H={H}] without zeros, got {x.shape}")
        if x.dtype != q.dtype:
            raise ValueError(f"q, k and v must have one dtype, q has {q.dtype} and {name} has {x.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {k.shape} and {v.shape}")
    S, K = k.shape[1:3]
    if N % K:
        raise ValueError(f"the {N} query heads must be a multiple of the {K} KV heads")
    if q.dtype not in [jnp.dtype(dtype) for dtype in DTYPES]:
        raise ValueError(f"q, k and v must be float32, bfloat16, float16 or float8_e4m3fn, got {q.dtype}")
    _check_options(causal, sliding_window, soft_cap)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("q_segment_ids and kv_segment_ids go together: pass both or neither")
    for name, ids, shape in (("q_segment_ids", q_segment_ids, (B, T)), ("kv_segment_ids", kv_segment_ids, (B, S))):
        if ids is not None and (ids.shape != shape or ids.dtype != jnp.int32):
            raise ValueError(f"{name} must be int32{list(shape)}, got {ids.dtype}{list(ids.shape)}")
    _check_scales(scales, q.dtype == FLOAT8, (B, N, -(-T // SCALE_BLOCK)), (B, K, -(-S // SCALE_BLOCK)))


def _check_options(causal: bool, sliding_window: int | None, soft_cap: float | None) -> None:
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}")
    if sliding_window is not None and not causal:
        raise ValueError("sliding_window looks back from each query: it needs causal=True")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")


def _check_scales(
    scales: tuple[jax.Array | None, jax.Array | None, jax.Array | None], is_float8: bool,
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...],
) -> None:  # fmt: skip
    for name, scale, shape in zip(("q_scale", "k_scale", "v_scale"), scales, (q_shape, kv_shape, kv_shape)):
        if not is_float8 and scale is not None:
            raise ValueError(f"{name} belongs to float8_e4m3fn arguments only; leave it out")
        if is_float8 and (scale is None or scale.shape != shape or scale.dtype != jnp.float32):
            got = None if scale is None else f"{scale.dtype}{list(scale.shape)}"
            raise ValueError(f"float8 needs {name} as float32{list(shape)}, one for {SCALE_BLOCK} tokens, got {got}")
