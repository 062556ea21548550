"""The LoRA product on Hopper."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.mosaic_gpu_rows import grouped_rows
from pallas_kernels.grouped_matmul.work import make_items
from pallas_kernels.lora_matmul.order import sort_by_adapter
from pallas_kernels.lora_matmul.tiles import LoraTileConfig, choose_tiles
from pallas_kernels.target import require_hopper


def lora_matmul_mosaic_gpu(
    x: Float[Array, "T D_in"],
    a: Float[Array, "A R D_in"],
    b: Float[Array, "A D_out R"],
    adapter_indices: Int[Array, " T"],
    *,
    scales: Float[Array, " A"] | None = None,
    base: Float[Array, "T D_out"] | None = None,
    tiles: LoraTileConfig | None = None,
    interpret: Any = False,
) -> Float[Array, "T D_out"]:
    """See `lora_matmul`.

    Algorithm: SGMV (Punica; Chen et al., 2023) over tokens sorted by adapter: a kernel for `a[i] @ x` with K split over
    the SMs, XLA sums the parts and scales them, a kernel for `b[i] @ h`, which fetches the rows of base by TMA under
    the products, adds, and stores each row where its token stands. Both are `grouped_rows`. Adapters without tokens
    are not read; tokens without one only copy base.

    FLOPs 2 * T * R * (D_in + D_out). Bytes, at least: itemsize * (T * (D_in + 2 * D_out) + U * R * (D_in + D_out)) for
    U adapters in use; the sorting of x adds 2 * T * D_in * itemsize, the parts of h 8 * splits * T * R.

    Shared memory at D 4096, R 64: shrink 3 steps of 64 KiB and 32 KiB of f32 results, expand 4 steps of 40 KiB and two
    of 32 KiB for base and result; one block an SM.

    Expected on an H200, not measured on hardware: bound by bandwidth everywhere (2 * R FLOPs a byte of x). Decode with
    an adapter a token: about 60 % of 4.8 TB/s in the kernels, since a unit of expand at R = 16 loads 8 KiB and its
    chain (barrier, wgmma, base, store) is some 1,000 cycles, of which two warpgroups overlap little; and the launches
    (sort, gather, sum: 10 small ones) cost more than the bytes below some 64 adapters. Prefill: x is moved three times
    instead of once, so 50 to 60 % of what its least bytes allow.

    Raises:
        NotImplementedError: not a Hopper GPU; not bf16 or f16; R, D_in or D_out no multiple of 16.
        ValueError: tiles that do not divide the matrices.
    """
    require_hopper(interpret)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu multiplies bfloat16 or float16, got {x.dtype}")
    num_tokens = x.shape[0]
    num_adapters, rank, d_in = a.shape
    d_out = b.shape[1]
    tiles = tiles or choose_tiles(num_tokens, num_adapters, rank, d_in, d_out)
    tiles.shrink.check(rank, d_in)
    tiles.expand.check(d_out, rank)

    order, adapters, sizes = sort_by_adapter(adapter_indices, num_adapters)
    pad = -num_tokens % max(tiles.shrink.block_rows, tiles.expand.block_rows)
    order = jnp.pad(order, (0, pad))
    items, count = make_items(sizes, num_tokens, tiles.shrink.block_rows)
    h = grouped_rows(
        x[order], a, items, count, name="lora_shrink", tiles=tiles.shrink, out_rows=num_tokens + pad,
        out_dtype=jnp.float32, interpret=interpret,
    )  # fmt: skip
    h = jnp.sum(h, axis=0)  # rows of the padding are undefined, and stay in their rows
    if scales is not None:
        adapters = jnp.pad(adapters, (0, pad))
        h = h * scales[jnp.minimum(adapters, num_adapters - 1)][:, None]
    items, count = make_items(sizes, num_tokens, tiles.expand.block_rows)
    return grouped_rows(
        h.astype(x.dtype), b, items, count, name="lora_expand", tiles=tiles.expand, out_rows=num_tokens,
        out_dtype=x.dtype, row_of=order, base=base, interpret=interpret,
    )[0]  # fmt: skip
