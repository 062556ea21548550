"""Tile sizes of the grouped product."""

import dataclasses

SHARED_MEMORY = 227 * 1024 - 1024  # bytes of a block on Hopper, less the barriers
SMS = 132  # H100 SXM, H200


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Sizes of the Mosaic GPU kernel.

    Attributes:
        block_rows: rows of a tile: 8, 16, 32, 64 or 128. Below 64 only so many rows are loaded, though wgmma
            computes 64; 128 is two consumers of 64 rows.
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
    programs: int = SMS

    def check(self, n: int, k: int) -> None:
        """Refuses a matrix that the tiles do not divide.

        Raises:
            ValueError: sizes that do not fit.
        """
        if n % self.block_n or k % (self.block_k * self.splits):
            raise ValueError(f"{self} does not divide a matrix [{n}, {k}]")


def largest_divisor(n: int, candidates: tuple[int, ...]) -> int:
    """Returns the first of `candidates` that divides n.

    Raises:
        NotImplementedError: none does.
    """
    for candidate in candidates:
        if n % candidate == 0:
            return candidate
    raise NotImplementedError(f"mosaic_gpu needs a dimension that is a multiple of {candidates[-1]}, got {n}")


def power_of_two(n: int, low: int, high: int) -> int:
    """Returns the least power of two that is at least n, within [low, high]."""
    return min(max(1 << (n - 1).bit_length(), low), high)


def stages_that_fit(rows: int, block_n: int, block_k: int, io_slots: int, io_itemsize: int) -> int:
    """Returns the most steps, up to 6, that fit into shared memory with 16-bit operands."""
    ring = SHARED_MEMORY - io_slots * rows * block_n * io_itemsize
    return min(6, ring // (2 * block_k * (rows + block_n)))


def choose_tiles(num_rows: int, num_groups: int, n: int, k: int) -> TileConfig:
    """Returns tiles for experts of `num_rows / num_groups` rows.

    A block of the mean number of rows, so that few rows of a tile are another expert's. 128 x 256 (two warpgroups of
    64 x 256) is the tile at which wgmma, not shared memory, is the limit; 3 steps of 48 KiB and one result of 64 KiB
    fill an SM. Smaller blocks are bound by the reading of weights: 64 x 256 and more steps in flight.

    Raises:
        NotImplementedError: N or K is no multiple of 16.
    """
    block_rows = power_of_two(-(-num_rows // num_groups), 8, 128)
    block_n = largest_divisor(n, (256, 128, 64, 32, 16))
    block_k = largest_divisor(k, (64, 32, 16))
    rows = max(block_rows, 64)
    io_slots = 1 if rows == 128 and block_n == 256 else 2
    consumers = 2 if rows == 128 or block_n >= 64 else 1
    stages = stages_that_fit(rows, block_n, block_k, io_slots, 2)
    return TileConfig(block_rows, block_n, block_k, stages, io_slots, consumers)
