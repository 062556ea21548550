"""Every implementation of ragged paged attention against a float64 loop; unused slots hold NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import make_schedule, ragged_paged_attention
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


T, S, M = 440, 20, 22  # all of ROWS fit: one compilation serves them


def make_case(rows, num_heads=4, num_kv_heads=2, page_size=16, dtype=jnp.float32, *, shape=(T, S, M), seed=0):
    """q, pages and row arrays; rows are filled up with empty ones, tokens with NaN, unused slots hold NaN."""
    rng = np.random.default_rng(seed)
    T, S, M = shape
    head_dim, num_pages = 16, 1 + S * M
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
    arrays = [jnp.asarray(x, dtype) for x in (q, k_pages, v_pages)]
    return *arrays, page_indices, np.array([kv_len for _, kv_len in rows], np.int32), cu_q_lens


def expected(q, k_pages, v_pages, page_indices, kv_lens, cu_q_lens, sliding_window=None):
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (q, k_pages, v_pages))
    out = np.zeros_like(q)
    group = q.shape[1] // k_pages.shape[0]
    for s, kv_len in enumerate(np.asarray(kv_lens)):
        k, v = (pages[:, page_indices[s]].reshape(pages.shape[0], -1, q.shape[2]) for pages in (k_pages, v_pages))
        for t in range(cu_q_lens[s], cu_q_lens[s + 1]):
            position = kv_len - cu_q_lens[s + 1] + t
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for n in range(q.shape[1]):
                scores = k[n // group, first : position + 1] @ q[t, n] * q.shape[2] ** -0.5
                weights = np.exp(scores - scores.max())
                out[t, n] = weights / weights.sum() @ v[n // group, first : position + 1]
    return out


@functools.partial(jax.jit, static_argnames=("sliding_window", "implementation"))
def run(q, *rest, **options):
    return ragged_paged_attention(q, *rest, scale=q.shape[-1] ** -0.5, **options)


def check(case, wanted, num_decode_rows, tolerance=1e-5, **options):
    rows = None if num_decode_rows is None else np.int32(num_decode_rows)
    first, second = (np.asarray(run(*case, rows, **options), np.float64) for _ in range(2))
    valid = case[-1][-1]
    np.testing.assert_allclose(first[:valid], wanted[:valid], atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(first[valid:], 0)
    np.testing.assert_array_equal(first, second)


@functools.cache
def case_and_answer(name, window):
    case = make_case(ROWS[name][0])
    return case, expected(*case, window)


@pytest.mark.parametrize("window", [None, 1, 8, 40, 1000])
@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("name", ROWS)
def test_matches_float64(name, implementation, window):
    case, wanted = case_and_answer(name, window)
    check(case, wanted, ROWS[name][1], implementation=implementation, sliding_window=window)


@pytest.mark.parametrize("num_decode_rows", [0, 1, 3])
def test_number_of_decode_rows_changes_nothing(num_decode_rows):
    case, wanted = case_and_answer("decode", None)
    check(case, wanted, num_decode_rows, implementation="xla", sliding_window=None)


@pytest.mark.parametrize("window", [None, 8])
def test_all_rows_are_decode_rows(window):
    rows = [(1, 3 + 7 * i) for i in range(19)]
    rows[4] = (1, 352)
    case = make_case(rows, shape=(19, 19, M))
    check(case, expected(*case, window), None, sliding_window=window)


def test_a_schedule_may_be_given():
    case, wanted = case_and_answer("mixed", 8)
    make = jax.jit(make_schedule, static_argnums=(0, 1, 2, 6))
    schedule = make(T, 16, M, *case[-2:], np.int32(2), 8)
    check(case, wanted, 2, sliding_window=8, schedule=schedule)


@pytest.mark.parametrize(
    ("rows", "num_decode_rows", "num_heads", "num_kv_heads", "page_size", "shape"),
    [
        ([(1, 1)], 1, 4, 2, 16, (1, 1, 1)),  # nothing is padding
        ([(1, 31), (1, 2), (9, 30), (3, 70)], 2, 3, 3, 1, (17, 4, 300)),
        ([(1, 300), (1, 2), (140, 301)], 2, 6, 1, 64, (142, 5, 5)),
        ([(1, 700), (9, 30), (3, 520)], 1, 9, 3, 512, (16, 3, 2)),
    ],
)
def test_heads_page_sizes_and_shapes(rows, num_decode_rows, num_heads, num_kv_heads, page_size, shape):
    case = make_case(rows, num_heads, num_kv_heads, page_size, shape=shape)
    check(case, expected(*case), num_decode_rows, implementation="xla")


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_bfloat16(implementation):
    rows, num_decode_rows = ROWS["mixed"]
    case = make_case(rows, dtype=jnp.bfloat16, shape=(110, 5, 17))
    check(case, expected(*case), num_decode_rows, 1e-2, implementation=implementation)


@pytest.mark.parametrize(
    ("change", "message"),
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
    case = dict(zip(names, make_case([(1, 4)], shape=(4, 1, 8))))
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**(case | {"num_decode_rows": jnp.int32(1), "scale": 1.0} | change))
