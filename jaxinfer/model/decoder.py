"""The one decoder of all families: a linen module applied as a pure function."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.config import ModelConfig
from jaxinfer.model.attention import Attention
from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.kv_cache import KVCache, OpenPages
from jaxinfer.model.layers import MLP, Embedding, RMSNorm, linear
from jaxinfer.model.open_pages import OpenPlan, packed_view, plan_open_pages
from jaxinfer.model.rope import rope_tables
from pallas_kernels.paged_attention import Schedule, make_schedule
from pallas_kernels.pages import Pages


def forward(decoder: "Decoder", params: Any, cache: KVCache, batch: TokenBatch) -> tuple[Float[Array, "T D"], KVCache]:
    """Returns `decoder(cache, batch)` for the given parameters: hidden states and the new cache."""
    result: Any = decoder.apply({"params": params}, cache, batch)
    return result


def head_logits(decoder: "Decoder", params: Any, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
    """Returns `decoder.logits(hidden)` for the given parameters, f32."""
    result: Any = decoder.apply({"params": params}, hidden, method="logits")
    return result


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: ModelConfig
    window: int | None
    use_rope: bool
    dtype: Any
    implementation: str | None
    activations: str | None

    @nn.compact
    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], k_pages: Pages, v_pages: Pages,
        open_pages: OpenPages | None, batch: TokenBatch, schedule: Schedule, plan: OpenPlan | None,
    ) -> tuple[jax.Array, Pages, Pages, OpenPages | None]:  # fmt: skip
        """Returns f[T, D] and the layer's pages and open pages."""
        c = self.config
        attention = Attention(
            c, self.window, self.use_rope, self.dtype, self.implementation, self.activations, name="attention"
        )
        y = RMSNorm(c.rms_norm_eps, self.dtype, name="attention_norm")(x)
        y, k_pages, v_pages, open_pages = attention(y, rope, k_pages, v_pages, open_pages, batch, schedule, plan)
        x, y = RMSNorm(c.rms_norm_eps, self.dtype, name="mlp_norm").add(x, y)
        mlp = MLP(c.intermediate_size, c.mlp_bias, self.dtype, self.activations, name="mlp")
        return x + mlp(y), k_pages, v_pages, open_pages


class Decoder(nn.Module):
    """Token ids to final hidden states over an explicit cache; `logits` turns hidden states into scores.

    Layers are a Python loop: `lax.scan` over stacked weights copies every layer's slice on CPU.

    Attributes:
        config: shape and options.
        dtype: of activations, of a KV cache whose precision is "auto", and of weights that are not packed.
        implementation: of attention; None for the fastest that accepts.
        activations: how products with packed weights round their input first: "int16", "int8", or None, not at all.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    implementation: str | None = None
    activations: str | None = None

    def setup(self):
        """Declares the parameters."""
        c = self.config
        self.embed = Embedding(c.vocab_size, c.hidden_size, self.dtype)
        layer = nn.jit(DecoderLayer)  # traced once for all layers of one kind, not once a layer
        self.layers = [
            layer(c, window, use_rope, self.dtype, self.implementation, self.activations)
            for window, use_rope in zip(c.layer_windows, c.layer_rope)
        ]
        self.final_norm = RMSNorm(c.rms_norm_eps, self.dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Embedding(c.vocab_size, c.hidden_size, self.dtype)

    def __call__(self, cache: KVCache, batch: TokenBatch) -> tuple[Float[Array, "T D"], KVCache]:
        """Returns the normed hidden state of every token, f[T, D], and the cache with their keys and values."""
        x = self.embed(batch.token_ids)
        rope = rope_tables(self.config, batch.positions)
        schedules = {window: self._schedule(cache, batch, window) for window in set(self.config.layer_windows)}
        plans = {window: self._open_plan(cache, batch, window) for window in schedules}
        layers = []
        for i, (layer, window) in enumerate(zip(self.layers, self.config.layer_windows)):
            with jax.named_scope(f"layer_{i}"):
                opened = None if cache.open_pages is None else cache.open_pages[i]
                x, *pages = layer(
                    x, rope, cache.k_pages[i], cache.v_pages[i], opened, batch, schedules[window], plans[window]
                )  # fmt: skip
            layers.append(pages)
        k_pages, v_pages, open_pages = zip(*layers)
        return self.final_norm(x), KVCache(k_pages, v_pages, None if cache.open_pages is None else open_pages)

    def _schedule(self, cache: KVCache, batch: TokenBatch, window: int | None) -> Schedule:
        if cache.open_pages is not None:
            batch, _ = packed_view(batch, cache.page_size, window)
        return make_schedule(
            batch.token_ids.shape[0], cache.page_size, batch.page_indices.shape[1], batch.kv_lens,
            batch.cu_q_lens, batch.num_decode_rows, window,
        )  # fmt: skip

    def _open_plan(self, cache: KVCache, batch: TokenBatch, window: int | None) -> OpenPlan | None:
        if cache.open_pages is None:
            return None
        return plan_open_pages(batch, cache.page_size, cache.open_pages[0][0].shape[1], window)

    def logits(self, hidden: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Returns f32[S, V] of hidden states that `__call__` returned."""
        head = self.embed if self.config.tie_word_embeddings else self.lm_head
        return linear(hidden, head.weight, preferred_element_type=jnp.float32, activations=self.activations)[0]
