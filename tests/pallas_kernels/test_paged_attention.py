"""Every implementation of ragged paged attention against a float64 loop; unused slots hold NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS

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


def make_case(rows, num_heads, num_kv_heads, page_size, dtype, *, head_dim=16, padding=3, seed=0):
    rng = np.random.default_rng(seed)
    T = sum(q_len for q_len, _ in rows) + padding
    M = max(2, max(-(-kv_len // page_size) for _, kv_len in rows))
    num_pages = 1 + len(rows) * M
    k_pages, v_pages = (np.full((num_kv_heads, num_pages, page_size, head_dim), np.nan) for _ in range(2))
    order = rng.permutation(np.arange(1, num_pages))
    page_indices = np.zeros((len(rows), M), np.int32)
    for s, (_, kv_len) in enumerate(rows):
        for i in range(-(-kv_len // page_size)):
            page = page_indices[s, i] = order[s * M + i]
            n = min(page_size, kv_len - i * page_size)
            k_pages[:, page, :n] = rng.standard_normal((num_kv_heads, n, head_dim))
            v_pages[:, page, :n] = rng.standard_normal((num_kv_heads, n, head_dim))
    q = rng.standard_normal((T, num_heads, head_dim))
    q[T - padding :] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in (q, k_pages, v_pages)]
    kv_lens = jnp.asarray([kv_len for _, kv_len in rows], jnp.int32)
    cu_q_lens = jnp.asarray(np.cumsum([0] + [q_len for q_len, _ in rows]), jnp.int32)
    return *arrays, jnp.asarray(page_indices), kv_lens, cu_q_lens


def expected(q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, *, scale, sliding_window):
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (q, k_pages, v_pages))
    out = np.zeros_like(q)
    group = q.shape[1] // k_pages.shape[0]
    for s, kv_len in enumerate(np.asarray(kv_lens)):
        k, v = (pages[:, page_indices[s]].reshape(pages.shape[0], -1, q.shape[2]) for pages in (k_pages, v_pages))
        for t in range(cu_q_lens[s], cu_q_lens[s + 1]):
            position = kv_len - cu_q_lens[s + 1] + t
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for n in range(q.shape[1]):
                scores = k[n // group, first : position + 1] @ q[t, n] * scale
                weights = np.exp(scores - scores.max())
                out[t, n] = weights / weights.sum() @ v[n // group, first : position + 1]
    return out


def check(case, num_decode_rows, implementation, tolerance, sliding_window=None):
    scale = case[0].shape[-1] ** -0.5
    run = jax.jit(
        lambda *args: ragged_paged_attention(
            *args, scale=scale, sliding_window=sliding_window, implementation=implementation
        )
    )
    first, second = (np.asarray(run(*case, jnp.int32(num_decode_rows)), np.float64) for _ in range(2))
    valid = int(case[-1][-1])
    wanted = expected(*case, scale=scale, sliding_window=sliding_window)
    np.testing.assert_allclose(first[:valid], wanted[:valid], atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(first[valid:], 0)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("name", ROWS)
def test_matches_float64(name, implementation):
    rows, num_decode_rows = ROWS[name]
    check(make_case(rows, 4, 2, 16, jnp.float32), num_decode_rows, implementation, 1e-5)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("window", [1, 8, 40, 1000])
@pytest.mark.parametrize("name", ["decode", "prefill_more_than_a_tile", "mixed"])
def test_sliding_window(name, window, implementation):
    rows, num_decode_rows = ROWS[name]
    check(make_case(rows, 4, 2, 16, jnp.float32), num_decode_rows, implementation, 1e-5, window)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(3, 3), (6, 1), (9, 3)])
@pytest.mark.parametrize("page_size", [1, 64, 512])
def test_heads_and_page_sizes(num_heads, num_kv_heads, page_size):
    rows, num_decode_rows = ROWS["mixed"]
    check(make_case(rows, num_heads, num_kv_heads, page_size, jnp.float32), num_decode_rows, "xla", 1e-5)


def test_bfloat16():
    rows, num_decode_rows = ROWS["mixed"]
    check(make_case(rows, 4, 2, 16, jnp.bfloat16), num_decode_rows, "xla", 1e-2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": jnp.zeros((4, 16))}, r"q must have shape \[T, N, H\]"),
        ({"v_pages": jnp.zeros((2, 9, 16, 8))}, "v_pages must have shape"),
        ({"k_pages": jnp.zeros((2, 9, 8, 16))}, "k_pages and v_pages must have one shape"),
        ({"q": jnp.zeros((4, 5, 16))}, "5 query heads must be a multiple of the 2 kv heads"),
        ({"kv_lens": jnp.zeros(3, jnp.int32)}, "kv_lens and cu_q_lens must have shapes"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"implementation": "fastest"}, "unknown implementation='fastest'; choose from"),
    ],
)
def test_refuses(change, message):
    names = ("q", "k_pages", "v_pages", "page_indices", "kv_lens", "cu_q_lens")
    case = dict(zip(names, make_case([(1, 4)], 4, 2, 16, jnp.float32)))
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**(case | {"num_decode_rows": jnp.int32(1), "scale": 1.0} | change))
