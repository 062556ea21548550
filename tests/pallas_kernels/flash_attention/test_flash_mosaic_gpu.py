"""The Mosaic GPU kernels of flash attention: interpreted against the oracle of `cases`, raced, lowered for H200."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention import api, flash_attention
from pallas_kernels.flash_attention.mosaic_gpu_backward import flash_attention_backward_mosaic_gpu
from pallas_kernels.flash_attention.mosaic_gpu_blocks import HEAD_DIMS, Visibility
from pallas_kernels.flash_attention.mosaic_gpu_forward import flash_attention_mosaic_gpu
from pallas_kernels.flash_attention.tiles import SHARED_MEMORY, BackwardTiles, ForwardTiles, forward_tiles
from pallas_kernels.flash_attention.vjp import with_backward
from tests.pallas_kernels.flash_attention.cases import CASES, Case, check, check_twice, make
from tests.pallas_kernels.gpu_interpreter import MISSING_WAIT, interpreted
from tests.pallas_kernels.targets import lower

SMALL = ForwardTiles(block_kv=64)  # more blocks from fewer keys
EVERYTHING = Case(70, 150, segments=((20, 90), (40, 50)), sliding_window=60, soft_cap=2.0, scale=0.5)


def attention(monkeypatch, interpret, tiles=None):
    """Returns `flash_attention` on the kernels alone."""
    attend = with_backward(
        functools.partial(flash_attention_mosaic_gpu, interpret=interpret, tiles=tiles),
        functools.partial(flash_attention_backward_mosaic_gpu, interpret=interpret),
    )
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"mosaic_gpu": attend})
    return functools.partial(flash_attention, implementation="mosaic_gpu")


def forward(arrays, interpret, tiles=None):
    """Returns (out, lse) of the kernel called by itself."""
    function = functools.partial(flash_attention_mosaic_gpu, **arrays.case.options, tiles=tiles, interpret=interpret)
    function = jax.jit(function)
    return function(arrays.q, arrays.k, arrays.v, arrays.q_segment_ids, arrays.kv_segment_ids)


def test_agrees_and_repeats_without_races_with_all_options(monkeypatch):
    with interpreted(detect_races=True) as interpret:
        check_twice(attention(monkeypatch, interpret, SMALL), make(EVERYTHING, "bfloat16", head_dim=64))


# Every head dim in each type, with every option (64 in bfloat16 is above).
PAIRWISE = [
    ("segments_shuffled", "bfloat16", 80, SMALL),
    ("window_one", "bfloat16", 96, None),
    ("more_keys", "bfloat16", 128, None),
    ("not_causal", "bfloat16", 128, SMALL),  # a soft cap: fewer queries a step backward
    ("window_more_keys", "bfloat16", 256, SMALL),
    ("segments_window", "float16", 64, None),
    ("edge_129", "float16", 80, SMALL),
    ("one", "float16", 96, None),
    ("not_causal_more_queries", "float16", 128, SMALL),
    ("one_query", "float16", 256, None),
    ("large_scores", "bfloat16", 64, SMALL),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "head_dim", "tiles"), PAIRWISE)
def test_agrees_and_repeats_without_races(name, dtype, head_dim, tiles, monkeypatch):
    case = CASES[name]
    if name != "edge_65":  # which has groups of three
        case = dataclasses.replace(case, num_heads=2, num_kv_heads=1, batch=1)
    with interpreted(detect_races=True) as interpret:
        check_twice(attention(monkeypatch, interpret, tiles), make(case, dtype, head_dim=head_dim))


def test_forward_agrees_with_what_the_first_case_has_not():
    case = Case(70, 130, num_heads=2, num_kv_heads=2, causal=False, soft_cap=3.0, scale=-0.3, head_dim=80)
    with interpreted() as interpret:
        arrays = make(case, "bfloat16")
        check(arrays, forward(arrays, interpret, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["not_causal", "window_more_queries"])
def test_forward_agrees(name):
    with interpreted() as interpret:
        arrays = make(CASES[name], "bfloat16", head_dim=64)
        check(arrays, forward(arrays, interpret, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale_need_not_be_positive(scale):
    with interpreted() as interpret:
        arrays = make(Case(9, 65, scale=scale), "bfloat16", head_dim=64)
        check(arrays, forward(arrays, interpret))


@pytest.mark.parametrize(
    "place",
    [
        "_wait_for_k",
        pytest.param("_wait_for_v", marks=pytest.mark.slow),
        pytest.param("scores", marks=pytest.mark.slow),
    ],
)
def test_missing_barrier_is_found(place, monkeypatch):
    """A kernel function forgets to wait: for keys or values to be free again, or for keys to be there."""
    wait = plgpu.barrier_wait

    def forgetful(barrier):
        if sys._getframe(1).f_code.co_name != place:
            wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", forgetful)
    with interpreted(detect_races=True) as interpret, pytest.raises(Exception, match=MISSING_WAIT):
        jax.block_until_ready(
            forward(make(Case(9, 250, num_heads=1, causal=False), "bfloat16", head_dim=64), interpret, SMALL)
        )


@pytest.mark.parametrize(
    "visibility",
    [
        Visibility(300, 300, True, None, False),
        Visibility(90, 300, True, 70, False),
        Visibility(300, 90, True, 40, False),
        Visibility(200, 333, False, 100, False),
        Visibility(130, 200, False, None, False),
    ],
)
def test_visits_what_is_seen_and_masks_what_is_partly_seen(visibility):
    t, j = np.arange(visibility.num_queries)[:, None] + visibility.offset, np.arange(visibility.num_keys)
    seen = np.ones((visibility.num_queries, visibility.num_keys), bool)
    if visibility.causal:
        seen &= j <= t
    if visibility.sliding_window is not None:
        seen &= j > t - visibility.sliding_window
    for mask, blocks, rows in ((seen, visibility.key_blocks, 128), (seen.T, visibility.query_blocks, 64)):
        for start in range(0, len(mask), rows):
            visit = blocks(start, rows, 64)
            order = [int(visit.block(i)) for i in range(int(visit.count))]
            masked = int(visit.masked)
            assert sorted(order) == list(range(int(visit.first), int(visit.end)))
            outside = np.ones(mask.shape[1], bool)
            for block in order:
                outside[block * 64 : block * 64 + 64] = False
            assert not mask[start : start + rows, outside].any()
            assert all(mask[start : start + rows, b * 64 : b * 64 + 64].all() for b in order[masked:])


def arguments(dtype=jnp.bfloat16, *, H=64, segments=False):
    B, T, S, N, K = 1, 384, 384, 4, 2
    shape = jax.ShapeDtypeStruct
    q, k = shape((B, T, N, H), dtype), shape((B, S, K, H), dtype)
    ids = (shape((B, T), jnp.int32), shape((B, S), jnp.int32)) if segments else (None, None)
    return q, k, k, *ids, shape((B, N, T), jnp.float32)


OPTIONS = {"scale": 0.1, "causal": True, "sliding_window": None, "soft_cap": None}


LOWERED = ({"causal": False}, {"sliding_window": 70, "soft_cap": 30.0})


@pytest.mark.parametrize(
    ("H", "options"),
    [
        *((64, options) for options in LOWERED),
        *(pytest.param(H, LOWERED[i % 2], marks=pytest.mark.slow) for i, H in enumerate(HEAD_DIMS[1:])),
    ],
)
def test_lowers_for_h200(H, options):
    q, k, v, q_ids, kv_ids, lse = arguments(H=H, segments="soft_cap" in options)
    options = OPTIONS | options
    text = lower(functools.partial(flash_attention_mosaic_gpu, **options), q, k, v, q_ids, kv_ids, target="h200")
    assert "mosaic_gpu" in text
    backward = functools.partial(flash_attention_backward_mosaic_gpu, **options)
    text = lower(backward, q, k, v, q, lse, q, lse, q_ids, kv_ids, target="h200")
    assert "mosaic_gpu" in text


def test_declines_what_it_cannot_do():
    q, k, v, *_ = arguments()
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        flash_attention_mosaic_gpu(q, k, v, None, None, **OPTIONS)
    with pytest.raises(NotImplementedError, match="float32"):
        flash_attention_mosaic_gpu(*arguments(jnp.float32)[:3], None, None, **OPTIONS, interpret=True)
    with pytest.raises(NotImplementedError, match=r"head dims .* got 72"):
        flash_attention_mosaic_gpu(*arguments(H=72)[:3], None, None, **OPTIONS, interpret=True)


def test_tiles_fit():
    assert all(forward_tiles(H).shared_memory(H, 2) < SHARED_MEMORY for H in HEAD_DIMS)
    with pytest.raises(ValueError, match="block_kv must be"):
        ForwardTiles(block_kv=24)
    with pytest.raises(ValueError, match="block_q must be"):
        BackwardTiles(block_kv=64, block_q=8)
    with pytest.raises(ValueError, match="stages must be at least 2"):
        BackwardTiles(block_kv=64, block_q=64, stages=1)
