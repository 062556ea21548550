"""`generate`: a whole generation as one pure function, for a user's own jit, vmap, mesh or training loop.

It runs the same decoder, cache and sampler as the engine, with a cache of its own whose pages lie in a row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.batch import TokenBatch, decode_batch
from jaxinfer.model.decoder import Decoder, forward, head_logits
from jaxinfer.model.kv_cache import KVCache
from jaxinfer.model.params import Params
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.sampler import SamplingRows, sample

PAGE_SIZE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """Tokens of B rows; a row's entries at and after `lengths` are `pad_token_id` and zero."""

    token_ids: jax.Array  # i32[B, max_new_tokens]
    lengths: jax.Array  # i32[B]  tokens generated, the stop token included
    logprobs: jax.Array  # f32[B, max_new_tokens]  of the tokens, under the model (temperature 1, nothing cut off)


def generate(
    decoder: Decoder,
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    max_new_tokens: int,
    prompt_lens: Int[Array, " B"] | None = None,
    key: jax.Array | None = None,
    temperature: float | Float[Array, "*B"] = 0.0,
    top_k: int | Int[Array, "*B"] = 0,
    top_p: float | Float[Array, "*B"] = 1.0,
    min_p: float | Float[Array, "*B"] = 0.0,
    typical_p: float | Float[Array, "*B"] = 1.0,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int = 0,
    kv_dtype: str = "auto",
) -> GenerateOutput:
    """Returns what the model says after each prompt; ends early when every row has stopped.

    Pure and traceable: static are the decoder, the shapes, `max_new_tokens`, `stop_token_ids` and `kv_dtype`;
    everything else may be traced. The memory of the cache is that of B rows of T + max_new_tokens tokens.

    Args:
        decoder: `Model.decoder`.
        params: its parameters, sharded as you like.
        tokens: prompts, padded at the right to one length.
        max_new_tokens: most tokens generated per row.
        prompt_lens: real length of each prompt, from 1 to T (which is not checked when traced); None says T.
        key: random key; each row draws from its own fold of it. Needed unless temperature is 0.
        temperature: 0 is greedy; as the other sampling parameters, one for all rows or one each.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens of this total mass.
        min_p: keep tokens at least this fraction as probable as the most probable one.
        typical_p: keep the tokens nearest to the entropy, of this total mass.
        stop_token_ids: a row ends after one of these, which is kept in the output.
        pad_token_id: fills the places after a row's end.
        kv_dtype: precision of the KV cache, see `EngineConfig`.

    Raises:
        ValueError: a shape or range is wrong, or the key is missing.

    Example:
        >>> model = load("smollm2-135m")
        >>> step = jax.jit(lambda params, tokens: generate(model.decoder, params, tokens, max_new_tokens=32))
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers of shape [B, T] with T >= 1, got {tokens.dtype}{list(tokens.shape)}")
    B, T = tokens.shape
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    limit = decoder.config.max_position_embeddings
    if T + max_new_tokens > limit:
        raise ValueError(f"{T} prompt tokens and {max_new_tokens} new ones are more than the model's {limit}")
    if key is None and not (isinstance(temperature, int | float) and temperature == 0):
        raise ValueError("sampling needs a random key: pass key=jax.random.key(...), or temperature=0")
    lens = jnp.full(B, T, jnp.int32) if prompt_lens is None else jnp.asarray(prompt_lens, jnp.int32)
    if lens.shape != (B,):
        raise ValueError(f"prompt_lens must have shape [B={B}], got {list(lens.shape)}")
    if prompt_lens is not None and not isinstance(prompt_lens, jax.core.Tracer):
        known = np.asarray(prompt_lens)
        if known.min() < 1 or known.max() > T:
            raise ValueError(f"prompt_lens must be from 1 to T={T}, got {known.tolist()}")
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    rows = SamplingRows(
        slots=jnp.zeros(B, jnp.int32),
        **_per_row(options, B),
        repetition_penalty=jnp.ones(B, jnp.float32),
        presence_penalty=jnp.zeros(B, jnp.float32),
        frequency_penalty=jnp.zeros(B, jnp.float32),
        seeds=_row_seeds(key, B),
        positions=lens,
        min_positions=jnp.zeros(B, jnp.int32),
        needs_state=jnp.zeros(B, bool),
        active=jnp.ones(B, bool),
    )
    kv = KVSpec.parse(kv_dtype, jnp.dtype(decoder.dtype))
    pages_per_row = -(-(T + max_new_tokens) // PAGE_SIZE)
    page_indices = 1 + jnp.arange(B * pages_per_row, dtype=jnp.int32).reshape(B, pages_per_row)
    cache = KVCache.init(decoder.config, 1 + B * pages_per_row, PAGE_SIZE, kv, num_slots=B)
    rows_in_order = jnp.arange(B, dtype=jnp.int32)
    batch = dataclasses.replace(_prefill_batch(tokens, lens, page_indices), slots=rows_in_order)
    hidden, cache = forward(decoder, params, cache, batch)
    hidden = hidden[batch.cu_q_lens[1:] - 1]
    stops = jnp.asarray(stop_token_ids, jnp.int32)

    def body(carry: tuple) -> tuple:
        step, active, hidden, cache, out = carry
        logits = head_logits(decoder, params, hidden)
        now = dataclasses.replace(rows, positions=lens + step, active=active)
        sampled, _, _ = sample(logits, now, None)
        out = _append(out, step, active, sampled, logits, pad_token_id)
        active &= ~jnp.any(sampled[:, None] == stops[None, :], axis=1)
        # The pass after the last token is not needed; leaving it out would compile the sampler twice.
        batch = decode_batch(sampled, lens + step, page_indices, active, PAGE_SIZE, rows_in_order)
        hidden, cache = forward(decoder, params, cache, batch)
        return step + 1, active, hidden, cache, out

    def goes_on(carry: tuple) -> Bool[Array, ""]:
        return (carry[0] < max_new_tokens) & jnp.any(carry[1])

    out = GenerateOutput(
        jnp.full((B, max_new_tokens), pad_token_id, jnp.int32),
        jnp.zeros(B, jnp.int32),
        jnp.zeros((B, max_new_tokens), jnp.float32),
    )
    return lax.while_loop(goes_on, body, (jnp.int32(0), rows.active, hidden, cache, out))[-1]


def _per_row(options: dict[str, Any], B: int) -> dict[str, jax.Array]:
    """Returns the sampling parameters as arrays [B]; ranges are checked where they are plain numbers."""
    plain: dict[str, Any] = {name: value for name, value in options.items() if isinstance(value, int | float)}
    SamplingParams.from_dict(plain)
    arrays = {}
    for name, value in options.items():
        array = jnp.asarray(value, jnp.int32 if name == "top_k" else jnp.float32)
        if array.shape not in ((), (B,)):
            raise ValueError(f"{name} must be one number or have shape [B={B}], got shape {list(array.shape)}")
        arrays[name] = jnp.broadcast_to(array, (B,))
    return arrays


def _row_seeds(key: jax.Array | None, B: int) -> jax.Array:
    """Returns uint32[B, 2], one pair of words a row."""
    if key is None:
        return jnp.zeros((B, 2), jnp.uint32)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(B, dtype=jnp.uint32))
    return jax.random.key_data(keys)[:, -2:]


def _prefill_batch(tokens: jax.Array, lens: jax.Array, page_indices: jax.Array) -> TokenBatch:
    """Returns the ragged batch of all prompts, their padding moved to the end."""
    B, T = tokens.shape
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
    token = jnp.arange(B * T, dtype=jnp.int32)
    row = jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
    is_real, row = row < B, jnp.minimum(row, B - 1)
    position = jnp.where(is_real, token - cu_q_lens[row], 0)
    slots = page_indices[row, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    return TokenBatch(
        token_ids=tokens.astype(jnp.int32)[row, position],
        positions=position,
        slot_mapping=jnp.where(is_real, slots, 0),
        page_indices=page_indices,
        kv_lens=lens,
        cu_q_lens=cu_q_lens,
        num_decode_rows=jnp.int32(0),
    )


def _append(
    out: GenerateOutput, step: jax.Array, active: jax.Array, sampled: jax.Array, logits: jax.Array, pad_token_id: int
) -> GenerateOutput:
    logprob = jnp.take_along_axis(logits, sampled[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)
    return GenerateOutput(
        out.token_ids.at[:, step].set(jnp.where(active, sampled, pad_token_id)),
        out.lengths + active.astype(jnp.int32),
        out.logprobs.at[:, step].set(jnp.where(active, logprob, 0.0)),
    )
