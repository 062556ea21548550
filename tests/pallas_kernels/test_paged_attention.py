"""Ragged paged attention in its XLA forms against float64 loops; unused slots hold NaN."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import make_schedule, ragged_paged_attention
from pallas_kernels.pages import quantize
from tests.pallas_kernels.paged_cases import FORMATS, PAIRS, ROWS, check, expected, make_case, tree_of

IMPLEMENTATIONS = ("cpu", "xla", "reference")
T, S, M = 440, 20, 22  # all of ROWS fit: one compilation serves them
case_of = functools.partial(make_case, shape=(T, S, M))
WRONG_SCALES = dataclasses.replace(quantize(jnp.zeros((2, 9, 16, 16))), scale=jnp.zeros((2, 9, 8)))


@functools.partial(jax.jit, static_argnames=("sliding_window", "soft_cap", "before_own_page", "implementation"))
def attention(q, *rest, **options):
    return ragged_paged_attention(q, *rest, scale=q.shape[-1] ** -0.5, return_lse=True, **options)


def check_with(case, wanted, num_decode_rows, tolerance=1e-5, **options):
    check(functools.partial(attention, **options), case, wanted, num_decode_rows, tolerance)


@functools.cache
def case_and_answer(name, window):
    case = case_of(ROWS[name][0])
    return case, expected(*case, window)


@pytest.mark.parametrize(
    ("implementation", "window"),
    [
        *itertools.product(IMPLEMENTATIONS, (None, 8)),
        *(pytest.param("xla", window, marks=pytest.mark.slow) for window in (1, 1000)),
    ],
)
@pytest.mark.parametrize("name", ROWS)
def test_matches_float64(name, implementation, window):
    case, wanted = case_and_answer(name, window)
    check_with(case, wanted, ROWS[name][1], implementation=implementation, sliding_window=window)


@pytest.mark.parametrize("num_decode_rows", [0, 1, 3])
def test_number_of_decode_rows_changes_nothing(num_decode_rows):
    case, wanted = case_and_answer("decode", None)
    check_with(case, wanted, num_decode_rows, implementation="xla", sliding_window=None)


@pytest.mark.parametrize("window", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_all_rows_are_decode_rows(window):
    rows = [(1, 3 + 7 * i) for i in range(19)]
    rows[4] = (1, 352)
    case = make_case(rows, shape=(19, 19, M))
    check_with(case, expected(*case, window), None, sliding_window=window)


def test_a_schedule_may_be_given():
    case, wanted = case_and_answer("mixed", 8)
    make = jax.jit(make_schedule, static_argnums=(0, 1, 2, 6))
    schedule = make(T, 16, M, *case[-2:], np.int32(2), 8)
    check_with(case, wanted, 2, sliding_window=8, schedule=schedule)


@pytest.mark.parametrize(
    ("rows", "num_decode_rows", "num_heads", "num_kv_heads", "page_size", "shape"),
    [
        ([(1, 1)], 1, 4, 2, 16, (1, 1, 1)),  # nothing is padding
        ([(1, 31), (1, 2), (9, 30), (3, 70)], 2, 3, 3, 1, (17, 4, 300)),
        pytest.param([(1, 300), (1, 2), (140, 301)], 2, 6, 1, 64, (142, 5, 5), marks=pytest.mark.slow),
        pytest.param([(1, 700), (9, 30), (3, 520)], 1, 9, 3, 512, (16, 3, 2), marks=pytest.mark.slow),
    ],
)
def test_heads_page_sizes_and_shapes(rows, num_decode_rows, num_heads, num_kv_heads, page_size, shape):
    case = make_case(rows, num_heads, num_kv_heads, page_size, shape=shape)
    check_with(case, expected(*case), num_decode_rows, implementation="xla")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(implementation):
    rows, num_decode_rows = ROWS["mixed"]
    case = make_case(rows, dtype=jnp.bfloat16, shape=(110, 5, 17))
    check_with(case, expected(*case), num_decode_rows, 1e-2, implementation=implementation)


@pytest.mark.parametrize(
    ("formats", "implementation"),
    [
        *itertools.product(PAIRS, IMPLEMENTATIONS),
        *(pytest.param(name, "xla", marks=pytest.mark.slow) for name in FORMATS),
    ],
)
def test_quantized_pages(formats, implementation):
    rows, num_decode_rows = ROWS["mixed"]
    case = make_case(rows, shape=(110, 5, 17), formats=formats, head_dim=32)
    check_with(case, expected(*case), num_decode_rows, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("formats", "window"), [("kivi2_int4", None), (None, 20)])
def test_before_own_page(formats, window, implementation):
    """Whatever a query's own page holds, it is not read; a query of a row's first page sees nothing."""
    rows, num_decode_rows = ROWS["mixed"]
    q, *pages, page_indices, kv_lens, cu = make_case(rows, shape=(110, 5, 17), formats=formats, head_dim=32)
    case = (q, *pages, page_indices, kv_lens, cu)
    options = {"sliding_window": window, "before_own_page": True}
    wanted = expected(*case, **options)
    got = attention(*case, np.int32(num_decode_rows), implementation=implementation, **options)
    blind = np.isneginf(wanted[1])
    assert blind.any()
    assert (np.asarray(got[1])[blind] < -1e29).all()
    assert np.isfinite(np.asarray(got[0])).all()
    for a, b in zip(got, wanted):
        np.testing.assert_allclose(np.asarray(a)[~blind], b[~blind], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_cap_window_and_sinks(implementation):
    case = case_of(ROWS["mixed"][0])
    options = {"soft_cap": 0.7, "sinks": np.array([-3.0, 0.0, 1.0, 20.0], np.float32)}
    wanted = expected(*case, 8, **options)
    check_with(case, wanted, 2, sliding_window=8, implementation=implementation, **options)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_cap(implementation):
    case = case_of(ROWS["mixed"][0])
    check_with(case, expected(*case, soft_cap=0.7), 2, soft_cap=0.7, implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sinks(implementation):
    case = case_of(ROWS["mixed"][0])
    sinks = np.array([-3.0, 0.0, 1.0, 20.0], np.float32)
    check_with(case, expected(*case, sinks=sinks), 2, sinks=sinks, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("words", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_trees(words, implementation):
    """A decode row, a plain chunk, and trees of 5 and 32 * words tokens in one batch."""
    rows = [(1, 31), (9, 30), (5, 70), (32 * words, 32 * words + 40)]
    mask = np.zeros((160, words), np.uint32)
    mask[10:15], mask[15 : 15 + 32 * words] = tree_of(5, words), tree_of(32 * words, words, seed=1)
    case = make_case(rows, shape=(160, 5, 22))
    wanted = expected(*case, tree_mask=mask)
    plain = expected(*case)[0]
    assert not np.allclose(wanted[0][10:15], plain[10:15])
    np.testing.assert_array_equal(wanted[0][:10], plain[:10])
    check_with(case, wanted, 1, tree_mask=jnp.asarray(mask), implementation=implementation)


def test_results_over_disjoint_keys_merge():
    """Half of a row's keys at a time, joined by the log-sum-exp, is the whole: what split caches rely on."""
    rows = [(1, 64), (1, 48)]
    q, k, v, pages, _, cu = make_case(rows, shape=(2, 2, 4))
    whole = attention(q, k, v, pages, np.array([64, 48], np.int32), cu, np.int32(2))[0]
    parts = [
        attention(q, k, v, pages[:, i : i + 2], np.array(lens, np.int32), cu, np.int32(2))
        for i, lens in ((0, [32, 32]), (2, [32, 16]))
    ]
    total = np.logaddexp(parts[0][1], parts[1][1])
    merged = sum(np.exp(lse - total)[..., None] * np.asarray(out) for out, lse in parts)
    np.testing.assert_allclose(merged, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((4, 16))}, r"q must have shape \[T, N, H\]"),
        ({"v_pages": jnp.zeros((2, 9, 16, 8))}, "v_pages must have shape"),
        ({"k_pages": jnp.zeros((2, 9, 8, 16))}, "k_pages and v_pages must have one shape"),
        ({"q": jnp.zeros((4, 5, 16))}, "5 query heads must be a multiple of the 2 kv heads"),
        ({"kv_lens": jnp.zeros(3, jnp.int32)}, "kv_lens and cu_q_lens must have shapes"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap must be positive"),
        ({"sinks": jnp.zeros(3)}, r"sinks must have shape \[N=4\]"),
        ({"tree_mask": jnp.zeros((4, 1), jnp.int32)}, r"tree_mask must be u32\[T=4, W\]"),
        ({"tree_mask": jnp.zeros((4, 1), jnp.uint32), "sliding_window": 4}, "tree_mask and sliding_window exclude"),
        ({"k_pages": WRONG_SCALES}, r"k_pages.scale must have shape \(2, 9, 16\) for axis 'token'"),
        ({"implementation": "fastest"}, "unknown implementation='fastest'; choose from"),
    ],
)
def test_refuses(change, message):
    names = ("q", "k_pages", "v_pages", "page_indices", "kv_lens", "cu_q_lens")
    case = dict(zip(names, make_case([(1, 4)], shape=(4, 1, 8))))
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**(case | {"num_decode_rows": jnp.int32(1), "scale": 1.0} | change))
