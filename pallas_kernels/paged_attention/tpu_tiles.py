"""Block sizes of the TPU kernels of ragged paged attention."""

import dataclasses

VMEM_BYTES = 48 * 2**20  # what the kernels may ask for: under half of the 128 MiB of a v5e or v6e core
_LANES = 128


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Blocks of the two kernels; keys are counted in tokens and rounded down to whole pages, to one at least.

    Attributes:
        decode_block_k: keys of one copied block of a row with one query token.
        prefill_block_q: query tokens of one tile, a multiple of 16.
        prefill_block_k: keys of one copied block of a row with several query tokens.
    """

    decode_block_k: int
    prefill_block_q: int
    prefill_block_k: int

    def __post_init__(self) -> None:
        """Checks the tile of query tokens: the memory tiles of bfloat16 have 16 rows."""
        if self.prefill_block_q < 16 or self.prefill_block_q % 16:
            raise ValueError(f"prefill_block_q must be a positive multiple of 16, got {self.prefill_block_q}")
        for name in ("decode_block_k", "prefill_block_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def choose_tiles(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, max_keys: int) -> TileConfig:
    """Returns blocks that hide the copies and fit VMEM.

    Decode moves bytes: a block is as many keys as bring K and V to about 2 MiB in bfloat16 (2.6 us of a v5e's
    819 GB/s, 1.3 us of a v6e's 1640 GB/s), several times the latency of a copy, so that two blocks keep HBM busy.
    Prefill computes: each K/V tile that is pushed into the matrix unit should meet some 512 rows (query tokens of
    one tile times G), and the float32 state of all heads (acc, and m and l on 128 lanes) stays under 8 MiB.
    """
    lanes = -(-head_dim // _LANES) * _LANES
    keys = (2 * 2**20) // (2 * num_kv_heads * lanes * 2)
    keys = max(128, min(1024, 1 << (keys.bit_length() - 1)))
    block_q = max(16, min(256, 4096 * _LANES // (num_heads * lanes), -(-num_tokens // 16) * 16))
    block_q = 1 << (block_q.bit_length() - 1)
    group = num_heads // num_kv_heads
    block_q = max(16, min(block_q, max(512 // group, 16)))
    if num_tokens <= 256:  # mostly short rows: drafts to verify, tails of prompts
        block_q = min(block_q, 32)
    return TileConfig(min(keys, max_keys), block_q, min(256, keys, max_keys))
