"""The Hopper kernel of ragged paged attention in the interpreter, against float64; unused slots hold NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.paged_attention.api import ragged_paged_attention
from pallas_kernels.paged_attention.mosaic_gpu import ragged_paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu_pages import PageRing
from pallas_kernels.paged_attention.tiles import TileConfig
from pallas_kernels.paged_attention.work import decode_work, prefill_work, token_places
from tests.pallas_kernels.gpu_interpreter import interpreted
from tests.pallas_kernels.paged_cases import FORMATS, check, expected, make_case, tree_of
from tests.pallas_kernels.targets import lower, targeting

ONE, TWO = (TileConfig(64, 2, warpgroups, num_items=2) for warpgroups in (1, 2))
MIXED = [(1, 130), (1, 64), (9, 30), (0, 0), (3, 68)]  # two decode rows


def case_of(rows, num_heads=2, num_kv_heads=1, dtype=jnp.bfloat16, head_dim=64, **options):
    return make_case(rows, num_heads, num_kv_heads, dtype=dtype, head_dim=head_dim, **options)


def check_kernel(case, wanted, num_decode_rows, tiles=ONE, detect_races=False, **options):
    scale = case[0].shape[-1] ** -0.5
    options = {"scale": scale, "sliding_window": None, "soft_cap": None, "tree_mask": None} | options
    with interpreted(detect_races) as interpret:
        kernel = functools.partial(
            ragged_paged_attention_mosaic_gpu, schedule=None, with_lse=True,
            tiles=tiles, interpret=interpret, **options,
        )  # fmt: skip
        run = jax.jit(kernel if num_decode_rows is not None else lambda *a: kernel(*a[:6], None))
        check(run, case, wanted, num_decode_rows, 1e-2)


def test_splits_and_lengths_at_block_edges():
    """Rows of one token; two of them are split over several items and joined."""
    case = case_of([(1, n) for n in (1, 63, 64, 65, 300, 400)], shape=(6, 6, 25))
    check_kernel(case, expected(*case), None)


@pytest.mark.parametrize("tiles", [pytest.param(ONE, marks=pytest.mark.slow), TWO], ids=["one", "two"])
def test_mixed_rows(tiles):
    case = case_of(MIXED, shape=(16, 5, 9))
    check_kernel(case, expected(*case), 2, tiles)


@pytest.mark.slow
def test_a_prompt_of_several_tiles():
    case = case_of([(70, 100)], shape=(72, 1, 8))
    check_kernel(case, expected(*case), 0, TWO)


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(1, marks=pytest.mark.slow),
        20,
        pytest.param(64, marks=pytest.mark.slow),
        pytest.param(1000, marks=pytest.mark.slow),
    ],
)
def test_sliding_window(window):
    case = case_of(MIXED, shape=(16, 5, 9))
    check_kernel(case, expected(*case, window), 2, sliding_window=window)


@pytest.mark.slow
def test_soft_cap():
    case = case_of(MIXED, shape=(16, 5, 9))
    check_kernel(case, expected(*case, soft_cap=0.7), 2, soft_cap=0.7)


def test_trees():
    rows = [(1, 70), (9, 30), (5, 66), (40, 64)]
    mask = np.zeros((56, 2), np.uint32)
    mask[10:15], mask[15:55] = tree_of(5, 2), tree_of(40, 2, seed=1)
    case = case_of(rows, shape=(56, 4, 5))
    check_kernel(case, expected(*case, tree_mask=mask), 1, tree_mask=jnp.asarray(mask))


@pytest.mark.parametrize(
    "head_dim",
    [
        80,
        pytest.param(96, marks=pytest.mark.slow),
        pytest.param(128, marks=pytest.mark.slow),
        pytest.param(256, marks=pytest.mark.slow),
    ],
)
def test_head_dims(head_dim):
    case = case_of([(1, 70), (3, 5)], head_dim=head_dim, shape=(4, 2, 5))
    check_kernel(case, expected(*case), 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        (3, 1),
        pytest.param(12, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_groups(heads, kv_heads):
    case = case_of([(1, 70), (7, 9)], heads, kv_heads, shape=(8, 2, 5))
    check_kernel(case, expected(*case), 1)


@pytest.mark.parametrize(
    "page_size",
    [
        pytest.param(8, marks=pytest.mark.slow),
        pytest.param(32, marks=pytest.mark.slow),
        pytest.param(64, marks=pytest.mark.slow),
        128,
        pytest.param(256, marks=pytest.mark.slow),
    ],
)
def test_page_sizes(page_size):
    case = case_of([(1, 300), (3, 129)], page_size=page_size, shape=(4, 2, -(-300 // page_size)))
    check_kernel(case, expected(*case), 1)


@pytest.mark.parametrize(
    "formats", [name if name == "kivi2" else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_quantized_pages(formats):
    case = case_of([(1, 130), (3, 68)], head_dim=128, page_size=64, shape=(4, 2, 3), formats=formats)
    check_kernel(case, expected(*case), 1)


@pytest.mark.slow
def test_a_negative_scale():
    case = case_of([(1, 130), (3, 68)], shape=(4, 2, 9))
    check_kernel((-32 * case[0], *case[1:]), expected(32 * case[0], *case[1:]), 1, scale=-0.125)


@pytest.mark.slow
def test_float16():
    case = case_of([(1, 70), (3, 5)], dtype=jnp.float16, shape=(4, 2, 5))
    check_kernel(case, expected(*case), 1)


@pytest.mark.parametrize(
    ("tiles", "formats"), [pytest.param(ONE, None, marks=pytest.mark.slow), (TWO, None), (ONE, "kivi4_values_int8")]
)
def test_no_races(tiles, formats):
    case = case_of([(1, 200), (3, 130)], page_size=64, head_dim=128, formats=formats, shape=(4, 2, 4))
    check_kernel(case, expected(*case), 1, tiles, detect_races=True)


def test_the_race_detector_sees_a_missing_barrier(monkeypatch):
    """In quantized pages, which threads read: the detector keeps no clocks for what wgmma reads."""

    def take_without_waiting(self, memory, step, *_, **__):
        self._dequantize(memory, lax.rem(step, self.tiles.stages), None)
        return memory.block

    monkeypatch.setattr(PageRing, "take", take_without_waiting)
    case = case_of([(1, 64)], page_size=64, head_dim=128, formats="int8", shape=(1, 1, 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Rr]ace"):
        check_kernel(case, expected(*case), None, detect_races=True)


def arguments(pages, head_dim, heads=(32, 8), tokens=64, dtype=jnp.bfloat16):
    shapes = {"S": (16,), "S1": (17,), "SM": (16, 32)}
    lens, cu, indices = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes.values())
    q = jax.ShapeDtypeStruct((tokens, heads[0], head_dim), dtype)
    return q, pages, pages, indices, lens, cu


@pytest.mark.parametrize("formats", [None, "int8", "kivi2"])
def test_lowers_for_h200(formats):
    case = jax.eval_shape(
        lambda: tuple(make_case([(1, 1)], 8, 2, 64, jnp.bfloat16, shape=(64, 16, 2), head_dim=128, formats=formats)[:3])
    )
    _, _, _, indices, lens, cu = arguments(None, 128)
    run = functools.partial(ragged_paged_attention, scale=0.1, implementation="mosaic_gpu")
    num_decode_rows = jax.ShapeDtypeStruct((), jnp.int32)
    assert "mosaic_gpu" in lower(run, *case, indices, lens, cu, num_decode_rows, target="h200")


def test_is_the_choice_on_hopper_alone():
    q, pages, _, *rows = arguments(jax.ShapeDtypeStruct((8, 65, 16, 128), jnp.bfloat16), 128)
    run = functools.partial(ragged_paged_attention, scale=0.1)
    arguments_ = (q, pages, pages, *rows, jax.ShapeDtypeStruct((), jnp.int32))
    assert "mosaic_gpu" in lower(run, *arguments_, target="h200")
    assert "mosaic_gpu" not in lower(run, *arguments_, target="a100")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "wgmma multiplies bf16 and f16, the queries are float32"),
        ({"head_dim": 72}, "head_dim must be a multiple of 16"),
        ({"page_size": 24}, "page_size must be a power of two"),
        ({"formats": "kivi2"}, "channel scales need page_size 64 or more, keys have 16"),
        ({"formats": "kivi2", "head_dim": 32, "page_size": 64}, "TMA copies rows of 16 bytes, keys have 8"),
    ],
)
def test_declines(change, reason):
    case = case_of([(1, 4)], shape=(1, 1, 1), **change)
    with targeting("h200"), pytest.raises(NotImplementedError, match=reason):
        ragged_paged_attention(*case, None, scale=1.0, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu needs a Hopper GPU.*this is cpu"):
        ragged_paged_attention(*case, None, scale=1.0, implementation="mosaic_gpu")


@pytest.mark.parametrize("seed", range(9))
def test_every_key_is_in_exactly_one_item(seed):
    """For random rows: items cover each job's key blocks once, within the bound, and each token is in one job."""
    rng = np.random.default_rng(seed)
    S, block_k, num_items, per_job = 7, 64, 5, 4
    num_decode = int(rng.integers(0, S + 1))
    q_lens = np.where(np.arange(S) < num_decode, rng.integers(0, 2, S), rng.integers(0, 12, S)).astype(np.int32)
    kv_lens = np.where(q_lens > 0, q_lens + rng.integers(0, 3000, S), 0).astype(np.int32)
    if num_decode:  # token s is that of row s
        q_lens[:num_decode], kv_lens[:num_decode] = 1, np.maximum(kv_lens[:num_decode], 1)
    cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    window = (None, 1, 300)[seed % 3]
    seen = np.zeros(100, int)
    count = np.int32(num_decode)
    works = jax.jit(
        lambda kv_lens, cu, count: (
            decode_work(kv_lens, cu, count, block_k, num_items, window),
            prefill_work(len(seen), per_job, kv_lens, cu, count, block_k, num_items, window),
        )
    )(kv_lens, cu, count)
    for work in jax.tree.map(np.asarray, works):
        assert work.counts.sum() <= len(work.items)
        for job, length in enumerate(work.lengths):
            if not length:
                assert work.counts[job] == 0
                continue
            items = work.items[work.first_item[job] :][: work.counts[job]]
            assert (items[:, 0] == job).all()
            blocks = [b for _, _, low, high, *_ in items for b in range(low, high)]
            _, row, _, _, first, last, _, _ = items[0]
            low = 0 if window is None else max(0, first - window + 1) // block_k
            assert blocks == list(range(low, last // block_k + 1))
            position = kv_lens[row] - q_lens[row] + work.tokens[job, 0] - cu[row]
            assert (first, last) == (position, position + length - 1)
        seen += np.asarray(jax.jit(token_places, static_argnums=1)(work, len(seen))[2])
    np.testing.assert_array_equal(seen, np.arange(len(seen)) < cu[-1])
