"""Tile sizes of the Hopper kernels, with the reasoning.

The kernels compute out^T[N, M] = W x^T: a warpgroup takes 64 rows of W as the left operand of wgmma, so that the other
tile side, `block_m` rows of x, can be as narrow as 8.

Few rows of x (decode): the time is that of reading W once at 4.8 TB/s. By Little's law a latency of about 0.8 us needs
3.8 MB in flight, 29 KB an SM; the stages below hold three times that. Every block also reads its share of x from the
L2 cache, `2 * block_m` bytes for every `block_n * bits / 8` bytes of weights: a quarter for 8 rows, 4 bits and 128
outputs, so wide blocks are better, but few blocks leave SMs idle, and splitting K among blocks, which always fills
them, costs another operation that adds the parts: `_microseconds` weighs these.

Many rows (prefill): the tensor cores are the limit, 2048 bf16 products a clock. 64 rows of W times 64 inputs, 4096
weights, take 3 to 4 operations each to become scaled bf16, about 112 clocks of the 128 lanes, and feed
64 * 64 * block_m / 2048 = 2 * block_m clocks of products: 512 for block_m = 256, under which the other warpgroup's
conversion hides. 256 f32 accumulators of 64 rows are 128 registers a thread, so there are two such warpgroups.
"""

import dataclasses
import itertools
import math

NUM_SMS = 132  # H100 SXM and H200
MAX_SHARED_MEMORY = 227 * 1024
SHARED_MEMORY_RESERVE = 7 * 1024  # barriers; every buffer starts at a multiple of 1 KiB
_BYTES_PER_US = 4.8e6 / NUM_SMS  # of one multiprocessor's share of the bandwidth
_FLOPS_PER_US = 989e6 / NUM_SMS  # of one multiprocessor, 16 bits
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
    # One copy of scales covers SCALES_PER_STEP groups; 128 bytes of W a row and step are one line of the cache.
    widest = min(SCALES_PER_STEP * group, 128 * 8 // bits if block_m <= 64 else 128 // x_bytes)
    block_k = next(size for size in (256, 128, 64) if K % size == 0 and size <= max(widest, 64))
    steps = K // block_k
    blocks = (size for size in (256, 192, 128, 64) if N % size == 0 and (size <= 128 or block_m <= 32))
    candidates = [
        TileConfig(block_m, block_n, block_k, 2, splits)
        for block_n, splits in itertools.product(blocks, range(1, min(16, steps) + 1))
    ]
    tiles = min(candidates, key=lambda tiles: (_microseconds(tiles, M, N, K, bits, x_bytes, num_sms), tiles.splits))
    boxes = 0 if group == K else 1 + zero
    while tiles.stages < min(8, -(-steps // tiles.splits)):
        more = dataclasses.replace(tiles, stages=tiles.stages + 1)
        if shared_memory(more, bits, x_bytes, boxes, True) > MAX_SHARED_MEMORY:
            break
        tiles = more
    return tiles


def _microseconds(tiles: TileConfig, M: int, N: int, K: int, bits: int, x_bytes: int, num_sms: int) -> float:
    """A model of the time, to compare tiles only.

    Waves of blocks, one on a multiprocessor. A step takes what its share of the bandwidth needs for the weights (x,
    from the cache, counts half) or what the tensor cores need; a block about 1 us to start and to write. Parts of K
    cost 3 us more: another operation that adds them.
    """
    blocks = -(-M // tiles.block_m) * (N // tiles.block_n) * tiles.splits
    num_bytes = tiles.block_k * (tiles.block_n * bits / 8 + tiles.block_m * x_bytes / 2)
    flops = 2 * tiles.block_m * tiles.block_n * tiles.block_k
    step = max(num_bytes / _BYTES_PER_US, flops / (_FLOPS_PER_US * 2 / x_bytes))
    steps = math.ceil(K // tiles.block_k / tiles.splits)
    return math.ceil(blocks / num_sms) * (steps * step + 1) + 3 * (tiles.splits > 1)
