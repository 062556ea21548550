"""Tiles of the TPU kernel."""

import dataclasses

from pallas_kernels.quantized_matmul.weights import PACK_BLOCK, QuantizedWeight

_LANES = 128
_EXPANDED_ROWS = 512


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
    the overhead of a grid step, and twice that block leaves most of the VMEM free. With many rows the weight is
    unpacked anew for each block of rows: 512 rows (after `expansion`) give the MXU ten times the unpacking's cycles,
    and 1,024 outputs halve the rereading of x.
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
    block_n = 1024 if rows > 64 else 512 if block_l <= 2048 else 256
    return TpuTiles(block_m, outputs if outputs <= block_n else block_n, block_l)


def group_lanes(weight: QuantizedWeight) -> tuple[int, int, int]:
    """Returns the stored columns of a group in one plane, those multiplied at once, and the groups among the latter.

    Raises:
        NotImplementedError: groups do not fit 128 columns.
    """
    if weight.scale.shape[1] == 1:
        return weight.data.shape[1], _LANES, 1
    if weight.bits == 8:
        lanes, whole = weight.group, True
    else:  # a plane of 32 columns is half a group of 64, or a group of 32 of its own
        plane = PACK_BLOCK // 2
        lanes, whole = max(weight.group // 2, plane), weight.group == plane or weight.group % PACK_BLOCK == 0
    if not whole or (lanes % _LANES and _LANES % lanes):
        raise NotImplementedError(
            f"mosaic_tpu: groups of {weight.group} inputs in {weight.bits} bits do not fit {_LANES} columns"
        )
    return lanes, max(_LANES, lanes), max(1, _LANES // lanes)


def prefer_xla(rows: int, weight: QuantizedWeight) -> bool:
    """Returns whether XLA's form should be taken on a TPU though the kernel could.

    Judged by full compiles for v5e and v6e at N=14336, K=4096 (not measured on hardware). One scale an output in 8
    bits: XLA:TPU converts the codes inside its GEMM, no temporary, 59 MB against the kernel's 60 at M=1: as good, and
    its GEMM is tuned. In 4 bits it does so too, but at M=64 with 211 MB against 38; with many rows the kernel rereads
    x more. Grouped scales: XLA stores the dequantized matrix (118 MB in bf16 or 235 in f32 against 29 of 4 bits), so
    the kernel is preferred until the MXU work of its expanded rows, (expansion - 1) 2 M N K / 197 TFLOP/s, outweighs
    writing and reading that matrix, about 6 N K bytes / 819 GB/s: M (expansion - 1) near 700.
    """
    if weight.scale.shape[1] == 1:
        return weight.bits == 8 or rows > _EXPANDED_ROWS
    try:
        _, _, expansion = group_lanes(weight)
    except NotImplementedError:
        return True
    return rows * (expansion - 1) > _EXPANDED_ROWS
