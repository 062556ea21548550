"""Tile sizes of the Hopper kernel, with their reasons."""

import dataclasses

BLOCK_Q = 64  # query rows (tokens x heads of a group) of a warpgroup: the M of wgmma


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How the kernel cuts its work.

    Attributes:
        block_k: keys of a block. A whole number of pages, or a part of one.
        stages: blocks of keys and of values in flight.
        warpgroups: warpgroups of BLOCK_Q query rows each that share every block.
        num_items: work items for each KV head that splitting may add; enough to fill the card with one row.
    """

    block_k: int = 64
    stages: int = 3
    warpgroups: int = 1
    num_items: int = 32


def decode_tiles(num_kv_heads: int, head_dim: int, page_size: int) -> TileConfig:
    """Returns tiles for rows of one token, which are bound by memory.

    One warpgroup computes: 64 rows hold G query heads, the rest is idle, which costs nothing while the tensor cores
    wait for memory anyway. By Little's law 4.8 TB/s at about 1 us of latency need 36 KB in flight on each of 132 SMs;
    three stages of 64 keys and values of 128 bf16 are 96 KB, and blocks of 64 keys keep the tail of a row short.
    """
    return TileConfig(_block_k(64, page_size), 3 if head_dim <= 128 else 2, 1, _items(num_kv_heads))


def prefill_tiles(num_kv_heads: int, head_dim: int, page_size: int, quantized: bool, has_tree: bool) -> TileConfig:
    """Returns tiles for rows of many tokens, which are bound by arithmetic.

    Two warpgroups share each block: one computes its softmax while the other multiplies. Quantized blocks are made
    bf16 by the one warpgroup that uses them. Blocks of 128 keys take 64 registers a thread for scores, as the output
    does at H = 128; with more (H = 256, the bits of a tree) the compiler would spill.
    """
    if quantized:
        return TileConfig(_block_k(64, page_size), 2, 1, _items(num_kv_heads))
    return TileConfig(_block_k(128 if head_dim <= 128 and not has_tree else 64, page_size), 2, 2, _items(num_kv_heads))


def _block_k(wanted: int, page_size: int) -> int:
    """Blocks are whole pages or lie within one, and are multiples of the 64 rows of the register layout."""
    return wanted if page_size <= wanted or page_size % wanted == 0 else 64


def _items(num_kv_heads: int) -> int:
    return -(-2 * 132 // num_kv_heads)
