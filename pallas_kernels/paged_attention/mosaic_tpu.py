"""Ragged paged attention on TPU."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.paged_attention.mosaic_tpu_decode import decode
from pallas_kernels.paged_attention.mosaic_tpu_prefill import prefill
from pallas_kernels.paged_attention.mosaic_tpu_work import decode_work, prefill_work
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.paged_attention.tpu_tiles import TileConfig, choose_tiles
from pallas_kernels.pages import Pages, QuantizedPages
from pallas_kernels.target import require_tpu

MAX_TABLE_BYTES = 3 * 2**18  # of the 1 MiB of scalar memory
MAX_TREE_WORDS = 16


def ragged_paged_attention_mosaic_tpu(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_indices: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""] | None,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tree_mask: UInt32[Array, "T W"] | None,
    before_own_page: bool = False,
    schedule: Schedule | None,
    with_lse: bool,
    interpret: Any = False,
    tiles: TileConfig | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Returns output and log-sum-exp; arguments as for `ragged_paged_attention`, `num_decode_rows` being a hint.

    Two kernels, each one loop over a work list (`mosaic_tpu_work`) that is made from the lengths and prefetched into
    scalar memory with the page table: rows with one query token, and rows with several (left out if
    `num_decode_rows` is None). The cache stays in HBM. A block of whole pages is copied, all KV heads of a page in one
    strided descriptor, while the block before it is computed, be it of another row; what causality or the window hides
    is not copied. Online softmax as in FlashAttention (Dao et al., 2022, Algorithm 1); ragged batches over pages as in
    PagedAttention (Kwon et al., 2023). Quantized pages become the matmul's dtype in VMEM, after the copy: scales and
    zeros of tokens multiply the scores and the weights, those of channels the pages.

    FLOPs: 4 * N * H per visible (token, key) pair; the decode kernel issues K times that (see `decode`), the prefill
    kernel whole tiles. Bytes: 2 * K * H * itemsize per key and work item, plus q, output, and 4 * N per token of
    log-sum-exp.
    Tiles: `tpu_tiles`. VMEM, 8 KV heads of 128 in bfloat16: four buffers of 512 keys, 4 MiB, for decode; 2 MiB and
    9 MiB of state (128 tokens, 32 heads) for prefill; the limit asked for is 48 MiB of 128.

    Expected, not measured on hardware:
        Decode is bound by HBM. 512 keys of 8 heads are 2 MiB: 2.6 us on v5e (819 GB/s), 1.3 us on v6e (1640 GB/s).
        Meanwhile 64 tiles of 128 x 128 go through v5e's four matrix units, at most 128 cycles each or 1.4 us at
        1.5 GHz; the copies of 2 * 32 pages of 16 are issued in about 20 cycles each or 0.9 us.
        A step of 128 rows with long caches should so reach 80 % of v5e's bandwidth and 60 % of v6e's, which is nearer
        to being bound by the pushes; rows under 512 keys are bound by the 1 to 2 us latency of an item instead.
        Prefill is bound by the vector unit at H = 128: about 12 operations a score on 4 x 1024 lanes against 512 FLOPs
        on the matrix units, hence about half of 197 TFLOP/s on v5e, and less of v6e's 918.

    Layout: XLA tiles the last two dimensions, so a last dimension under 128 (H of 64 to 96; packed int4 at H = 128;
    scales of tokens at page_size under 128) is padded to 128 lanes and saves no memory. Left free, XLA also transposes
    such a parameter of the jitted step, and then copies the whole cache in every call: pin row-major layouts
    (`jax.experimental.layout`) there. With H a multiple of 128 neither happens.

    Raises:
        NotImplementedError: not a TPU; float16; a page table over 768 KiB; trees of over 512 tokens.
    """
    require_tpu(interpret)
    if before_own_page:
        raise NotImplementedError("every token sees its own page")
    del schedule, with_lse
    _require_supported(q, k_pages, v_pages, page_indices, tree_mask)
    T, N, H = q.shape
    S, M = page_indices.shape
    K, _, page_size, _ = k_pages.shape
    if tiles is None:
        tiles = choose_tiles(T, N, K, H, M * page_size)
    page_indices, kv_lens, cu_q_lens = (x.astype(jnp.int32) for x in (page_indices, kv_lens, cu_q_lens))
    token = jnp.arange(T, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32), S - 1)

    options = {"scale": scale, "soft_cap": soft_cap, "interpret": interpret}
    out, lse = decode(
        q, k_pages, v_pages, page_indices, decode_work(kv_lens, cu_q_lens, sliding_window),
        block_k=_whole_pages(tiles.decode_block_k, page_size), **options,
    )  # fmt: skip
    if num_decode_rows is not None:
        work = prefill_work(kv_lens, cu_q_lens, T, tiles.prefill_block_q, sliding_window)
        outs = prefill(
            q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, work, sliding_window=sliding_window,
            tree_mask=tree_mask, block_q=tiles.prefill_block_q,
            block_k=_whole_pages(tiles.prefill_block_k, page_size), **options,
        )  # fmt: skip
        is_decode = jnp.diff(cu_q_lens)[row] == 1
        out = jnp.where(is_decode[:, None, None], out, outs[0])
        lse = jnp.where(is_decode[:, None], lse, outs[1])
    is_real = token < cu_q_lens[-1]
    return (
        jnp.where(is_real[:, None, None], out, jnp.zeros_like(out)),
        jnp.where(is_real[:, None], lse, -jnp.inf),
    )


def _whole_pages(keys: int, page_size: int) -> int:
    return max(keys // page_size, 1) * page_size


def _require_supported(
    q: jax.Array, k_pages: Pages, v_pages: Pages, page_indices: jax.Array, tree_mask: jax.Array | None
) -> None:
    """Declines what the kernels can not do, with the reason."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"mosaic_tpu: q must be bfloat16 or float32, a TPU computes in no other; got {q.dtype}"
        )
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not isinstance(pages, QuantizedPages) and pages.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"mosaic_tpu: {name} must be bfloat16, float32 or quantized, got {pages.dtype}")
    table = 4 * math.prod(page_indices.shape)
    if table > MAX_TABLE_BYTES:
        raise NotImplementedError(
            f"mosaic_tpu: the page table {page_indices.shape} takes {table} bytes, scalar memory holds "
            f"{MAX_TABLE_BYTES}; take larger pages or fewer rows"
        )
    if tree_mask is not None and tree_mask.shape[1] > MAX_TREE_WORDS:
        raise NotImplementedError(
            f"mosaic_tpu: trees of {32 * tree_mask.shape[1]} tokens, the kernel unrolls at most {32 * MAX_TREE_WORDS}"
        )
