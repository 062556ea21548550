"""Attention sinks (StreamingLLM, Xiao et al., 2023): the first tokens, seen from behind a sliding window.

A token at position p sees the keys of its window as in any model with a sliding window, and here the sinks that lie
before the window. It looks at those as if it stood right behind sinks and window, at position `sinks + window - 1` or p
where that is less: positions within what is seen, as in the paper. What a token sees depends on p and the tokens before
it alone. The two parts are joined by their log-sum-exp.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.rope import apply_rope, rope_tables
from pallas_kernels.pages import Pages, QuantizedPages, dequantize

MASK_VALUE = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkPlan:
    """What a step's tokens see of their sinks; made once for all layers of one window. N = `attention_sinks`."""

    page: jax.Array  # i32[S, N]  of each sink of each row
    offset: jax.Array  # i32[N]
    rows: jax.Array | None  # i32[T]  row of each token; None: one token a row
    num_seen: jax.Array  # i32[T]
    rope: tuple[jax.Array, jax.Array]  # f32[T, 1, H / 2] each, of the position from which a token sees them


def plan_sinks(config: ModelConfig, batch: TokenBatch, page_size: int, window: int) -> SinkPlan:
    """Returns the plan of a step. The sinks' pages are the first of every row."""
    sinks = config.attention_sinks
    index = jnp.arange(sinks, dtype=jnp.int32)
    page = jnp.take(batch.page_indices, index // page_size, axis=1, mode="clip")
    rows = None
    if batch.num_decode_rows is not None:
        token = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32)
        rows = jnp.sum(batch.cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
        rows = jnp.minimum(rows, batch.kv_lens.shape[0] - 1)
    return SinkPlan(
        page,
        index % page_size,
        rows,
        jnp.clip(batch.positions - (window - 1), 0, sinks),
        rope_tables(config, jnp.minimum(batch.positions, sinks + window - 1)),
    )


def attend_to_sinks(
    q: Float[Array, "T N H"], pages: tuple[Pages, Pages], plan: SinkPlan, scale: float, use_rope: bool
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Returns the attention of queries, not yet rotated, over the sinks that they see, and its log-sum-exp.

    Both in f32; of a token that sees none the former is 0 and the latter below -1e29.
    """
    T, N, H = q.shape
    if use_rope:
        q = apply_rope(q, *plan.rope)
    k, v = (_gather(x, plan) for x in pages)  # f32[K, T, sinks, H]
    q = q.astype(jnp.float32).reshape(T, k.shape[0], -1, H) * scale
    is_seen = jnp.arange(k.shape[2], dtype=jnp.int32)[None] < plan.num_seen[:, None]
    k, v = (jnp.where(is_seen[None, :, :, None], x, 0.0) for x in (k, v))  # 0 * NaN is NaN: unwritten slots
    scores = jnp.einsum("tkgh,ktsh->tkgs", q, k, precision=lax.Precision.HIGHEST)
    scores = jnp.where(is_seen[:, None, None], scores, MASK_VALUE)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("tkgs,ktsh->tkgh", weights / total, v, precision=lax.Precision.HIGHEST)
    return out.reshape(T, N, H), (top + jnp.log(total)).reshape(T, N)


def _gather(pages: Pages, plan: SinkPlan) -> Float[Array, "K T sinks H"]:
    """Returns the sinks of every token, in f32; each is read as a page of one token."""

    def pick(x: jax.Array, has_tokens: bool) -> jax.Array:
        return x[:, plan.page, plan.offset][:, :, :, None] if has_tokens else x[:, plan.page]

    if isinstance(pages, QuantizedPages):
        by_token = pages.axis == "token"
        zero = None if pages.zero is None else pick(pages.zero, by_token)
        pages = dataclasses.replace(pages, data=pick(pages.data, True), scale=pick(pages.scale, by_token), zero=zero)
    else:
        pages = pick(pages, True)
    tokens = dequantize(pages)[:, :, :, 0].astype(jnp.float32)
    return tokens if plan.rows is None else tokens[:, plan.rows]
