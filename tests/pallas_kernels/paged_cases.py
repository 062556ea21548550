"""Cases of ragged paged attention and their float64 answers, for every implementation; unused slots hold NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import QuantizedPages, dequantize, quantize

ROWS = {  # (q_len, kv_len) of each row, and how many leading rows are decode rows
    "one_token": ([(1, 1)], 1),
    "decode": ([(1, 1), (1, 16), (1, 17), (1, 300)], 4),
    "decode_more_than_a_group": ([(1, 3 + 7 * i) for i in range(19)], 19),
    "decode_as_tiles": ([(1, 5), (1, 33)], 0),
    "prefill": ([(40, 40)], 0),
    "chunk": ([(7, 300)], 0),
    "prefill_more_than_a_tile": ([(300, 321), (130, 130)], 0),
    "mixed": ([(1, 31), (1, 2), (9, 30), (64, 64), (3, 270)], 2),
    "empty_rows": ([(1, 8), (0, 0), (5, 9), (0, 0)], 1),
}
QUANTIZED = {  # keyword arguments of `quantize`
    "int8": {},
    "float8": {"float8": True},
    "int4": {"bits": 4},
    "int2": {"bits": 2},
    "channel4": {"bits": 4, "axis": "channel"},
    "channel2": {"bits": 2, "axis": "channel"},
    None: None,  # the dtype of the case
}
FORMATS = {  # of keys and of values
    "int8": ("int8", "int8"),
    "float8": ("float8", "float8"),
    "int4": ("int4", "int4"),
    "kivi2": ("channel2", "int2"),
    "int8_keys_only": ("int8", None),
    "kivi4_values_int8": ("channel4", "int8"),
}
PAIRS = {  # every format once
    "kivi2_int4": ("channel2", "int4"),
    "int8_float8": ("int8", "float8"),
}


def make_case(
    rows, num_heads=4, num_kv_heads=2, page_size=16, dtype=jnp.float32, *, shape, head_dim=16, seed=0, formats=None
):
    """q, pages and row arrays; rows are filled up with empty ones, tokens with NaN, unused slots hold NaN.

    `formats` is a name in FORMATS or PAIRS, or two in QUANTIZED.
    """
    rng = np.random.default_rng(seed)
    T, S, M = shape
    num_pages = 1 + S * M
    rows = rows + [(0, 0)] * (S - len(rows))
    k_pages, v_pages = (np.full((num_kv_heads, num_pages, page_size, head_dim), np.nan) for _ in range(2))
    order = rng.permutation(np.arange(1, num_pages))
    page_indices = np.zeros((S, M), np.int32)
    for s, (_, kv_len) in enumerate(rows):
        for i in range(-(-kv_len // page_size)):
            page = page_indices[s, i] = order[s * M + i]
            n = min(page_size, kv_len - i * page_size)
            k_pages[:, page, :n] = rng.standard_normal((num_kv_heads, n, head_dim))
            v_pages[:, page, :n] = rng.standard_normal((num_kv_heads, n, head_dim))
    q = rng.standard_normal((T, num_heads, head_dim))
    cu_q_lens = np.cumsum([0] + [q_len for q_len, _ in rows]).astype(np.int32)
    q[cu_q_lens[-1] :] = np.nan
    pages = [
        jnp.asarray(x, dtype) if how is None else _quantized(x, QUANTIZED[how])
        for x, how in zip((k_pages, v_pages), (FORMATS | PAIRS).get(formats, formats) or (None, None), strict=True)
    ]
    return jnp.asarray(q, dtype), *pages, page_indices, np.array([kv_len for _, kv_len in rows], np.int32), cu_q_lens


_dequantize = jax.jit(dequantize)


def _quantized(values, how):
    """Quantized pages in which what was never written is NaN: by data, scale and zero, as far as these can be."""
    unused = np.isnan(values).any(axis=-1)
    return _quantize_with_poison(np.nan_to_num(values).astype(np.float32), unused, **how)


@functools.partial(jax.jit, static_argnames=("bits", "axis", "float8"))
def _quantize_with_poison(values, unused, **how):
    pages = quantize(values, **how)
    poison = unused if pages.axis == "token" else jnp.repeat(unused.all(axis=-1)[..., None], values.shape[-1], axis=-1)
    parts = {name: getattr(pages, name) for name in ("scale", "zero")}
    parts = {name: None if x is None else jnp.where(poison, jnp.nan, x) for name, x in parts.items()}
    data = pages.data
    if jnp.issubdtype(data.dtype, jnp.floating):
        data = jnp.where(unused[..., None], jnp.asarray(jnp.nan, data.dtype), data)
    return dataclasses.replace(pages, data=data, **parts)


def tree_of(tokens, words=1, seed=0):
    """A random forest over `tokens` query tokens as u32[tokens, words]: each token sees its ancestors and itself."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((tokens, words), np.uint32)
    for t in range(tokens):
        parent = int(rng.integers(-1, t)) if t else -1
        if parent >= 0:
            mask[t] = mask[parent]
        mask[t, t // 32] |= np.uint32(1 << (t % 32))
    return mask


def expected(
    q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, sliding_window=None, *, soft_cap=None, sinks=None,
    tree_mask=None, before_own_page=False,
):  # fmt: skip
    """The output and the log-sum-exp, by loops in float64; a token that sees nothing has 0 and -inf."""
    k_pages, v_pages = (_dequantize(x) if isinstance(x, QuantizedPages) else x for x in (k_pages, v_pages))
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (q, k_pages, v_pages))
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    group = q.shape[1] // k_pages.shape[0]
    for s, kv_len in enumerate(np.asarray(kv_lens)):
        k, v = (pages[:, page_indices[s]].reshape(pages.shape[0], -1, q.shape[2]) for pages in (k_pages, v_pages))
        start = kv_len - (cu_q_lens[s + 1] - cu_q_lens[s])
        for t in range(cu_q_lens[s], cu_q_lens[s + 1]):
            position = start + t - cu_q_lens[s]
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            page_size = k_pages.shape[2]
            end = position // page_size * page_size if before_own_page else position + 1
            seen = list(range(first, end))
            if not seen:
                continue
            if tree_mask is not None and tree_mask[t].any():
                bits = np.unpackbits(tree_mask[t].view(np.uint8), bitorder="little")
                seen = [j for j in seen if j < start or j == position or (j - start < len(bits) and bits[j - start])]
            for n in range(q.shape[1]):
                scores = k[n // group, seen] @ q[t, n] * q.shape[2] ** -0.5
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                lse[t, n] = np.logaddexp.reduce(scores)
                total = lse[t, n] if sinks is None else np.logaddexp(lse[t, n], np.float64(sinks[n]))
                out[t, n] = np.exp(scores - total) @ v[n // group, seen]
    return out, lse


def check(run, case, wanted, num_decode_rows, tolerance=1e-5):
    """Runs twice: near `wanted`, zero in padding, bit-equal. `run(*case, num_decode_rows)` gives out and lse."""
    rows = None if num_decode_rows is None else np.int32(num_decode_rows)
    first, second = ([np.asarray(x, np.float64) for x in run(*case, rows)] for _ in range(2))
    valid = case[-1][-1]
    for got, want, padding in zip(first, wanted, (0, -np.inf), strict=True):
        np.testing.assert_allclose(got[:valid], want[:valid], atol=tolerance, rtol=tolerance)
        np.testing.assert_array_equal(got[valid:], padding)
    jax.tree.map(np.testing.assert_array_equal, first, second)
