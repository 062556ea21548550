"""Public function of ragged paged attention: shape checks and dispatch."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.paged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.paged_attention.xla import ragged_paged_attention_xla

IMPLEMENTATIONS = {"xla": ragged_paged_attention_xla, "reference": ragged_paged_attention_reference}


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "K P page_size H"],
    v_pages: Float[Array, "K P page_size H"],
    page_indices: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""] | None,
    *,
    scale: float,
    sliding_window: int | None = None,
    schedule: Schedule | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Returns causal attention of a ragged batch over a paged KV cache.

    Row s owns the query tokens `cu_q_lens[s] : cu_q_lens[s + 1]`, which are the last ones of its `kv_lens[s]`
    keys; key j of row s lies in page `page_indices[s, j // page_size]`. Decode, prefill, chunked prefill and
    their mixture are the same call (Ragged Paged Attention; PagedAttention, Kwon et al., SOSP 2023).

    Args:
        q: query tokens of all rows, flat. Tokens at or after `cu_q_lens[-1]` are padding; their output is zero.
        k_pages: key pages, head-major, so that the keys of one head in one page are contiguous.
        v_pages: value pages, of the same shape.
        page_indices: pages of each row; entries past a row's last page may be any valid page (page 0, the null page).
        kv_lens: keys of each row, this step's tokens included; 0 for an empty row.
        cu_q_lens: prefix sum of the query lengths.
        num_decode_rows: the first so many rows have at most one query token each, token s being that of row s
            (int32 scalar); None says that all rows are such. It only chooses a faster path: any value for which
            that is true gives the same result.
        scale: factor on the scores, usually `H ** -0.5`.
        sliding_window: a token sees only its last `sliding_window` keys, itself included; None sees all.
        schedule: work list made by `make_schedule` from the same lengths and window, to be shared by the layers
            of a step; None makes it here.
        implementation: "xla", "reference", or None for the fastest that accepts the arguments.

    Raises:
        ValueError: shapes do not fit together, or the implementation is unknown.
    """
    _check_shapes(q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, sliding_window)
    return dispatch(
        "ragged_paged_attention", IMPLEMENTATIONS, implementation,
        q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, num_decode_rows,
        scale=scale, sliding_window=sliding_window, schedule=schedule,
    )  # fmt: skip


def _check_shapes(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_indices: jax.Array, kv_lens: jax.Array,
    cu_q_lens: jax.Array, sliding_window: int | None,
) -> None:  # fmt: skip
    if q.ndim != 3:
        raise ValueError(f"q must have shape [T, N, H], got {q.shape}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.ndim != 4 or pages.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name} must have shape [K, P, page_size, H={q.shape[-1]}], got {pages.shape}")
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages and v_pages must have one shape, got {k_pages.shape} and {v_pages.shape}")
    if q.shape[1] % k_pages.shape[0]:
        raise ValueError(f"the {q.shape[1]} query heads must be a multiple of the {k_pages.shape[0]} kv heads")
    rows = page_indices.shape[0] if page_indices.ndim == 2 else None
    if rows is None or kv_lens.shape != (rows,) or cu_q_lens.shape != (rows + 1,):
        raise ValueError(
            "page_indices, kv_lens and cu_q_lens must have shapes [S, M], [S] and [S + 1], got "
            f"{page_indices.shape}, {kv_lens.shape} and {cu_q_lens.shape}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}")
