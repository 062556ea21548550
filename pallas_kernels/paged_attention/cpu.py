"""Ragged paged attention on CPUs in C++ (`cpu.cc`): pages are read where they lie, nothing is gathered.

A row with one query token reads each key and value once for all query heads that share them; its keys are split over
the threads. Rows with more query tokens are cut into tiles of about 96 query vectors by 64 keys.
How a row is cut depends on its own lengths alone, so that its result is the same in every batch and on every run.

Quantized pages are expanded in registers. For a row with one query token, scales of tokens are put on its scores and
weights, and scales of a page's channels on its queries; a tile's 64 keys are expanded as they are packed.

FLOPs: 4 * N * H per visible (query, key) pair. Bytes: 2 * K * H * itemsize per key and tile.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.cpu import Library, require_cpu
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.pages import Pages, QuantizedPages

NO_WINDOW = 2**40
DTYPES = (jnp.float32, jnp.bfloat16)


def ragged_paged_attention_cpu(
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
    library: Library | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """See `ragged_paged_attention`; `library` is one for another instruction set than this machine's best."""
    del num_decode_rows, schedule, with_lse  # each row's own lengths say what to do; the log-sum-exp costs nothing
    library = library or require_cpu()
    T, N, H = q.shape
    if H % 8:
        raise NotImplementedError(f"cpu needs head_dim to be a multiple of 8, got {H}")
    for name, x in (("queries", q), ("keys", k_pages), ("values", v_pages)):
        if isinstance(x, QuantizedPages):
            _check_quantized(name, x)
        elif x.dtype not in DTYPES:
            raise NotImplementedError(f"cpu reads float32 and bfloat16, the {name} are {x.dtype}")
    call = jax.ffi.ffi_call(
        library.target("ragged_paged_attention"),
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((T, N), jnp.float32)),
        vmap_method="sequential",
    )
    lengths = (jnp.asarray(x, jnp.int32) for x in (page_indices, kv_lens, cu_q_lens))
    out, lse = call(
        q, *lengths, jnp.zeros((T, 0), jnp.uint32) if tree_mask is None else tree_mask,
        *jax.tree.leaves((k_pages, v_pages)), scale=np.float32(scale), window=np.int64(sliding_window or NO_WINDOW),
        soft_cap=np.float32(soft_cap or 0.0),
        before_own_page=before_own_page,
        k_per_channel=isinstance(k_pages, QuantizedPages) and k_pages.axis == "channel",
    )  # fmt: skip
    return out, lse


def _check_quantized(name: str, pages: QuantizedPages) -> None:
    if (pages.zero is None) != (pages.bits == 8):
        raise NotImplementedError(f"cpu needs zero points if, and only if, there are fewer than 8 bits: the {name}")
    if pages.axis == "channel" and (name == "values" or pages.bits == 8):
        raise NotImplementedError(
            f"cpu reads a scale a channel with keys of 4 or 2 bits, not the {pages.bits}-bit {name}"
        )
    if (width := pages.data.shape[-1]) % 8:
        raise NotImplementedError(
            f"cpu needs the bytes of a token and head to be a multiple of 8, the {name} have {width}"
        )
