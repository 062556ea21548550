"""Cache pages in less than 16 bits: integers or float8 with their scales."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.packing import pack, unpack

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedPages:
    """Pages [K, P, page_size, H] stored as `(data - zero) * scale`, for keys or for values.

    Attributes:
        data: int8 or float8_e4m3fn [K, P, page_size, H], or uint8 [K, P, page_size, H * bits / 8]: `pack`ed with
            `block` = H, so that byte j of a token holds channels j, j + H * bits / 8, ...
        scale: f32[K, P, page_size] (axis "token") or f32[K, P, H] (axis "channel": one for each channel of a page,
            as KIVI has it for keys; Liu et al., 2024).
        zero: of the shape of `scale`, None for 0.
        bits: bits of a value: 8, 4 or 2.
        axis: "token" or "channel".
    """

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    bits: int = dataclasses.field(default=8, metadata={"static": True})
    axis: str = dataclasses.field(default="token", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """(K, P, page_size, H) of the values that the pages stand for."""
        *front, width = self.data.shape
        return (*front, width * 8 // self.bits)


Pages = jax.Array | QuantizedPages


def dequantize(pages: Pages) -> Float[Array, "K P page_size H"]:
    """Returns the values, in f32 if the pages are quantized."""
    if isinstance(pages, jax.Array):
        return pages
    values = unpack(pages.data, pages.bits, pages.shape[-1]) if pages.bits < 8 else pages.data
    where = (..., None) if pages.axis == "token" else (..., None, slice(None))
    values = values.astype(jnp.float32)
    if pages.zero is not None:
        values = values - pages.zero[where]
    return values * pages.scale[where]


def quantize(
    values: Float[Array, "K P page_size H"], bits: int = 8, axis: str = "token", float8: bool = False
) -> QuantizedPages:
    """Returns pages nearest to `values`: symmetric for 8 bits (integers or float8), with a zero point below.

    Raises:
        ValueError: unknown bits or axis.
    """
    if axis not in ("token", "channel"):
        raise ValueError(f'axis must be "token" or "channel", got {axis!r}')
    over = -1 if axis == "token" else -2
    values = values.astype(jnp.float32)
    if bits == 8:
        limit = FLOAT8_MAX if float8 else 127.0
        scale = jnp.maximum(jnp.max(jnp.abs(values), axis=over), 1e-12) * (1 / limit)
        scaled = values / jnp.expand_dims(scale, over)
        data = scaled.astype(FLOAT8) if float8 else jnp.round(scaled).astype(jnp.int8)
        return QuantizedPages(data, scale, None, bits, axis)
    low, high = jnp.min(values, axis=over), jnp.max(values, axis=over)
    scale = jnp.maximum(high - low, 1e-12) * (1 / (2**bits - 1))
    zero = -low / scale
    codes = jnp.round(values / jnp.expand_dims(scale, over) + jnp.expand_dims(zero, over))
    codes = jnp.clip(codes, 0, 2**bits - 1).astype(jnp.uint8)
    return QuantizedPages(pack(codes, bits, codes.shape[-1]), scale, zero, bits, axis)
