"""The KV cache: pages of keys and values for every layer, an explicit argument and result of the step."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.kv_spec import FORMATS, CacheShape, KVSpec
from pallas_kernels.pages import FLOAT8, Pages, QuantizedPages

OpenPages = tuple[jax.Array, jax.Array]  # keys and values [K, O, page_size, H]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyLog:
    """What H2O must know of the keys in each place of a layer's pages; see `heavy_hitters.py`."""

    mass: jax.Array  # f32[K, P, page_size]  attention received so far, over queries and the query heads of the KV head
    positions: jax.Array  # i32[K, P, page_size]  of the key's token in its request

    @classmethod
    def init(cls, config: ModelConfig, num_pages: int, page_size: int) -> tuple["KeyLog", ...]:
        """Returns empty logs of all layers."""
        shape = (config.num_kv_heads, num_pages, page_size)
        return tuple(cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)) for _ in range(config.num_layers))

    @staticmethod
    def page_bytes(config: CacheShape, page_size: int) -> int:
        """Returns the bytes of a page in all layers."""
        return config.num_layers * config.num_kv_heads * page_size * 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Pages of all layers; page 0 of each is the null page, where padding is written and nobody reads.

    Head-major, so that the keys of one head in one page are contiguous: what a page copy moves, what a kernel
    loads, and what shards over the KV heads. Separate buffers per layer let each be updated in place.

    Where pages are quantized when they are full, the newest tokens of the request in slot s are in `open_pages`
    s + 1 of each layer, in full precision; see `open_pages.py`.

    Only steps with requests that forget (H2O) have `key_logs`.
    """

    k_pages: tuple[Pages, ...]  # L x [K, P, page_size, H]
    v_pages: tuple[Pages, ...]  # L x [K, P, page_size, H]
    open_pages: tuple[OpenPages, ...] | None = None  # L
    key_logs: tuple[KeyLog, ...] | None = None  # L

    @classmethod
    def init(cls, config: ModelConfig, num_pages: int, page_size: int, kv: KVSpec, *, num_slots: int = 0) -> "KVCache":
        """Returns a cache of zeros.

        Args:
            config: shape of the model.
            num_pages: pages of each layer, the null page included.
            page_size: tokens of a page.
            kv: precision of keys and of values.
            num_slots: requests at once; matters for open pages only.
        """
        shape = (config.num_kv_heads, num_pages, page_size, config.head_dim)

        def pages(name: str, axis: str) -> tuple[Pages, ...]:
            return tuple(_zeros(shape, name, axis) for _ in range(config.num_layers))

        open_pages = None
        if kv.open is not None:
            shape_of_open = (shape[0], 1 + num_slots, *shape[2:])
            zeros = [jnp.zeros(shape_of_open, kv.open) for _ in range(2 * config.num_layers)]
            open_pages = tuple(zip(zeros[::2], zeros[1::2]))
        return cls(pages(kv.k, "channel"), pages(kv.v, "token"), open_pages)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_pages[0].shape[2]


def _zeros(shape: tuple[int, ...], name: str, axis: str) -> Pages:
    """Returns empty pages; `axis` is that of the scales of formats that are quantized by the page."""
    bits, by_page = FORMATS[name].bits, FORMATS[name].by_page
    if not FORMATS[name].scales:
        return jnp.zeros(shape, name)
    axis = axis if by_page else "token"
    scales = shape[:3] if axis == "token" else (*shape[:2], shape[3])
    dtype = {"float8": FLOAT8, "int8": jnp.int8}.get(name, jnp.uint8)
    data = jnp.zeros((*shape[:3], shape[3] * bits // 8), dtype)
    scale, zero = (jnp.zeros(scales, jnp.float32) for _ in range(2))
    return QuantizedPages(data, scale, zero if bits < 8 else None, bits, axis)
