"""Tile sizes of the Mosaic GPU flash attention kernels and how they were chosen."""

import dataclasses

ROWS = 64
"""Rows of a warpgroup's tile: the M of wgmma."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a thread block may have on Hopper."""


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tiles of the forward kernel: `block_kv` keys a step, `stages` steps of K and of V in shared memory."""

    block_kv: int
    stages: int = 2

    def __post_init__(self) -> None:
        if self.block_kv % 16 or not 16 <= self.block_kv <= 256 or self.stages < 2:
            raise ValueError(
                f"block_kv must be a multiple of 16 from 16 to 256 and stages at least 2, got "
                f"block_kv={self.block_kv} and stages={self.stages}"
            )

    def shared_memory(self, head_dim: int, itemsize: int) -> int:
        """Returns the bytes of shared memory for Q (or O), K and V."""
        return head_dim * itemsize * (2 * ROWS + 2 * self.stages * self.block_kv)


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the two backward kernels: `block_kv` keys a step of dq, `block_q` queries a step of dk and dv.

    `stages` steps are in shared memory.
    """

    block_kv: int
    block_q: int
    stages: int = 2

    def __post_init__(self) -> None:
        for name, block in (("block_kv", self.block_kv), ("block_q", self.block_q)):
            if block % 16 or not 16 <= block <= 256:
                raise ValueError(f"{name} must be a multiple of 16 from 16 to 256, got {block}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")


def forward_tiles(head_dim: int, itemsize: int = 2) -> ForwardTiles:
    """Returns the tiles for `head_dim`.

    Registers decide: a thread of a consumer warpgroup holds H/2 f32 of the output, block_kv/2 of the scores and
    twice block_kv/4 of probabilities in 16 bits, of 232 registers: 64 + 64 + 64 at H = 128 and block_kv = 128,
    128 + 32 + 32 at H = 256 and block_kv = 64. Shared memory follows: 160 KiB and 192 KiB with two stages; the small
    heads have room for more stages, which hide more of the latency of their short steps.
    """
    if head_dim > 128:
        return ForwardTiles(block_kv=64)
    return ForwardTiles(block_kv=128, stages=2 if head_dim * itemsize > 192 else 3)


def backward_tiles(head_dim: int, sliding_window: int | None = None, soft_cap: float | None = None) -> BackwardTiles:
    """Returns the tiles for `head_dim`.

    dk and dv: a thread holds H f32 of gradients (H/2 where the warpgroups share out the columns, at H = 256), block_q
    of scores and their gradients, and block_q/2 of both in 16 bits: 128 + 64 + 32 at H = 128 and block_q = 64. A soft
    cap keeps the scores alive until the gradients come, and a window at H = 256 has more limits: 32 queries a step, as
    64 would spill.
    dq: H/2 f32 of gradients, block_kv of scores and their gradients. At H = 256 that and the 128 KiB of Q and dO leave
    room for 32 keys a step only, at which wgmma waits for shared memory: 3 KiB an instruction of 16 cycles.
    """
    short = (head_dim >= 128 and soft_cap is not None) or (head_dim > 128 and sliding_window is not None)
    return BackwardTiles(block_kv=32 if head_dim > 128 else 64, block_q=32 if short else 64)
