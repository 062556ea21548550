"""Tile sizes of the Mosaic GPU page copies."""

import dataclasses

STAGE_BYTES = 32 * 1024  # one copy: large enough for the bandwidth, small enough for several blocks an SM
BLOCK_BYTES = 64 * 1024  # all copies of a block
MAX_ARRAYS = 8  # two tensor maps of 128 bytes each an array


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A page is moved in `parts` copies of `block_rows` rows, that of `arrays` arrays in one launch."""

    parts: int
    block_rows: int
    arrays: int


def choose_tiles(rows: int, row_bytes: int) -> TileConfig:
    """Returns the fewest parts of equal size that fit a stage and a TMA box (256 rows), and the arrays of a block.

    The figures are the usual ones (Little's law: 4.8 TB/s times 1 us is 36 KiB an SM on its way), not measured.
    """
    parts = next(
        n for n in range(1, rows + 1)
        if rows % n == 0 and rows // n <= 256 and (rows // n * row_bytes <= STAGE_BYTES or n == rows)
    )  # fmt: skip
    block_rows = rows // parts
    return TileConfig(parts, block_rows, max(1, min(MAX_ARRAYS, BLOCK_BYTES // (block_rows * row_bytes))))
