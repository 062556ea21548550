"""Public function of ragged paged attention: shape checks, dispatch, attention sinks."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.dispatch import dispatch
from pallas_kernels.paged_attention.reference import ragged_paged_attention_reference
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.paged_attention.xla import ragged_paged_attention_xla
from pallas_kernels.pages import Pages, QuantizedPages
from pallas_kernels.target import require_hopper, require_tpu


def _mosaic_gpu(*args: Any, **kwargs: Any) -> Any:
    require_hopper(interpret=False)  # before the import, which takes longer than a refusal should
    from pallas_kernels.paged_attention.mosaic_gpu import ragged_paged_attention_mosaic_gpu

    return ragged_paged_attention_mosaic_gpu(*args, **kwargs)


def _mosaic_tpu(*args: Any, **kwargs: Any) -> Any:
    require_tpu(interpret=False)
    from pallas_kernels.paged_attention.mosaic_tpu import ragged_paged_attention_mosaic_tpu

    return ragged_paged_attention_mosaic_tpu(*args, **kwargs)


def _cpu(*args: Any, **kwargs: Any) -> Any:
    from pallas_kernels.paged_attention.cpu import ragged_paged_attention_cpu

    return ragged_paged_attention_cpu(*args, **kwargs)


IMPLEMENTATIONS = {
    "mosaic_gpu": _mosaic_gpu,
    "mosaic_tpu": _mosaic_tpu,
    "cpu": _cpu,
    "xla": ragged_paged_attention_xla,
    "reference": ragged_paged_attention_reference,
}


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_indices: Int[Array, "S M"],
    kv_lens: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    num_decode_rows: Int[Array, ""] | None,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    tree_mask: UInt32[Array, "T W"] | None = None,
    before_own_page: bool = False,
    schedule: Schedule | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Returns causal attention of a ragged batch over a paged KV cache.

    Row s owns the query tokens `cu_q_lens[s] : cu_q_lens[s + 1]`, which are the last ones of its `kv_lens[s]`
    keys; key j of row s lies in page `page_indices[s, j // page_size]`. Decode, prefill, chunked prefill and
    their mixture are the same call (Ragged Paged Attention; PagedAttention, Kwon et al., SOSP 2023). Position
    biases such as ALiBi are not supported: scores depend on positions through the masks alone.

    Args:
        q: query tokens of all rows, flat. Tokens at or after `cu_q_lens[-1]` are padding; their output is zero.
        k_pages: key pages [K, P, page_size, H], head-major, so that the keys of one head in one page are
            contiguous; an array or `QuantizedPages`.
        v_pages: value pages, of the same shape; their precision may differ from that of the keys.
        page_indices: pages of each row; entries past a row's last page may be any valid page (page 0, the null page).
        kv_lens: keys of each row, this step's tokens included; 0 for an empty row.
        cu_q_lens: prefix sum of the query lengths.
        num_decode_rows: the first so many rows have at most one query token each, token s being that of row s
            (int32 scalar); None says that all rows are such. It only chooses a faster path: any value for which
            that is true gives the same result.
        scale: factor on the scores, usually `H ** -0.5`.
        sliding_window: a token sees only its last `sliding_window` keys, itself included; None sees all.
        soft_cap: scaled scores s become `soft_cap * tanh(s / soft_cap)` (Gemma 2).
        sinks: a logit for each head that takes part in the softmax without a value (gpt-oss).
        tree_mask: for speculative trees (SpecInfer, Medusa): bit b of word w says that the token sees query token
            32 * w + b of its own row, among those not after itself. Itself and the keys before the row's query
            tokens it always sees; a token whose words are all 0 is plainly causal.
        before_own_page: a token sees no key of the page in which it lies itself: what a cache needs whose newest page
            is kept elsewhere. A token that then sees nothing has a log-sum-exp below -1e29 and a finite output.
        schedule: work list made by `make_schedule` from the same lengths and window, to be shared by the layers
            of a step; None makes it here.
        return_lse: also return f32[T, N], the logarithm of the sum of exp(score) over the keys (sinks left out);
            -inf for padding. Results over disjoint keys can be merged with it.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu", "cpu", "xla", "reference", or None for the first of
            these that accepts the arguments.

    Raises:
        ValueError: shapes do not fit together, or the implementation is unknown.
        NotImplementedError: the named implementation can not do this here.
    """
    _check_shapes(q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, sliding_window)
    _check_options(q, sliding_window, soft_cap, sinks, tree_mask)
    out, lse = dispatch(
        "ragged_paged_attention", IMPLEMENTATIONS, implementation,
        q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, num_decode_rows,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, tree_mask=tree_mask,
        before_own_page=before_own_page, schedule=schedule, with_lse=return_lse or sinks is not None,
    )  # fmt: skip
    if sinks is not None:  # exp(sink) more in every denominator
        share = jax.nn.sigmoid(lse - sinks[None].astype(jnp.float32))
        out = (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)
    return (out, lse) if return_lse else out


def _check_shapes(
    q: jax.Array, k_pages: Pages, v_pages: Pages, page_indices: jax.Array, kv_lens: jax.Array,
    cu_q_lens: jax.Array, sliding_window: int | None,
) -> None:  # fmt: skip
    if q.ndim != 3:
        raise ValueError(f"q must have shape [T, N, H], got {q.shape}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if len(pages.shape) != 4 or pages.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name} must have shape [K, P, page_size, H={q.shape[-1]}], got {pages.shape}")
        if isinstance(pages, QuantizedPages):
            _check_scales(name, pages)
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


def _check_scales(name: str, pages: QuantizedPages) -> None:
    K, P, page_size, H = pages.shape
    wanted = (K, P, page_size) if pages.axis == "token" else (K, P, H)
    for part, array in (("scale", pages.scale), ("zero", pages.zero)):
        if array is not None and array.shape != wanted:
            raise ValueError(f"{name}.{part} must have shape {wanted} for axis {pages.axis!r}, got {array.shape}")


def _check_options(
    q: jax.Array,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
) -> None:
    T, N, _ = q.shape
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"sinks must have shape [N={N}], got {sinks.shape}")
    if tree_mask is None:
        return
    if tree_mask.ndim != 2 or tree_mask.shape[0] != T or tree_mask.dtype != jnp.uint32:
        raise ValueError(f"tree_mask must be u32[T={T}, W], got {tree_mask.dtype}[{tree_mask.shape}]")
    if sliding_window is not None:
        raise ValueError(
            "tree_mask and sliding_window exclude each other: the place of a key in a tree is not its position"
        )
