"""The LoRA product on TPU."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.mosaic_tpu import grouped_rows_tpu
from pallas_kernels.grouped_matmul.tiles import power_of_two
from pallas_kernels.grouped_matmul.work import make_items
from pallas_kernels.lora_matmul.order import sort_by_adapter
from pallas_kernels.target import require_tpu


def lora_matmul_mosaic_tpu(
    x: Float[Array, "T D_in"],
    a: Float[Array, "A R D_in"],
    b: Float[Array, "A D_out R"],
    adapter_indices: Int[Array, " T"],
    *,
    scales: Float[Array, " A"] | None = None,
    base: Float[Array, "T D_out"] | None = None,
    interpret: Any = False,
) -> Float[Array, "T D_out"]:
    """See `lora_matmul`. Two grouped products over tokens sorted by adapter (`grouped_rows_tpu`), unsorted by XLA.

    FLOPs 2 * R * (D_in + D_out) for each row of each tile. Bytes: the adapters once a tile, x, base and the result
    three times each, since XLA sorts and unsorts. A kernel wants a last dimension below 128 padded to it, so that XLA
    first copies all of b, used or not, to 128 / R times its size (compiled for v5e at A = 64, D_out = 14336, R = 64:
    235 MB of temporary memory): keep b at R = 128 on TPU. Not measured on hardware.

    Raises:
        NotImplementedError: not a TPU.
    """
    require_tpu(interpret)
    num_tokens, num_adapters = x.shape[0], a.shape[0]
    rows = power_of_two(-(-num_tokens // num_adapters), 16, 128)
    pad = -num_tokens % rows
    order, adapters, sizes = sort_by_adapter(adapter_indices, num_adapters)
    padded = jnp.pad(order, (0, pad))
    items, count = make_items(sizes, num_tokens, rows)
    h = grouped_rows_tpu(
        x[padded], a, items, count, name="lora_shrink", block_rows=rows, out_dtype=jnp.float32, interpret=interpret
    )
    if scales is not None:
        adapters = jnp.pad(adapters, (0, pad))
        h = h * scales[jnp.minimum(adapters, num_adapters - 1)][:, None]
    base = None if base is None else base[padded]
    out = grouped_rows_tpu(
        h.astype(x.dtype), b, items, count, name="lora_expand", block_rows=rows, out_dtype=x.dtype, base=base,
        interpret=interpret,
    )  # fmt: skip
    position = jnp.zeros_like(order).at[order].set(jnp.arange(num_tokens, dtype=jnp.int32), unique_indices=True)
    return out[position]
