"""Flash attention of cuDNN, for NVIDIA GPUs of other generations than Hopper."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.target import current_target


def flash_attention_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
) -> Float[Array, "B T N H"]:
    """Returns `jax.nn.dot_product_attention(..., implementation="cudnn")` where it means the same.

    It brings its own gradient. Declined are soft caps, segment ids, float8 and float32; lse, which JAX rounds to the
    dtype of q and does not differentiate; causal calls with T != S, which cuDNN aligns at the first key; head
    dimensions above 128 (256 from Hopper on) or not a multiple of 8; GPUs before Ampere.
    """
    del k_scale, v_scale
    target = current_target()
    capability = target.compute_capability or 0
    largest = 256 if capability >= 9 else 128
    reasons = {
        f"needs an NVIDIA GPU of compute capability 8.0 or more, this is {target}": target.platform != "gpu"
        or capability < 8,
        "needs bfloat16 or float16": q.dtype not in (jnp.bfloat16, jnp.float16) or q_scale is not None,
        "has no soft cap": soft_cap is not None,
        "has no segment ids": q_segment_ids is not None or kv_segment_ids is not None,
        "returns no exact lse": return_lse,
        "aligns a causal mask at the first key: it needs T == S": causal and q.shape[1] != k.shape[1],
        f"needs a head dimension of at most {largest} and a multiple of 8": q.shape[-1] > largest or q.shape[-1] % 8,
    }
    for reason, applies in reasons.items():
        if applies:
            raise NotImplementedError(f"cudnn {reason}")
    window = None if sliding_window is None else (sliding_window - 1, 0)
    try:
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, local_window_size=window, implementation="cudnn"
        )
    except RuntimeError as error:  # "cuDNN is not detected"
        raise NotImplementedError(f"cudnn: {error}") from error
