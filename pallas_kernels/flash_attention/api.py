"""Public function of flash attention: checks, dispatch, gradients."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.flash_attention.checks import check_arguments
from pallas_kernels.flash_attention.cudnn import flash_attention_cudnn
from pallas_kernels.flash_attention.reference import flash_attention_reference
from pallas_kernels.flash_attention.visibility import Visibility, blank_unseen_keys, ever_seen
from pallas_kernels.flash_attention.vjp import with_backward
from pallas_kernels.flash_attention.xla import flash_attention_backward_xla, flash_attention_xla
from pallas_kernels.target import require_hopper, require_tpu


def _mosaic_gpu(*arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    require_hopper(options.get("interpret", False))  # before Pallas is imported
    from pallas_kernels.flash_attention.mosaic_gpu_forward import flash_attention_mosaic_gpu

    return flash_attention_mosaic_gpu(*arguments, **options)


def _mosaic_gpu_backward(*arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    from pallas_kernels.flash_attention.mosaic_gpu_backward import flash_attention_backward_mosaic_gpu

    return flash_attention_backward_mosaic_gpu(*arguments, **options)


def _mosaic_tpu(*arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    require_tpu(options.get("interpret", False))  # before Pallas is imported
    from pallas_kernels.flash_attention.mosaic_tpu_forward import flash_attention_mosaic_tpu

    return flash_attention_mosaic_tpu(*arguments, **options)


def _mosaic_tpu_backward(*arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    from pallas_kernels.flash_attention.mosaic_tpu_backward import flash_attention_backward_mosaic_tpu

    return flash_attention_backward_mosaic_tpu(*arguments, **options)


def _reference(*arguments: Any, return_lse: bool, **options: Any) -> Any:
    out, lse = flash_attention_reference(*arguments, **options)
    return (out, lse) if return_lse else out


IMPLEMENTATIONS = {
    "mosaic_gpu": with_backward(_mosaic_gpu, _mosaic_gpu_backward),
    "mosaic_tpu": with_backward(_mosaic_tpu, _mosaic_tpu_backward),
    "cudnn": flash_attention_cudnn,
    "xla": with_backward(flash_attention_xla, flash_attention_backward_xla),
    "reference": _reference,
}


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_scale: Float[Array, "B N q_blocks"] | None = None,
    k_scale: Float[Array, "B K k_blocks"] | None = None,
    v_scale: Float[Array, "B K k_blocks"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Returns exact softmax attention of contiguous queries, keys and values, in memory O(T + S).

    Query t stands at key position t + S - T: the last query beside the last key. It sees key j if their segment ids
    are equal (where given), if j is not after its position (`causal`) and, with a window, if j is among the last
    `sliding_window` up to its position. A query that sees nothing has output 0, lse -inf and gradient 0. Keys that no
    query sees, and queries that see nothing, may hold anything, NaN included: so a ragged batch is padded with a
    segment id that the other side does not have.

    Differentiable in q, k and v, through `lse` too; only q, k, v, out and lse are kept for the backward pass, which
    recomputes the weights and runs on the implementation of the forward pass. Works under `jit`, `grad` and `vmap`
    (the mapped axis is folded into B; an argument that is not mapped is repeated). Over a mesh call it inside
    `jax.shard_map(..., check_vma=False)` with B and the heads split, KV heads as the query heads; T and S must be
    whole on every device, though partial results over split keys can be combined by their `lse`.

    Not supported: dropout, additive biases and ALiBi, arbitrary masks, attention sinks, different head dimensions
    of keys and values, forward-mode and second derivatives (implementation "reference" has these two).

    Args:
        q: queries; float32, bfloat16 or float16, or float8_e4m3fn with scales.
        k: keys, of the dtype of q; N must be a multiple of K, query head n uses KV head n // (N / K).
        v: values, of the shape and dtype of k.
        scale: factor on q @ k, a Python number; `H ** -0.5` by default.
        causal: whether a query sees no key after its own position.
        sliding_window: keys that a query sees at most, its own position included; needs `causal`. None sees all.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`, after `scale`.
        q_segment_ids: i32 segment of each query; given together with `kv_segment_ids`.
        kv_segment_ids: i32 segment of each key.
        q_scale: f32 factor of each block of 128 queries of a head; see `quantize_for_flash`. All three for float8,
            whose output is bfloat16 and which has no gradient.
        k_scale: f32 factor of each block of 128 keys of a KV head.
        v_scale: f32 factor of each block of 128 values of a KV head.
        return_lse: whether to return also the natural log-sum-exp of each query's final scores, f32[B, N, T].
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu", "cudnn" (other NVIDIA GPUs), "xla", "reference", or None
            for the first of them that accepts the arguments on this device.

    Returns:
        out in the dtype of q (bfloat16 for float8), or (out, lse).

    Raises:
        ValueError: shapes, dtypes or options do not fit together, or the implementation is unknown.
        NotImplementedError: the named implementation does not do this, or not on this device.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.flash_attention import flash_attention
        >>> q, k = jnp.ones((1, 5, 4, 64)), jnp.ones((1, 9, 2, 64))
        >>> flash_attention(q, k, k, sliding_window=4).shape
        (1, 5, 4, 64)
    """
    check_arguments(
        q, k, v, q_segment_ids, kv_segment_ids, (q_scale, k_scale, v_scale), causal, sliding_window, soft_cap
    )
    visibility = Visibility(q.shape[1], k.shape[1], causal, sliding_window)
    seen = ever_seen(visibility, q_segment_ids, kv_segment_ids)
    k, v = blank_unseen_keys(k, seen), blank_unseen_keys(v, seen)
    return dispatch(
        "flash_attention", IMPLEMENTATIONS, implementation,
        q, k, v, q_segment_ids, kv_segment_ids,
        scale=float(q.shape[-1] ** -0.5 if scale is None else scale), causal=causal, sliding_window=sliding_window,
        soft_cap=soft_cap, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse,
    )  # fmt: skip
