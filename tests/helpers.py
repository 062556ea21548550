"""One request through the decoder by hand: pages in random order, NaN wherever nothing was written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.kv_cache import KVCache

PAGE_SIZE, PAGES, CHUNK = 8, 12, 64  # static sizes, so that one compilation serves every chunk of a model


@functools.partial(jax.jit, static_argnames="decoder", donate_argnames="cache")
def _run(decoder, params, cache, batch):
    hidden, cache = decoder.apply({"params": params}, cache, batch)
    return decoder.apply({"params": params}, hidden, method="logits"), cache


class PagedRow:
    """Feeds the tokens of one row to the decoder in chunks; a chunk of one token takes the decode path."""

    def __init__(self, decoder, params, seed=0):
        self.decoder, self.params, self.length = decoder, params, 0
        empty = KVCache.init(decoder.config, 1 + 2 * PAGES, PAGE_SIZE, KVSpec.parse("auto", jnp.dtype(decoder.dtype)))
        self.cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), empty)
        self.pages = np.random.default_rng(seed).permutation(np.arange(1, 1 + 2 * PAGES))[:PAGES].astype(np.int32)

    def feed(self, tokens):
        """Returns the logits of `tokens`, f32[len(tokens), V]."""
        n = len(tokens)
        positions = np.zeros(CHUNK, np.int32)
        positions[:n] = self.length + np.arange(n)
        slots = self.pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        self.length += n
        batch = TokenBatch(
            token_ids=np.pad(np.asarray(tokens, np.int32), (0, CHUNK - n)),
            positions=positions,
            slot_mapping=np.where(np.arange(CHUNK) < n, slots, 0).astype(np.int32),
            page_indices=self.pages[None],
            kv_lens=np.array([self.length], np.int32),
            cu_q_lens=np.array([0, n], np.int32),
            num_decode_rows=np.int32(n == 1),
        )
        logits, self.cache = _run(self.decoder, self.params, self.cache, batch)
        return np.asarray(logits)[:n]

    def feed_in_chunks(self, tokens, size):
        """The same by chunks of at most `size` tokens."""
        return np.concatenate([self.feed(tokens[i : i + size]) for i in range(0, len(tokens), size)])
