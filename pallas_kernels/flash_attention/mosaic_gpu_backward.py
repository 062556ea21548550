"""Flash attention backward in Pallas Mosaic GPU (Hopper)."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import mosaic_gpu_blocks as blocks
from pallas_kernels.flash_attention.mosaic_gpu_backward_dkv import key_gradients
from pallas_kernels.flash_attention.mosaic_gpu_backward_dq import query_gradient
from pallas_kernels.flash_attention.tiles import BackwardTiles, backward_tiles
from pallas_kernels.target import require_hopper


def flash_attention_backward_mosaic_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array, d_out: jax.Array,
    d_lse: jax.Array | None, q_segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None, *,
    scale: float, causal: bool, sliding_window: int | None, soft_cap: float | None,
    interpret: Any = False, tiles: BackwardTiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns (dq, dk, dv) in the dtype of the inputs; `out` and `lse` are those of the forward pass.

    FlashAttention-2 (Dao, 2023) with recomputation of the probabilities from lse, as two kernels: one owns
    keys and sums dk and dv over the queries that see them, the other owns queries. Nothing is added atomically: two
    runs agree in every bit. delta = sum(out * d_out) - d_lse is left to XLA.

    Work: 14 * H FLOPs a visible pair (20 * H at H = 256) where a single kernel with atomic addition needs 10 * H. Both
    kernels have a copying warpgroup and two consumers of 240 registers. Shared memory at H = 128: 130 KiB each; at
    H = 256: 194 KiB. Expected on H200 at H = 128: the matmuls at 55-60 % of 989 TFLOP/s, as there is no overlap of
    softmax and matmul but that between the two warpgroups: 40 % when the 10 * H FLOPs of the literature are counted
    (FlashAttention-3 reports 50-55 %). Not measured on hardware.

    Raises:
        NotImplementedError: no Hopper GPU, or a dtype or head dim without tiles.
    """
    require_hopper(interpret)
    blocks.require_supported(q, k, v)
    T, S = q.shape[1], k.shape[1]
    tiles = tiles or backward_tiles(q.shape[-1], sliding_window, soft_cap)
    visibility = blocks.Visibility(T, S, causal, sliding_window, q_segment_ids is not None)
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)
    if d_lse is not None:
        delta = delta - d_lse
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse * blocks.LOG2E)  # such queries get probabilities of 0
    q, k, v, d_out = (blocks.pad_rows(x, 1) for x in (q, k, v, d_out.astype(q.dtype)))
    lse, delta = (blocks.pad_rows(x, 2) for x in (lse, delta))
    ids = tuple(blocks.pad_rows(x.astype(jnp.int32), 1) for x in (q_segment_ids, kv_segment_ids) if x is not None)
    operands = q, k, v, d_out, lse, delta, ids, visibility
    dk, dv = key_gradients(*operands, scale=scale, soft_cap=soft_cap, tiles=tiles, interpret=interpret)
    dq = query_gradient(*operands, scale=scale, soft_cap=soft_cap, tiles=tiles, interpret=interpret)
    return dq[:, :T], dk[:, :S], dv[:, :S]
