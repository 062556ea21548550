"""The LoRA product in XLA: tiles of tokens with one adapter, as two batched products.

Segmented gather as in Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023): each adapter is gathered once a tile
of its tokens, so adapters that no token uses are not read, and nothing grows with A.

FLOPs: 2 * W * block_rows * R * (D_in + D_out) for the W tiles, at most T / block_rows + min(A, T). Bytes: 2 * W * R *
(D_in + D_out) * itemsize for the gathered adapters, which are written and read again, beside x, base and the result.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.tiles import power_of_two
from pallas_kernels.grouped_matmul.work import BLOCK, GROUP, START, make_items
from pallas_kernels.lora_matmul.order import sort_by_adapter


def lora_matmul_xla(
    x: Float[Array, "T D_in"],
    a: Float[Array, "A R D_in"],
    b: Float[Array, "A D_out R"],
    adapter_indices: Int[Array, " T"],
    *,
    scales: Float[Array, " A"] | None = None,
    base: Float[Array, "T D_out"] | None = None,
) -> Float[Array, "T D_out"]:
    """See `lora_matmul`."""
    num_tokens, num_adapters = x.shape[0], a.shape[0]
    # Two rows at least: XLA on CPU copies the matrix of a product with one row into f32.
    rows = power_of_two(-(-num_tokens // num_adapters), 2, 128)
    order, adapters, sizes = sort_by_adapter(adapter_indices, num_adapters)
    items, _ = make_items(sizes, num_tokens, rows)
    group = items[:, GROUP]
    # A tile of tokens without adapter gathers one that is gathered anyhow.
    group = jnp.where(group < num_adapters, group, jnp.max(jnp.where(group < num_adapters, group, 0)))

    x_tiles = jnp.pad(x[order], ((0, -num_tokens % rows), (0, 0))).reshape(-1, rows, x.shape[1])[items[:, BLOCK]]
    h = _product("wtd,wrd->wtr", x_tiles, a[group])
    if scales is not None:
        h = h * scales[group][:, None, None]
    y = _product("wtr,wor->wto", h.astype(x.dtype), b[group])

    position = jnp.zeros_like(order).at[order].set(jnp.arange(num_tokens, dtype=jnp.int32), unique_indices=True)
    item = jnp.sum(items[None, :, START] <= position[:, None], axis=1, dtype=jnp.int32) - 1
    out = y[item, lax.rem(position, jnp.int32(rows))]
    out = jnp.where((adapters[position] < num_adapters)[:, None], out, 0)
    if base is not None:
        out = out + base.astype(jnp.float32)
    return out.astype(x.dtype)


def _product(formula: str, x: jax.Array, matrices: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(formula, x, matrices, preferred_element_type=jnp.float32, precision=precision)
