"""Tile sizes of the grouped product."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Sizes of the Mosaic GPU kernel.

    Attributes:
        block_rows: rows of a tile: 8, 16, 32, 64 or 128. Below 64 only so many rows are loaded, though wgmma computes 64;
            128 is two consumers of 64 rows.
        block_n: columns of a tile, at most 256.
        block_k: depth of a step.
        stages: steps in flight.
        io_slots: buffers for what is added to the product and for the result.
        consumers: warpgroups that multiply, 1 or 2.
        splits: parts of K that are summed apart.
        programs: blocks of threads, one an SM.
    """

    block_rows: int
    block_n: int
    block_k: int = 64
    stages: int = 4
    io_slots: int = 2
    consumers: int = 2
    splits: int = 1
    programs: int = 132
