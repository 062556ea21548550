"""Weight matrices in 8 and 4 bits with their scales."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.packing import pack, unpack
from pallas_kernels.pages import FLOAT8, FLOAT8_MAX

PACK_BLOCK = 64  # of every 64 inputs, byte j holds input j (low nibble) and input j + 32 (high nibble)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A matrix f[N, K] (outputs, inputs), stored as `(data - zero) * scale`.

    Attributes:
        data: int8 or float8_e4m3fn [N, K], or uint8[N, K / 2]: 4-bit codes, `pack`ed along K in blocks of PACK_BLOCK.
        scale: f32[N, K / group].
        zero: f32[N, K / group], None for 0.
        bits: 8 or 4.
        group: consecutive inputs with one scale; K for one scale an output.
    """

    data: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    bits: int = dataclasses.field(default=8, metadata={"static": True})
    group: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.data.shape[0], self.data.shape[1] * 8 // self.bits


def dequantize_weight(weight: QuantizedWeight) -> Float[Array, "N K"]:
    """Returns the matrix in f32."""
    N, K = weight.shape
    values = unpack(weight.data, 4, PACK_BLOCK) if weight.bits == 4 else weight.data
    values = values.astype(jnp.float32).reshape(N, -1, weight.group)
    if weight.zero is not None:
        values = values - weight.zero[..., None]
    return (values * weight.scale[..., None]).reshape(N, K)


def quantize_weight(
    matrix: Float[Array, "N K"], bits: int = 8, group: int | None = None, float8: bool = False, zero_point: bool = True
) -> QuantizedWeight:
    """Returns `matrix` rounded to nearest: 8 bits symmetric (integer or float8), 4 bits with or without a zero point.

    Args:
        matrix: f[N, K].
        bits: 8 or 4.
        group: inputs with one scale, K by default.
        float8: for 8 bits, e4m3 instead of integers.
        zero_point: for 4 bits, whether the range of a group is [min, max] or symmetric around 0 (code 8).

    Raises:
        ValueError: unknown bits, or K is not a multiple of the group (and of PACK_BLOCK for 4 bits).
    """
    N, K = matrix.shape
    group = group or K
    if bits not in (4, 8):
        raise ValueError(f"bits must be 8 or 4, got {bits}")
    if K % group or (bits == 4 and K % PACK_BLOCK):
        raise ValueError(f"K={K} must be a multiple of {group=}" + (f" and of {PACK_BLOCK}" if bits == 4 else ""))
    groups = matrix.astype(jnp.float32).reshape(N, K // group, group)
    if bits == 8:
        scale = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), 1e-12) / (FLOAT8_MAX if float8 else 127.0)
        scaled = (groups / scale[..., None]).reshape(N, K)
        return QuantizedWeight(
            scaled.astype(FLOAT8) if float8 else jnp.round(scaled).astype(jnp.int8), scale, None, 8, group
        )
    if zero_point:
        low, high = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
        scale = jnp.maximum(high - low, 1e-12) / 15.0
        zero = jnp.round(-low / scale)
    else:
        scale = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), 1e-12) / 7.0
        zero = jnp.full_like(scale, 8.0)
    codes = jnp.clip(jnp.round(groups / scale[..., None]) + zero[..., None], 0, 15).astype(jnp.uint8)
    return QuantizedWeight(pack(codes.reshape(N, K), 4, PACK_BLOCK), scale, zero, 4, group)
