"""Tiles of the TPU kernel."""

import dataclasses

_LANES = 128


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """Blocks of one grid step: `block_m` rows of x, `block_n` outputs, `block_l` stored columns of the weight.

    A stored column is one input of an 8-bit weight or the two of one byte of a 4-bit weight.
    """

    block_m: int
    block_n: int
    block_l: int


def choose_tiles(rows: int, outputs: int, stored: int, unit: int, expansion: int) -> TpuTiles:
    """Returns tiles for x of `rows` rows and a weight stored as [outputs, stored].

    A decode step is bound by the copies of the weight: a block near 1 MiB takes 1.3 us at 819 GB/s (v5e), some times
    the overhead of a grid step, and twice that block leaves most of 16 MiB of VMEM free. With many rows the weight is
    unpacked anew for each block of rows: 512 rows (after `expansion`) give the MXU ten times the unpacking's cycles.
    `block_l` must divide `stored` in whole `unit`s, because what lies past the last input would be added up.

    Args:
        rows: M, padded to whole sublanes.
        outputs: N.
        stored: columns of the stored weight: K, or K / 2 for 4 bits.
        unit: columns multiplied at once: 128, or the columns of a group when they are more.
        expansion: copies of a row of x, one for each group in 128 columns.
    """
    block_m = min(rows, max(32, 512 // expansion))
    longest = 4096 if rows <= 64 else 1024
    fits = [length for length in range(unit, min(stored, longest) + 1, unit) if stored % length == 0]
    block_l = stored if stored <= longest or not fits else fits[-1]
    block_n = 512 if block_l <= 2048 else 256
    return TpuTiles(block_m, outputs if outputs <= block_n else block_n, block_l)


def lane_unit(group: int) -> int:
    """Returns the columns to multiply at once for groups of `group` columns."""
    return max(_LANES, group)
