"""The Hopper kernel of ragged paged attention in the interpreter, against float64; unused slots hold NaN."""

import dataclasses
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
from tests.pallas_kernels.paged_cases import check, expected, make_case, tree_of
from tests.pallas_kernels.targets import lower, targeting

ONE, TWO = (TileConfig(64, 2, warpgroups, num_items=2) for warpgroups in (1, 2))
MIXED = ((1, 130), (1, 64), (9, 30), (0, 0), (3, 68))  # two decode rows
EDGES = tuple((1, n) for n in (1, 63, 64, 65, 300, 400))  # two of them are split over several items and joined
TREES = ((1, 70), (9, 30), (5, 66), (40, 64))  # the last two are trees


@dataclasses.dataclass(frozen=True)
class Case:
    """`formats` of keys and values as in `QUANTIZED`, `num_decode_rows` None where all rows are decode rows."""

    formats: tuple[str | None, str | None]
    head_dim: int
    page_size: int
    heads: tuple[int, int] = (2, 1)
    tiles: TileConfig = ONE
    rows: tuple[tuple[int, int], ...] = MIXED
    num_decode_rows: int | None = 2
    sliding_window: int | None = None
    soft_cap: float | None = None
    negative: bool = False  # the scale
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        tiles = "one" if self.tiles == ONE else "two"
        return f"{self.formats[0]}-{self.formats[1]}-{self.head_dim}-page{self.page_size}-{tiles}"


def check_case(case: Case, detect_races: bool = True) -> None:
    """Runs twice: near the float64 answer, bit-equal, and free of races."""
    rows, page_size = list(case.rows), case.page_size
    tokens = sum(q_len for q_len, _ in rows)
    padding = 0 if case.num_decode_rows is None else 2  # then there is a token a row
    shape = (tokens + padding, len(rows), -(-max(kv_len for _, kv_len in rows) // page_size))
    arrays = make_case(
        rows, *case.heads, page_size, jnp.dtype(case.dtype), shape=shape, head_dim=case.head_dim, formats=case.formats
    )
    options = {"sliding_window": case.sliding_window, "soft_cap": case.soft_cap, "tree_mask": None}
    if case.rows == TREES:
        mask = np.zeros((shape[0], 2), np.uint32)
        mask[10:15], mask[15:55] = tree_of(5, 2), tree_of(40, 2, seed=1)
        options["tree_mask"] = mask
    wanted = expected(*arrays, **options)
    if case.negative:
        arrays = (-arrays[0], *arrays[1:])
    scale = case.head_dim**-0.5 * (-1 if case.negative else 1)
    with interpreted(detect_races) as interpret:
        kernel = functools.partial(
            ragged_paged_attention_mosaic_gpu, schedule=None, with_lse=True, scale=scale, tiles=case.tiles,
            interpret=interpret, **options,
        )  # fmt: skip
        run = jax.jit(kernel if case.num_decode_rows is not None else lambda *a: kernel(*a[:6], None))
        check(run, arrays, wanted, case.num_decode_rows, 1e-2)


@pytest.mark.parametrize(
    "case",
    [
        Case((None, None), 80, 16, (3, 1), TWO, sliding_window=20, soft_cap=0.7),
        pytest.param(
            Case(("channel2", "int4"), 64, 128, (4, 2), rows=TREES, num_decode_rows=1), marks=pytest.mark.slow
        ),
        pytest.param(Case(("float8", "int8"), 128, 16, rows=EDGES, num_decode_rows=None), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_agrees_and_repeats_without_races(case):
    check_case(case)


# Every head dim with every format it can have; every page size, group, window, tile and option with some of them.
FEW = {"rows": ((1, 130), (3, 68)), "num_decode_rows": 1}
PAIRWISE = [
    Case((None, None), 64, 8, tiles=TWO, rows=((70, 100),), num_decode_rows=0),  # a prompt of several tiles
    Case(("int4", "int2"), 64, 64, (3, 1), soft_cap=0.7, **FEW),
    Case(("float8", "int8"), 64, 16, (3, 1), negative=True, dtype="float16", **FEW),
    Case(("int8", "float8"), 80, 32, (1, 1), sliding_window=1),
    Case((None, None), 96, 8, (4, 2), TWO, rows=TREES, num_decode_rows=1),
    Case(("float8", "int8"), 96, 256, (12, 1), sliding_window=64, **FEW),
    Case(("int4", None), 96, 16, **FEW),
    Case((None, None), 128, 64, (4, 2)),
    Case(("channel4", "int8"), 128, 64, sliding_window=1000, **FEW),
    Case(("float8", "int4"), 128, 128, (3, 1), **FEW),
    Case(("channel2", "int2"), 128, 64, **FEW),
    Case((None, None), 256, 32, tiles=TWO, dtype="float16", **FEW),
    Case(("int8", "int4"), 256, 16, rows=EDGES, num_decode_rows=None),
    Case(("channel2", "float8"), 256, 64, soft_cap=0.7, **FEW),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_agrees_in_every_pair_of_options(case):
    check_case(case)


def test_the_race_detector_sees_a_missing_barrier(monkeypatch):
    """In quantized pages, which threads read: the detector keeps no clocks for what wgmma reads."""

    def take_without_waiting(self, memory, step, *_, **__):
        self._dequantize(memory, lax.rem(step, self.tiles.stages), None)
        return memory.block

    monkeypatch.setattr(PageRing, "take", take_without_waiting)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Rr]ace"):
        check_case(Case(("int8", "int8"), 128, 64, rows=((1, 64),), num_decode_rows=None))


def arguments(pages, head_dim, heads=(32, 8), tokens=64, dtype=jnp.bfloat16):
    shapes = {"S": (16,), "S1": (17,), "SM": (16, 32)}
    lens, cu, indices = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes.values())
    q = jax.ShapeDtypeStruct((tokens, heads[0], head_dim), dtype)
    return q, pages, pages, indices, lens, cu


@pytest.mark.parametrize(
    "formats", [pytest.param(None, marks=pytest.mark.slow), pytest.param("int8", marks=pytest.mark.slow), "kivi2"]
)
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
    case = make_case([(1, 4)], 2, 1, shape=(1, 1, 1), **{"dtype": jnp.bfloat16, "head_dim": 64} | change)
    with targeting("h200"), pytest.raises(NotImplementedError, match=reason):
        ragged_paged_attention(*case, None, scale=1.0, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu needs a Hopper GPU.*this is cpu"):
        ragged_paged_attention(*case, None, scale=1.0, implementation="mosaic_gpu")


def test_two_warpgroups_decline_quantized_pages():
    case = make_case([(1, 4)], 2, 1, shape=(1, 1, 1), dtype=jnp.bfloat16, head_dim=64, formats="int8")
    options = {"scale": 1.0, "sliding_window": None, "soft_cap": None, "tree_mask": None, "schedule": None}
    with targeting("h200"), pytest.raises(NotImplementedError, match="by the one warpgroup that uses them"):
        ragged_paged_attention_mosaic_gpu(*case, None, **options, with_lse=True, tiles=TWO)


@functools.partial(jax.jit, static_argnums=range(5))
def works_and_places(num_tokens, block_k, num_items, per_job, window, kv_lens, cu, count):
    works = (
        decode_work(kv_lens, cu, count, block_k, num_items, window),
        prefill_work(num_tokens, per_job, kv_lens, cu, count, block_k, num_items, window),
    )
    return works, [token_places(work, num_tokens) for work in works]


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
    found = works_and_places(len(seen), block_k, num_items, per_job, window, kv_lens, cu, np.int32(num_decode))
    works, places = jax.tree.map(np.asarray, found)
    for work, (_, _, has) in zip(works, places, strict=True):
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
        seen += has
    np.testing.assert_array_equal(seen, np.arange(len(seen)) < cu[-1])
