"""Tile sizes of the Mosaic GPU KV write."""

import dataclasses

NUM_SMS = 132  # H100 and H200
REGISTER_ROWS = 64  # rows of the smallest register tile whose rows can be reduced (the accumulator layout of wgmma)


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """`block_tokens`: tokens of one head that a block writes, at most 64."""

    block_tokens: int

    def __post_init__(self):
        if not 1 <= self.block_tokens <= REGISTER_ROWS:
            raise ValueError(f"block_tokens must be in 1..{REGISTER_ROWS}, got {self.block_tokens}")


def choose_tiles(num_tokens: int, num_heads: int) -> TileConfig:
    """Returns the largest block of 4, 8, ... 64 tokens that still makes two blocks an SM, else 4.

    A block issues its rows one after the other, so a decode step, whose blocks do not fill the card, is fastest with
    few rows a block; a prefill step loads in larger pieces. The register tile has 64 rows in any case: the spare
    ones cost a few instructions, which no memory waits for.
    """
    for block in (64, 32, 16, 8):
        if num_heads * -(-num_tokens // block) >= 2 * NUM_SMS:
            return TileConfig(block)
    return TileConfig(min(4, num_tokens))
