"""Ragged paged attention in C++ on CPUs: what the shared cases do not reach; unused slots hold NaN."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import Library
from pallas_kernels.paged_attention import make_schedule, ragged_paged_attention
from pallas_kernels.paged_attention.cpu import ragged_paged_attention_cpu
from tests.pallas_kernels import isas
from tests.pallas_kernels.paged_cases import FORMATS, ROWS, check, expected, make_case, tree_of
from tests.pallas_kernels.targets import targeting

MIXED = [(1, 31), (1, 2), (9, 30), (64, 64), (3, 270)]
LONG = [(1, 700), (40, 1100), (1, 257), (70, 70)]  # keys in several parts, of decode rows and of a tile
EXACT = functools.partial(np.testing.assert_array_equal, strict=True)


@functools.partial(jax.jit, static_argnames=("sliding_window", "soft_cap", "library"))
def attention(q, *rest, sliding_window=None, soft_cap=None, tree_mask=None, library=None):
    return ragged_paged_attention_cpu(
        q, *rest, scale=q.shape[-1] ** -0.5, sliding_window=sliding_window, soft_cap=soft_cap, tree_mask=tree_mask,
        schedule=None, with_lse=True, library=library,
    )  # fmt: skip


def check_with(case, wanted, tolerance=1e-5, **options):
    check(functools.partial(attention, **options), case, wanted, 0, tolerance)


@pytest.fixture(params=isas.NAMES)
def library(request) -> Library:
    return isas.library_for(request.param)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_heads_head_dims_and_page_sizes(head_dim, num_heads, num_kv_heads, page_size):
    shape = (90, 5, -(-280 // page_size))
    case = make_case(MIXED, num_heads, num_kv_heads, page_size, shape=shape, head_dim=head_dim)
    check_with(case, expected(*case), 2e-5)


@pytest.mark.parametrize("group", range(1, 10))
def test_every_number_of_heads_in_a_group(group):
    case = make_case([(1, 300), (2, 9)], group, 1, shape=(4, 2, 19), head_dim=40)
    check_with(case, expected(*case))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300}, {"sliding_window": 70, "soft_cap": 0.7}], ids=str)
def test_every_instruction_set(library, options):
    case = make_case(LONG, 6, 2, 16, shape=(120, 5, 70), head_dim=72)
    wanted = expected(*case, options.get("sliding_window"), soft_cap=options.get("soft_cap"))
    check_with(case, wanted, library=library, **options)


def test_every_instruction_set_with_trees(library):
    mask = np.zeros((80, 2), np.uint32)
    mask[3:8], mask[8:72] = tree_of(5), tree_of(64, 2, seed=1)
    case = make_case([(1, 31), (2, 30), (5, 1030), (64, 104)], 3, 1, shape=(80, 5, 66), head_dim=64)
    check_with(case, expected(*case, tree_mask=mask), tree_mask=jnp.asarray(mask), library=library)


@pytest.mark.parametrize("kinds", ["bbb", "fbf", "ffb", "bff"], ids=lambda kinds: f"q,k,v={kinds}")
def test_bfloat16_of_queries_keys_and_values(library, kinds):
    q, k, v, *rest = make_case(LONG, 6, 2, shape=(120, 5, 70), head_dim=64)
    kinds = [{"b": jnp.bfloat16, "f": jnp.float32}[kind] for kind in kinds]
    case = tuple(x.astype(kind) for x, kind in zip((q, k, v), kinds)) + tuple(rest)
    # Products are in f32 whatever the types: only the result is rounded.
    check_with(case, expected(*case), 5e-3 if kinds[0] == jnp.bfloat16 else 1e-5, library=library)


@pytest.mark.parametrize(
    "formats", ["int8_float8", "kivi2_int4", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS)]
)
@pytest.mark.parametrize("page_size", [16, pytest.param(7, marks=pytest.mark.slow)])
def test_quantized_pages(library, formats, page_size):
    """Rows whose keys are in several parts, with a window that starts within a page; groups of 3 and of 4 heads."""
    for num_heads, head_dim, options in ((6, 64, {}), (4, 96, {"sliding_window": 301, "soft_cap": 0.7})):
        shape = (120, 5, -(-1100 // page_size))
        case = make_case(LONG, num_heads, num_heads // 3, page_size, shape=shape, head_dim=head_dim, formats=formats)
        wanted = expected(*case, options.get("sliding_window"), soft_cap=options.get("soft_cap"))
        check_with(case, wanted, 2e-5, library=library, **options)


@pytest.mark.parametrize("formats", [None, "int8_float8", "kivi2_int4"])
def test_a_row_does_not_depend_on_the_others(library, formats):
    """Alone, and in a batch where it stands elsewhere, its bits are the same: for decode rows, tiles and trees."""
    rows = [(1, 700), (40, 1100), (1, 31), (70, 70), (3, 270)]
    q, k, v, pages, kv_lens, cu = make_case(rows, 6, 2, shape=(120, 5, 70), head_dim=64, formats=formats)
    whole = attention(q, k, v, pages, kv_lens, cu, None, library=library)
    for s, (q_len, kv_len) in enumerate(rows):
        alone = attention(
            q[cu[s] : cu[s + 1]], k, v, pages[s : s + 1], np.int32([kv_len]), np.int32([0, q_len]), None,
            library=library,
        )  # fmt: skip
        for got, want in zip(alone, whole):
            EXACT(got, want[cu[s] : cu[s + 1]])


@pytest.mark.parametrize("window", [None, 100])
def test_a_prompt_in_chunks_is_the_prompt(library, window):
    n = 500
    q, k, v, pages, _, _ = make_case([(n, n)], 3, 1, shape=(n, 1, 32), head_dim=64)
    whole = attention(q, k, v, pages, np.int32([n]), np.int32([0, n]), None, sliding_window=window, library=library)
    bounds = [0, 1, 38, 39, 103, 330, n]
    for start, end in itertools.pairwise(bounds):
        chunk = attention(
            q[start:end], k, v, pages, np.int32([end]), np.int32([0, end - start]), None, sliding_window=window,
            library=library,
        )  # fmt: skip
        for got, want in zip(chunk, whole):
            np.testing.assert_allclose(got, want[start:end], atol=2e-6, rtol=2e-6)


def test_pages_before_the_window_are_not_read():
    q, k, v, pages, kv_lens, cu = make_case([(1, 400), (40, 400)], 3, 1, shape=(41, 2, 25), head_dim=64)
    wanted = expected(q, k, v, pages, kv_lens, cu, 50)
    gone = np.unique(np.concatenate([pages[0, : 350 // 16], pages[1, : 311 // 16]]))
    k, v = (x.at[:, gone].set(jnp.nan) for x in (k, v))
    check_with((q, k, v, pages, kv_lens, cu), wanted, sliding_window=50)


def test_scores_of_any_size(library):
    """exp and tanh over their whole range: scores from -1e4 to 1e4, one key much above the others, all alike."""
    rng = np.random.default_rng(0)
    q, k, v, pages, kv_lens, cu = make_case([(1, 200), (2, 200), (1, 1)], 3, 1, shape=(4, 3, 13), head_dim=32)
    factor = jnp.asarray(rng.choice([0.0, 1e-3, 1.0, 30.0, 1e3], (q.shape[0], q.shape[1], 1)), q.dtype)
    case = (q * factor, k, v, pages, kv_lens, cu)
    for soft_cap in (None, 5.0, 1e3):
        check_with(case, expected(*case, soft_cap=soft_cap), 5e-5, soft_cap=soft_cap, library=library)


def test_exp_is_accurate(library):
    """The weight of a key against one other is a logistic function of the difference of their scores."""
    difference = np.concatenate([np.linspace(0, 88, 3000), np.geomspace(1e-6, 1, 1000)]).astype(np.float32)
    n = len(difference)
    q = np.zeros((n, 1, 8), np.float32)
    q[:, 0, 0] = difference
    k = np.zeros((1, 1, 2, 8), np.float32)
    k[0, 0, 1, 0] = -1
    v = np.zeros((1, 1, 2, 8), np.float32)
    v[0, 0, 1, 0] = 1
    out, lse = ragged_paged_attention_cpu(
        *map(jnp.asarray, (q, k, v, np.zeros((n, 1), np.int32), np.full(n, 2, np.int32), np.arange(n + 1))), None,
        scale=1.0, sliding_window=None, soft_cap=None, tree_mask=None, schedule=None, with_lse=True, library=library,
    )  # fmt: skip
    exact = np.exp(-difference.astype(np.float64))
    np.testing.assert_allclose(out[difference < 87, 0, 0], (exact / (1 + exact))[difference < 87], rtol=4e-7)
    np.testing.assert_allclose(lse[:, 0], np.log1p(exact), atol=2e-7)


def test_in_loops_and_under_vmap():
    case = make_case(MIXED, 6, 2, shape=(90, 5, 18), head_dim=64)
    q, k, v, pages, kv_lens, cu = (jnp.nan_to_num(x) if x.dtype == jnp.float32 else x for x in map(jnp.asarray, case))
    one = attention(q, k, v, pages, kv_lens, cu, None)[0]
    both = jax.vmap(lambda q: attention(q, k, v, pages, kv_lens, cu, None)[0])(jnp.stack([q, 2 * q]))
    EXACT(both[0], one)
    scanned, _ = jax.lax.scan(lambda q, _: (attention(q, k, v, pages, kv_lens, cu, None)[0], None), q, length=2)
    looped = jax.lax.fori_loop(0, 2, lambda _, q: attention(q, k, v, pages, kv_lens, cu, None)[0], q)
    EXACT(scanned, attention(one, k, v, pages, kv_lens, cu, None)[0])
    EXACT(looped, scanned)


def test_is_the_choice_and_its_schedule_costs_nothing():
    """The work list of XLA's loops is not computed when nobody reads it."""
    case = make_case(MIXED, 6, 2, shape=(90, 5, 18), head_dim=64)

    @jax.jit
    def run(q, k, v, pages, kv_lens, cu):
        schedule = make_schedule(90, 16, 18, kv_lens, cu, jnp.int32(2))
        return ragged_paged_attention(q, k, v, pages, kv_lens, cu, jnp.int32(2), scale=1.0, schedule=schedule)

    text = run.lower(*case).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert "jaxinfer_ragged_paged_attention" in entry
    assert not [op for op in ("while", "fusion(", "copy(", "reduce") if op in entry], entry


def test_padding_alone_and_no_rows():
    q, k, v, pages, kv_lens, cu = make_case([], 6, 2, shape=(5, 3, 2), head_dim=64)
    out, lse = attention(q, k, v, pages, kv_lens, cu, None)
    EXACT(out, np.zeros_like(out))
    EXACT(lse, np.full_like(lse, -np.inf))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 12}, "head_dim to be a multiple of 8, got 12"),
        ({"dtype": jnp.float16}, "reads float32 and bfloat16, the queries are float16"),
        ({"formats": "kivi2"}, "bytes of a token and head to be a multiple of 8, the keys have 4"),
        ({"formats": ("int8", "channel4")}, "a scale a channel with keys of 4 or 2 bits, not the 4-bit values"),
    ],
)
def test_declines(change, message):
    case = make_case(ROWS["one_token"][0], shape=(1, 1, 1), **({"head_dim": 16} | change))
    with pytest.raises(NotImplementedError, match=message):
        attention(*case, None)


def test_declines_other_devices():
    case = make_case(ROWS["one_token"][0], shape=(1, 1, 1))
    with targeting("h200"), pytest.raises(NotImplementedError, match="cpu is for CPUs, this is gpu"):
        attention(*case, None)
