"""Gradients and batching, the same for every backend that has a forward and a backward function."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.flash_attention.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static side of one call: the backend, chosen once for forward and backward, and its options."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    return_lse: bool
    options: tuple[tuple[str, Any], ...]


def with_backward(
    forward: Callable[..., tuple[jax.Array, jax.Array]],
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
) -> Callable[..., Any]:
    """Returns a function of the arguments of `flash_attention` that runs `forward`, and `backward` for gradients.

    Only q, k, v, out and lse are kept for the backward pass, which recomputes the weights. Under `jax.vmap` the new
    axis is folded into B, so that a backend needs no batching rule of its own; an argument that is not mapped is
    repeated.

    Args:
        forward: (q, k, v, q_segment_ids, kv_segment_ids, *, q_scale, k_scale, v_scale, **options) -> (out, lse).
        backward: (q, k, v, out, lse, d_out, d_lse, q_segment_ids, kv_segment_ids, **options) -> (dq, dk, dv).
    """

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array | None = None,
        kv_segment_ids: jax.Array | None = None, *, q_scale: jax.Array | None = None,
        k_scale: jax.Array | None = None, v_scale: jax.Array | None = None, return_lse: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        call = _Call(forward, backward, return_lse, tuple(sorted(options.items())))
        return _attend(call, q, k, v, (q_segment_ids, kv_segment_ids), (q_scale, k_scale, v_scale))

    return attend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, scales: Any) -> Any:
    out, lse = _forward(call, q, k, v, segments, scales)
    return (out, lse) if call.return_lse else out


def _attend_fwd(call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, scales: Any) -> Any:
    if any(scale is not None for scale in scales):
        raise ValueError("flash_attention has no gradient in float8; pass q, k and v in bfloat16 to differentiate")
    out, lse = _forward(call, q, k, v, segments, scales)
    return (out, lse) if call.return_lse else out, (q, k, v, out, lse, segments)


def _attend_bwd(call: _Call, residuals: Any, gradients: Any) -> Any:
    q, k, v, out, lse, segments = residuals
    d_out, d_lse = gradients if call.return_lse else (gradients, None)
    options = dict(call.options)
    visibility = Visibility(q.shape[1], k.shape[1], options["causal"], options["sliding_window"])
    if segments[0] is not None or visibility.some_queries_see_nothing:
        # Whatever stands in a query that sees nothing, or in its gradient, must not reach the gradients of others.
        sees_any = ~jnp.isneginf(lse)
        d_lse = None if d_lse is None else jnp.where(sees_any, d_lse, 0.0)
        sees_any = sees_any.transpose(0, 2, 1)[..., None]
        q, d_out = (jnp.where(sees_any, x, jnp.zeros_like(x)) for x in (q, d_out))
    try:
        gradients = _fold_batch(call.backward, call.options)(q, k, v, out, lse, d_out, d_lse, *segments)
    except NotImplementedError as refusal:
        raise NotImplementedError(
            f"the implementation that computed the forward pass has no such gradient ({refusal}); "
            "name another by `implementation`, for example 'xla'"
        ) from refusal
    return *gradients, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, scales: Any) -> Any:
    def forward(q: Any, k: Any, v: Any, segments: Any, scales: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        named = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
        return call.forward(q, k, v, *segments, **named, **options)

    return _fold_batch(forward, call.options)(q, k, v, segments, scales)


def _fold_batch(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Returns `function(*arguments, **options)` whose `vmap` folds the mapped axis into the leading one."""
    folded = custom_vmap(functools.partial(function, **dict(options)))

    @folded.def_vmap
    def _(axis_size: int, in_batched: Any, *arguments: Any) -> Any:
        def fold(x: jax.Array, batched: bool) -> jax.Array:
            x = x if batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        result = folded(*jax.tree.map(fold, arguments, tuple(in_batched)))
        result = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), result)
        return result, jax.tree.map(lambda _: True, result)

    return folded
