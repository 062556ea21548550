"""The KV cache: pages of keys and values for every layer, an explicit argument and result of the step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Pages of all layers; page 0 of each is the null page, where padding is written and nobody reads.

    Head-major, so that the keys of one head in one page are contiguous: what a page copy moves, what a kernel
    loads, and what shards over the KV heads. Separate buffers per layer let each be updated in place.
    """

    k_pages: tuple[jax.Array, ...]  # L x [K, P, page_size, H]
    v_pages: tuple[jax.Array, ...]  # L x [K, P, page_size, H]

    @classmethod
    def init(cls, config: ModelConfig, num_pages: int, page_size: int, dtype: Any, sharding: Any = None) -> "KVCache":
        """Returns a cache of zeros; `sharding` (of one layer's pages) places it, None leaves that to jax."""
        shape = (config.num_kv_heads, num_pages, page_size, config.head_dim)
        k_pages, v_pages = (
            tuple(jnp.zeros(shape, dtype, device=sharding) for _ in range(config.num_layers)) for _ in range(2)
        )
        return cls(k_pages, v_pages)
