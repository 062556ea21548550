"""Tile sizes of the LoRA product on Hopper: those of its two grouped products."""

import dataclasses

from pallas_kernels.grouped_matmul.tiles import SMS, TileConfig, largest_divisor, power_of_two, stages_that_fit
from pallas_kernels.grouped_matmul.work import max_items


@dataclasses.dataclass(frozen=True)
class LoraTileConfig:
    """Tiles of `a[i] @ x[t]` (shrink) and of `b[i] @ h[t]` (expand)."""

    shrink: TileConfig
    expand: TileConfig


def choose_tiles(num_tokens: int, num_adapters: int, rank: int, d_in: int, d_out: int) -> LoraTileConfig:
    """Returns tiles that read little for nothing, whether the tokens share one adapter or each has its own.

    Shrink: an item reads `block_rows` tokens and R rows of an adapter. With block_rows = R neither can outgrow
    the other: tiles with one token of their own read no more tokens than adapter, and tiles of one adapter
    read it no more often than the tokens. K is split until there is work for every SM.

    Expand: h is small and base is read only for an item's own rows, so the block follows the mean number of tokens.

    Raises:
        NotImplementedError: R, D_in or D_out is no multiple of 16.
    """
    most = power_of_two(num_tokens, 8, 64)
    if rank % 16 or rank > 256:
        raise NotImplementedError(f"mosaic_gpu needs a rank that is a multiple of 16 up to 256 (pad it), got {rank}")
    rows = power_of_two(rank, 8, most)
    # Long steps, so that few barriers are waited for, as long as three fit.
    steps = tuple(k for k in (256, 128, 64, 32, 16) if stages_that_fit(64, rank, k, 2, 4) >= 3)
    block_k = largest_divisor(d_in, steps)
    splits = 1
    items = max_items(num_tokens, num_adapters, rows)
    while splits < 16 and items * splits < SMS and d_in % (2 * splits * block_k) == 0:
        splits *= 2
    shrink = TileConfig(rows, rank, block_k, stages_that_fit(64, rank, block_k, 2, 4), 2, 1, splits)

    rows = power_of_two(-(-num_tokens // num_adapters), 8, most)
    block_n = largest_divisor(d_out, (256, 128, 64, 32, 16))
    block_k = largest_divisor(rank, (64, 32, 16))
    stages = stages_that_fit(64, block_n, block_k, 2, 2)
    expand = TileConfig(rows, block_n, block_k, stages, 2, 2 if block_n >= 64 else 1)
    return LoraTileConfig(shrink, expand)
