"""Ragged paged attention on TPU, interpreted, against float64 loops; unused slots hold NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import mosaic_tpu_pages
from pallas_kernels.paged_attention.mosaic_tpu import ragged_paged_attention_mosaic_tpu
from pallas_kernels.paged_attention.mosaic_tpu_work import COLUMNS, decode_work, prefill_work
from pallas_kernels.paged_attention.tpu_tiles import VMEM_BYTES, TileConfig, choose_tiles
from pallas_kernels.pages import quantize
from tests.pallas_kernels.paged_cases import ROWS, check, expected, make_case, tree_of
from tests.pallas_kernels.targets import lower

T, S, M = 440, 20, 22  # all of ROWS fit: one compilation serves them
case_of = functools.partial(make_case, shape=(T, S, M))
TILES = TileConfig(decode_block_k=64, prefill_block_q=32, prefill_block_k=48)
MIXED = [(1, 31), (1, 2), (9, 30), (24, 24), (3, 270)]  # rows that share tiles, and one that fills none
SMALL = (40, 5, 17)


def attention_with(q, *rest, sliding_window=None, soft_cap=None, tree_mask=None, interpret=True, tiles=TILES):
    return ragged_paged_attention_mosaic_tpu(
        q, *rest, scale=q.shape[-1] ** -0.5, sliding_window=sliding_window, soft_cap=soft_cap, tree_mask=tree_mask,
        schedule=None, with_lse=True, interpret=interpret, tiles=tiles,
    )  # fmt: skip


attention = jax.jit(
    attention_with,
    static_argnames=("sliding_window", "soft_cap", "tiles", "interpret"),
)


def check_with(case, wanted, num_decode_rows, tolerance=1e-5, **options):
    check(functools.partial(attention, **options), case, wanted, num_decode_rows, tolerance)


@pytest.mark.parametrize("name", ROWS)
def test_matches_float64(name):
    case = case_of(ROWS[name][0])
    check_with(case, expected(*case), ROWS[name][1])


@pytest.mark.parametrize("window", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["decode", "chunk", "prefill_more_than_a_tile", "mixed", "empty_rows"])
def test_sliding_window_and_soft_cap(name, window):
    case = case_of(ROWS[name][0])
    wanted = expected(*case, window, soft_cap=0.7)
    check_with(case, wanted, ROWS[name][1], sliding_window=window, soft_cap=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("formats", ["int4", "int8_keys_only", "kivi2", "float8"])
def test_quantized_pages(formats):
    case = make_case(MIXED, shape=SMALL, formats=formats)
    check_with(case, expected(*case), 2)


@pytest.mark.slow
@pytest.mark.parametrize("formats", ["int8_float8", None])
def test_bfloat16_queries(formats):
    q, *rest = make_case(MIXED, shape=SMALL, formats=formats, dtype=jnp.bfloat16)
    case = (q.astype(jnp.bfloat16), *rest)
    check_with(case, expected(*case), 2, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("words", [2, 3])
def test_trees_over_two_and_four_bit_pages(words):
    """A decode row, a plain chunk, and trees of 5 and 32 * words tokens in one batch; keys scaled by channel."""
    rows = [(1, 31), (9, 30), (5, 70), (32 * words, 32 * words + 40)]
    mask = np.zeros((16 + 32 * words, words), np.uint32)
    mask[0] = 2  # names no token of its row: it still sees itself
    mask[10:15], mask[15:-1] = tree_of(5, words), tree_of(32 * words, words, seed=1)
    case = make_case(rows, shape=(len(mask), 5, 9), formats="kivi2_int4")
    wanted = expected(*case, tree_mask=mask)
    assert not np.allclose(wanted[0][10:15], expected(*case)[0][10:15])
    check_with(case, wanted, 1, tree_mask=jnp.asarray(mask))


def test_all_rows_are_decode_rows():
    rows = [(1, 3 + 7 * i) for i in range(19)]
    rows[4] = (1, 352)
    case = make_case(rows, shape=(19, 19, M))
    check_with(case, expected(*case), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "num_heads", "num_kv_heads", "page_size", "shape"),
    [
        ([(1, 31), (1, 2), (9, 30), (3, 70)], 3, 3, 1, (17, 4, 300)),
        ([(1, 300), (1, 2), (140, 301)], 6, 1, 64, (142, 5, 5)),
        ([(1, 64), (2, 64), (1, 128), (16, 65)], 9, 9, 32, (20, 4, 4)),  # unrolled no more
        ([(1, 700), (9, 30), (3, 520)], 9, 3, 512, (16, 3, 2)),
    ],
)
def test_heads_page_sizes_and_chosen_tiles(rows, num_heads, num_kv_heads, page_size, shape):
    case = make_case(rows, num_heads, num_kv_heads, page_size, shape=shape)
    check_with(case, expected(*case), 1, tiles=None)


TINY = TileConfig(decode_block_k=8, prefill_block_q=16, prefill_block_k=8)


def run_with_race_detector(rows, num_decode_rows, shape):
    case = make_case(rows, 2, 1, 4, shape=shape, head_dim=8)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    out, _ = attention_with(*case, num_decode_rows, tiles=TINY, interpret=params)
    valid = case[-1][-1]
    np.testing.assert_allclose(out[:valid], expected(*case)[0][:valid], atol=1e-5)


def test_is_free_of_races():
    run_with_race_detector([(1, 9), (1, 12), (1, 3), (3, 9), (14, 16)], np.int32(3), (20, 5, 5))


def test_race_detector_reports_a_missing_wait(monkeypatch):
    monkeypatch.setattr(mosaic_tpu_pages.BlockLoop, "wait", lambda *_: None)
    with pytest.raises(Exception, match=r"(?i)race"):
        run_with_race_detector([(1, 9)], None, (1, 1, 3))


def items_of(work):
    return np.asarray(work.items).reshape(-1, COLUMNS)[: int(work.count[0])].tolist()


def test_work_lists():
    kv_lens = jnp.array([7, 0, 40, 9, 5], jnp.int32)
    cu_q_lens = jnp.array([0, 1, 1, 21, 24, 25], jnp.int32)  # one token, none, 20, 3, one
    assert items_of(decode_work(kv_lens, cu_q_lens, None)) == [[0, 0, 0, 7, 1, 1], [24, 4, 0, 5, 1, 1]]
    assert items_of(decode_work(kv_lens, cu_q_lens, 4)) == [[0, 0, 3, 7, 1, 1], [24, 4, 1, 5, 1, 1]]
    tiles = [[0, 2, 0, 35, 1, 1], [1, 2, 0, 40, 1, 0], [1, 3, 0, 9, 0, 1]]
    assert items_of(prefill_work(kv_lens, cu_q_lens, 25, 16, None)) == tiles
    windowed = [[0, 2, 17, 35, 1, 1], [1, 2, 32, 40, 1, 0], [1, 3, 3, 9, 0, 1]]
    assert items_of(prefill_work(kv_lens, cu_q_lens, 25, 16, 4)) == windowed


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (128, 8, 128), (32, 32, 128), (8, 1, 256)]
)
@pytest.mark.parametrize("num_tokens", [1, 128, 8192])
def test_tiles_fit_vmem(num_tokens, num_heads, num_kv_heads, head_dim):
    tiles = choose_tiles(num_tokens, num_heads, num_kv_heads, head_dim, 131072)
    block = num_kv_heads * max(tiles.decode_block_k, tiles.prefill_block_k) * head_dim
    state = num_heads * tiles.prefill_block_q * (head_dim * (4 + 3 * 4) + 2 * 128 * 4)
    assert 4 * block * 4 + state < VMEM_BYTES


@pytest.mark.parametrize(
    ("formats", "target"),
    [
        (None, "v5e"),
        ({"bits": 4, "axis": "channel"}, "v6e"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (None, "v6e"),
                ({"bits": 8}, "v5e"),
                ({"bits": 8}, "v6e"),
                ({"bits": 4, "axis": "channel"}, "v5e"),
            )
        ),
    ],
)
def test_lowers_for_tpu(formats, target):
    T, S, M, K, N, H, page_size = 64, 16, 16, 2, 8, 128, 16
    pages = jnp.zeros((K, 64, page_size, H), jnp.bfloat16)
    shapes = [jnp.zeros((T, N, H), jnp.bfloat16), pages, pages, jnp.zeros((S, M), jnp.int32)]
    shapes += [jnp.zeros(S, jnp.int32), jnp.zeros(S + 1, jnp.int32), jnp.int32(0)]
    if formats:
        shapes[1:3] = (quantize(pages, **formats),) * 2
    text = lower(functools.partial(attention_with, interpret=False, tiles=None), *shapes, target=target)
    assert text.count("tpu_custom_call") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((4, 4, 16), jnp.float16)}, "q must be bfloat16 or float32"),
        ({"v_pages": jnp.zeros((2, 9, 16, 16), jnp.float16)}, "v_pages must be bfloat16, float32 or quantized"),
        ({"page_indices": jnp.zeros((1, 400_000), jnp.int32)}, "the page table .* takes 1600000 bytes"),
        ({"tree_mask": jnp.zeros((4, 17), jnp.uint32)}, "trees of 544 tokens"),
        ({"interpret": False}, "mosaic_tpu needs a TPU"),
    ],
)
def test_declines(change, message):
    names = ("q", "k_pages", "v_pages", "page_indices", "kv_lens", "cu_q_lens")
    case = dict(zip(names, make_case([(1, 4)], shape=(4, 1, 8)))) | {"num_decode_rows": jnp.int32(1)} | change
    keywords = {name: case.pop(name) for name in ("tree_mask", "interpret") if name in case}
    with pytest.raises(NotImplementedError, match=message):
        attention_with(*case.values(), **keywords)
