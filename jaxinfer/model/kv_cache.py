"""The KV cache: pages of keys and values for every layer, an explicit argument and result of the step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.kv_spec import FORMATS, KVSpec
from pallas_kernels.pages import FLOAT8, Pages, QuantizedPages

_CODES = {"float8": FLOAT8, "int8": jnp.int8}  # of the formats with a scale for each token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Pages of all layers; page 0 of each is the null page, where padding is written and nobody reads.

    Head-major, so that the keys of one head in one page are contiguous: what a page copy moves, what a kernel
    loads, and what shards over the KV heads. Separate buffers per layer let each be updated in place.
    """

    k_pages: tuple[Pages, ...]  # L x [K, P, page_size, H]
    v_pages: tuple[Pages, ...]  # L x [K, P, page_size, H]

    @classmethod
    def init(cls, config: ModelConfig, num_pages: int, page_size: int, kv: KVSpec, sharding: Any = None) -> "KVCache":
        """Returns a cache of zeros.

        Args:
            config: shape of the model.
            num_pages: pages of each layer, the null page included.
            page_size: tokens of a page.
            kv: precision of keys and of values.
            sharding: where each array of one layer's pages lies (their first dimension is the KV heads); None
                leaves that to jax.
        """
        shape = (config.num_kv_heads, num_pages, page_size, config.head_dim)
        k_pages, v_pages = (
            tuple(_zeros(shape, name, sharding) for _ in range(config.num_layers)) for name in (kv.k, kv.v)
        )
        return cls(k_pages, v_pages)


def _zeros(shape: tuple[int, ...], name: str, sharding: Any) -> Pages:
    if name not in _CODES:
        return jnp.zeros(shape, name, device=sharding)
    assert FORMATS[name].scales == 1
    scale = jnp.zeros(shape[:3], jnp.float32, device=sharding)
    return QuantizedPages(jnp.zeros(shape, _CODES[name], device=sharding), scale)
