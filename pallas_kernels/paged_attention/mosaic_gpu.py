"""Ragged paged attention on Hopper GPUs (H100, H200) in Pallas Mosaic GPU.

Decode rows and all others are two launches of one kernel with different tiles. A launch is a list of work items
(`work.py`), each a tile of 64 or 128 query rows of one KV head against a range of key blocks; the G query heads of the
head share every load. Items of one tile are combined by their log-sum-exp.

FLOPs: 4 * N * H per visible (query, key) pair, of which wgmma does 64 / G times as many for decode rows, where it
waits for memory anyway. Bytes: 2 * K * H * itemsize per key and tile.

Expected on an H200 (not measured on hardware). Decode: a key and a value of H = 128 bf16 are 512 bytes, its 64 query
rows 32,768 FLOPs and 64 exponentials a key: 31 % and 16 % of what the card could do in the time memory takes, so
memory bounds it; 85 % of 4.8 TB/s, since the ring keeps 96 KB in flight an SM. Prefill: two matmuls of 64 x 128 x H
a warpgroup and block under the other's softmax, 55 to 65 % of 989 TFLOP/s; the gather by pages costs one TMA
instruction more per page, not bytes. Quantized pages: each value is written once more and read once more in shared
memory (6 bytes for an int8), which bounds int4 at about 60 % of memory bandwidth, still 1.2 times int8 in tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.paged_attention.combine import combine
from pallas_kernels.paged_attention.mosaic_gpu_kernel import KernelConfig, run_kernel
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.paged_attention.tiles import BLOCK_Q, TileConfig, decode_tiles, prefill_tiles
from pallas_kernels.paged_attention.work import Work, decode_work, prefill_work, token_places
from pallas_kernels.pages import Pages, QuantizedPages
from pallas_kernels.target import require_hopper


def ragged_paged_attention_mosaic_gpu(
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
    tiles: TileConfig | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """See `ragged_paged_attention`; `tiles` are for both launches."""
    require_hopper(interpret)
    if before_own_page:
        raise NotImplementedError("every token sees its own page")
    del schedule, with_lse  # the kernel has its own work list, and the log-sum-exp at no cost
    T, N, H = q.shape
    K, _, page_size, _ = k_pages.shape
    _check_supported(q, k_pages, v_pages, N // K)
    quantized = isinstance(k_pages, QuantizedPages) or isinstance(v_pages, QuantizedPages)
    if quantized and tiles is not None and tiles.warpgroups > 1:
        raise NotImplementedError("quantized pages are made bf16 by the one warpgroup that uses them, not by two")
    options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap, "interpret": interpret}

    t = dataclasses.replace(tiles or decode_tiles(K, H, page_size), warpgroups=1)
    work = decode_work(kv_lens, cu_q_lens, num_decode_rows, t.block_k, t.num_items, sliding_window)
    launches = [_launch("ragged_paged_attention_decode", t, work, q, k_pages, v_pages, page_indices, None, **options)]
    if num_decode_rows is not None:
        t = tiles or prefill_tiles(K, H, page_size, quantized, tree_mask is not None)
        per_job = t.warpgroups * (BLOCK_Q // (N // K))
        work = prefill_work(T, per_job, kv_lens, cu_q_lens, num_decode_rows, t.block_k, t.num_items, sliding_window)
        name = "ragged_paged_attention_prefill"
        launches.append(_launch(name, t, work, q, k_pages, v_pages, page_indices, tree_mask, **options))
    out, lse = jnp.zeros(q.shape, jnp.float32), jnp.full((T, N), -jnp.inf)
    for has, new_out, new_lse in launches:  # every token is in at most one of them
        out = jnp.where(has[:, None, None], new_out, out)
        lse = jnp.where(has[:, None], new_lse, lse)
    return out.astype(q.dtype), lse


def _check_supported(q: jax.Array, k_pages: Pages, v_pages: Pages, group: int) -> None:
    H, page_size = q.shape[2], k_pages.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"wgmma multiplies bf16 and f16, the queries are {q.dtype}")
    if H % 16 or H > 256:
        raise NotImplementedError(f"head_dim must be a multiple of 16 up to 256, got {H}")
    if group > BLOCK_Q:
        raise NotImplementedError(f"at most {BLOCK_Q} query heads can share a KV head, got {group}")
    if page_size < 8 or page_size & (page_size - 1):
        raise NotImplementedError(f"page_size must be a power of two from 8 on, got {page_size}")
    for name, pages in (("keys", k_pages), ("values", v_pages)):
        if not isinstance(pages, QuantizedPages):
            if pages.dtype != q.dtype:
                raise NotImplementedError(f"{name} are {pages.dtype} but queries {q.dtype}")
            continue
        if pages.axis == "channel" and page_size < 64:
            raise NotImplementedError(f"channel scales need page_size 64 or more, {name} have {page_size}")
        if pages.data.shape[-1] % 16:
            raise NotImplementedError(f"TMA copies rows of 16 bytes, {name} have {pages.data.shape[-1]} a token")


def _launch(
    name: str, tiles: TileConfig, work: Work, q: jax.Array, k_pages: Pages, v_pages: Pages, page_indices: jax.Array,
    tree_mask: jax.Array | None, *, scale: float, sliding_window: int | None, soft_cap: float | None, interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns for each token whether it has a job here, its output f32[T, N, H] and log-sum-exp f32[T, N]."""
    T, N, H = q.shape
    K = k_pages.shape[0]
    G = N // K
    jobs, per_job = work.tokens.shape
    groups, per_group = tiles.warpgroups, per_job // tiles.warpgroups
    rows = -(-G // 8) * 8 if per_job == 1 else BLOCK_Q  # a tile of shared memory has 8 rows
    tokens = jnp.clip(work.tokens, 0, T - 1)

    def tiled(x: jax.Array) -> jax.Array:
        """[T, K, G, n] -> [J, K, warpgroups, rows, n]."""
        x = x[tokens].reshape(jobs, groups, per_group, *x.shape[1:]).transpose(0, 3, 1, 2, 4, 5)
        x = x.reshape(jobs, K, groups, per_group * G, -1)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, rows - per_group * G), (0, 0)))

    def untiled(x: jax.Array) -> jax.Array:
        """[J, K, warpgroups, rows, n] -> [J, per_job, N, n]."""
        x = x[:, :, :, : per_group * G].reshape(jobs, K, groups, per_group, G, -1)
        return x.transpose(0, 2, 3, 1, 4, 5).reshape(jobs, per_job, N, -1)

    tree = None
    if tree_mask is not None:  # i32[W, J, warpgroups, rows]
        words = jnp.broadcast_to(tree_mask.astype(jnp.int32)[:, None, None], (T, 1, G, tree_mask.shape[1]))
        words = words[tokens].reshape(jobs, groups, per_group * G, -1)
        tree = jnp.pad(words, ((0, 0), (0, 0), (0, rows - per_group * G), (0, 0))).transpose(3, 0, 1, 2)
    config = KernelConfig(
        tiles, G, per_group, rows, H, q.dtype, scale, sliding_window, soft_cap, 0 if tree is None else len(tree)
    )
    q_tiles = tiled(q.reshape(T, K, G, H))
    out, lse = run_kernel(config, work.items, q_tiles, k_pages, v_pages, page_indices, tree, interpret, name)
    out, lse = combine(work, out, lse[..., :rows])
    out, lse = untiled(out), untiled(lse[..., None])[..., 0]
    job, place, has = token_places(work, T)
    return has, out[job, place], lse[job, place]
