"""Tile sizes of the Hopper kernels, with the reasoning.

The kernels compute out^T[N, M] = W x^T: a warpgroup takes 64 rows of W as the left operand of wgmma, so that the other
tile side, `block_m` rows of x, can be as narrow as 8.

Few rows of x (decode): the time is that of reading W once at 4.8 TB/s. By Little's law a latency of about 0.8 us needs
3.8 MB in flight, 29 KB an SM; the stages below hold 60 KB of weights or more an SM. Every block also reads its share of
x from the L2 cache, `2 * block_m` bytes for every `block_n * bits / 8` bytes of weights: 256 outputs a block keep that
at an eighth for 8 rows of x and 4 bits. N / 256 blocks are too few for 132 SMs, so K is split, in as many parts as
minimise the number of steps of the busiest SM plus the writing and adding of the partial sums.

Many rows (prefill): the tensor cores are the limit, 2048 bf16 products a clock. 64 rows of W times 64 inputs, 4096
weights, take 3 to 4 operations each to become scaled bf16, about 112 clocks of the 128 lanes, and feed
64 * 64 * block_m / 2048 = 2 * block_m clocks of products: 512 for block_m = 256, under which the other warpgroup's
conversion hides. 256 f32 accumulators of 64 rows are 128 registers a thread, so there are two such warpgroups.
"""

import dataclasses
import math

NUM_SMS = 132  # H100 SXM and H200
MAX_SHARED_MEMORY = 227 * 1024
SHARED_MEMORY_RESERVE = 2 * 1024  # barriers and alignment
SCALES_PER_STEP = 4  # the least box TMA can copy: 16 bytes of f32


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Sizes of one block of threads.

    Attributes:
        block_m: rows of x: 8, 16, 32, 64, 128 or 256.
        block_n: outputs, 64 for each of the (at most 4) computing warpgroups.
        block_k: inputs a step: a multiple of 64 that divides K.
        stages: steps in flight or in use.
        splits: parts of K computed by different blocks.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    splits: int = 1

    def __post_init__(self) -> None:
        if self.block_m not in (8, 16, 32, 64, 128, 256) or self.block_n not in (64, 128, 192, 256):
            raise ValueError(f"block_m must be a power of two of 8..256, block_n 64, 128, 192 or 256, got {self}")
        if self.block_k % 64 or self.stages < 2 or self.splits < 1:
            raise ValueError(f"block_k must be a multiple of 64, stages >= 2, splits >= 1, got {self}")

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply; one more copies."""
        return self.block_n // 64


def shared_memory(tiles: TileConfig, bits: int, x_bytes: int, scale_boxes: int, sums: bool) -> int:
    """Returns the bytes of shared memory of one block."""
    step = tiles.block_n * tiles.block_k * bits // 8 + tiles.block_m * tiles.block_k * x_bytes
    step += scale_boxes * tiles.block_n * SCALES_PER_STEP * 4
    step += tiles.block_m * max(1, tiles.block_k // 32) * 4 if sums else 0
    staging = tiles.warpgroups * 64 * min(tiles.block_m, 64) * 4
    return tiles.stages * step + staging + SHARED_MEMORY_RESERVE


def choose_tiles(
    M: int,
    N: int,
    K: int,
    bits: int,
    group: int,
    zero: bool = False,
    x_bytes: int = 2,
    most_rows: int = 256,
    num_sms: int = NUM_SMS,
) -> TileConfig:
    """Returns tiles for x[M, K] times W[N, K].

    Args:
        M: rows of x.
        N: outputs.
        K: inputs.
        bits: of a weight.
        group: weights with one scale.
        zero: whether there are zero points.
        x_bytes: of an element of x.
        most_rows: the largest block_m, for kernels that need more registers.
        num_sms: multiprocessors.
    """
    block_m = next((size for size in (8, 16, 32, 64, 128) if size >= M), most_rows)
    block_n = _block_n(N, 256 if block_m <= 32 else 128)
    # One copy of scales covers SCALES_PER_STEP groups; 128 bytes of W a row and step are one line of the cache.
    widest = min(SCALES_PER_STEP * group, 128 * 8 // bits if block_m <= 64 else 128 // x_bytes)
    block_k = next(size for size in (256, 128, 64) if K % size == 0 and size <= max(widest, 64))
    boxes = 0 if group == K else 1 + zero
    tiles = TileConfig(block_m, block_n, block_k, 2)
    steps = K // block_k
    stages = 2
    while stages < min(8, steps):
        more = dataclasses.replace(tiles, stages=stages + 1)
        if shared_memory(more, bits, x_bytes, boxes, True) > MAX_SHARED_MEMORY:
            break
        stages += 1
    splits = _splits(-(-M // block_m) * (N // block_n), steps, num_sms)
    return TileConfig(block_m, block_n, block_k, stages, splits)


def _block_n(N: int, most: int) -> int:
    """The widest block that divides N."""
    return next(size for size in (256, 192, 128, 64) if size <= most and N % size == 0)


def _splits(blocks: int, steps: int, num_sms: int) -> int:
    """The number of parts of K with the least makespan.

    That is waves of blocks, each of its steps and about two more to start and to write; four more where partial sums
    must be written in f32 and added.
    """

    def cost(splits: int) -> float:
        waves = math.ceil(blocks * splits / num_sms)
        return waves * (math.ceil(steps / splits) + (2 if splits == 1 else 4))

    return min(range(1, min(16, steps) + 1), key=lambda splits: (cost(splits), splits))
