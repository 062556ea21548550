"""What the forward and backward TPU kernels of flash attention share: tiles, skipping of blocks, masked scores.

Scores are held transposed, [block_k, rows] with rows = G * block_q: maximum and sum run down the sublanes (plain
vector maxima and additions, no lane shuffles), and what belongs to a row (m, l, lse, delta) is a lane vector
[1, rows] that broadcasts for nothing and is stored compactly. No operand is transposed inside a kernel; the layouts
that this wants are made by XLA in the copies that move the head axis forward in any case.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.blocks import segment_blocks, segment_rows
from pallas_kernels.flash_attention.visibility import Visibility

LANES = 128


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """Tile sizes: `block_q` queries of each of the G heads (G * block_q a multiple of 128), `block_k` keys."""

    block_q: int
    block_k: int


def choose_tiles(num_q: int, num_k: int, group: int) -> TpuTiles:
    """Returns about 512 rows by 512 keys: the f32 scores are then 1 MiB, a product 512 x 512 x H.

    A wider tile saves grid steps (about 0.35 us each) and reads K and V less often, a narrower one computes less
    above the diagonal and fits the 16 MiB of VMEM that a v5e kernel gets by default: scores, weights and their
    temporaries, in the backward twice, stay below 8 MiB.
    """
    unit = math.lcm(LANES // math.gcd(group, LANES), 16)  # rows fill lanes, block_q fills packed sublanes
    block_q = min(max(unit, 512 // group // unit * unit), pl.cdiv(num_q, unit) * unit)
    return TpuTiles(block_q, min(512, pl.cdiv(num_k, LANES) * LANES))


def cost(pairs_of_blocks: int, tiles: TpuTiles, products: int, q: jax.Array, k: jax.Array) -> pl.CostEstimate:
    """Returns what XLA should expect of a kernel that does so many products [rows, block_k, H] for a pair of blocks.

    Args:
        pairs_of_blocks: visible pairs of a query block and a key block, for one batch row and KV head.
        tiles: of the kernel.
        products: matrix products for each pair.
        q: queries [B, T, N, H]; two or more arrays of this size are moved once.
        k: keys [B, S, K, H]; two blocks are moved for each pair.
    """
    (B, _, N, H), K = q.shape, k.shape[2]
    scores = pairs_of_blocks * B * N * tiles.block_q * tiles.block_k
    moved = (products * q.size + 2 * pairs_of_blocks * B * K * tiles.block_k * H) * q.dtype.itemsize
    return pl.CostEstimate(flops=2 * products * scores * H, bytes_accessed=moved, transcendentals=scores)


class Segments:
    """Segment ids laid out for the kernels, with the least and largest id of each block in scalar memory."""

    def __init__(self, q_ids: jax.Array | None, kv_ids: jax.Array | None, group: int, tiles: TpuTiles):
        self.scalars: tuple[jax.Array, ...] = ()
        self.arrays: tuple[jax.Array, ...] = ()
        if q_ids is not None and kv_ids is not None:
            rows, keys = segment_rows(q_ids, group, tiles.block_q), segment_blocks(kv_ids, tiles.block_k)
            self.scalars = tuple(f(x, axis=2).reshape(-1) for x in (rows, keys) for f in (jnp.min, jnp.max))
            self.arrays = rows[:, :, None], keys[:, :, None]  # [nq, B, 1, rows], [nk, B, 1, block_k]

    def specs(self, tiles: TpuTiles, group: int, q_index: Callable[..., Any], k_index: Callable[..., Any]) -> list:
        """Returns the block specs of `arrays`; `q_index` and `k_index` map grid indices to a block."""
        if not self.arrays:
            return []
        return [
            pl.BlockSpec((None, None, 1, group * tiles.block_q), lambda b, h, x, y, *_: (q_index(x, y), b, 0, 0)),
            pl.BlockSpec((None, None, 1, tiles.block_k), lambda b, h, x, y, *_: (k_index(x, y), b, 0, 0)),
        ]


def split_refs(refs: tuple[Any, ...], has_segments: bool) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Returns the references of a kernel as (scalars, segment ids, the rest); the first two are empty or 4 and 2."""
    return (refs[:4], refs[4:6], refs[6:]) if has_segments else ((), (), refs)


def for_visible_block(
    compute: Callable[[bool], None], visibility: Visibility, tiles: TpuTiles, b: Any, i: Any, j: Any, in_range: Any,
    scalars: tuple[Any, ...], batch: int,
) -> None:  # fmt: skip
    """Calls `compute(masked)` for query block i and key block j, if anything there may be visible.

    `masked` is False where every query sees every key, which spares the mask's five vector operations a score.
    """
    unmasked = visibility.sees_all(i, j, tiles.block_q, tiles.block_k)
    may_meet = in_range
    if scalars:
        low_q, high_q, low_k, high_k = (ref[x * batch + b] for ref, x in zip(scalars, (i, i, j, j)))
        may_meet &= (low_q <= high_k) & (low_k <= high_q)
        unmasked &= (low_q == high_q) & (low_k == high_k) & (low_q == low_k)
    pl.when(may_meet & unmasked)(lambda: compute(False))
    pl.when(may_meet & jnp.logical_not(unmasked))(lambda: compute(True))


def scores_of(
    k: jax.Array,  # [block_k, H]
    q: jax.Array,  # [rows, H]
    scale: float,
    soft_cap: float | None,
) -> tuple[jax.Array, Any]:
    """Returns the scores f32[block_k, rows] before the mask and their derivative by q k."""
    scores = dot_nt(k, q) * scale
    if soft_cap is None:
        return scores, scale
    tanh = jnp.tanh(scores * (1 / soft_cap))
    return tanh * soft_cap, scale - tanh * tanh * scale


def mask_scores(
    scores: jax.Array, visibility: Visibility, tiles: TpuTiles, i: Any, j: Any, segments: tuple[Any, ...]
) -> jax.Array:
    """Returns the scores with -inf where the row of query block i does not see the key of key block j."""
    key = lax.broadcasted_iota(jnp.int32, scores.shape, 0) + j * tiles.block_k
    query = lax.rem(lax.broadcasted_iota(jnp.int32, scores.shape, 1), jnp.int32(tiles.block_q)) + i * tiles.block_q
    mask = visibility.mask(query, key)
    if segments:
        q_ids, k_ids = (ref[...] for ref in segments)  # [1, rows], [1, block_k]
        k_ids = jnp.broadcast_to(k_ids, (LANES, k_ids.shape[1])).T[:, :1]
        mask &= k_ids == q_ids
    return jnp.where(mask, scores, -jnp.inf)


def dot_nt(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a @ b.T in f32."""
    return _dot(a, b, 1)


def dot_nn(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a @ b in f32."""
    return _dot(a, b, 0)


def _dot(a: jax.Array, b: jax.Array, contracting: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (((1,), (contracting,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
