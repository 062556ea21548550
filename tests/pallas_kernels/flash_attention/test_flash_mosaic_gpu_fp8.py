"""Float8 flash attention on Hopper: interpreted against two oracles, raced, lowered for H200.

Weights are rounded to e4m3, whose relative error is up to 2**-4, so that the oracle of `cases` is met within

    2**-4 * sum(w * |v|)  +  2**-18 * sum(|v|)  +  2**-8 * |out|  +  1e-5

(weights up to 1 are stored 256-fold: subnormal ones have an error up to 2**-10 / 256; then the output in bfloat16).
`rounded` rounds the same weights, block by block, and is met within 1e-2 as in bfloat16. lse knows no rounding.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.float8 import dequantize_blocks
from pallas_kernels.flash_attention.mosaic_gpu_blocks import Visibility
from pallas_kernels.flash_attention.mosaic_gpu_forward import flash_attention_mosaic_gpu
from pallas_kernels.flash_attention.specs import SPECS
from pallas_kernels.flash_attention.tiles import ForwardTiles
from tests.pallas_kernels.flash_attention.cases import Case, expected, make, visible
from tests.pallas_kernels.gpu_interpreter import MISSING_WAIT, interpreted
from tests.pallas_kernels.targets import lower

SMALL = ForwardTiles(block_kv=64)  # two blocks of keys a scale, two stages
CASES = {
    "one": Case(1, 1),
    "causal": Case(257, 257, num_heads=1),  # a query more than two tiles
    "more_queries": Case(200, 129),  # 71 queries see nothing
    "not_causal": Case(70, 270, causal=False, batch=2, soft_cap=3.0),
    "negative_scale": Case(9, 130, scale=-0.3),
    "large_scores": Case(130, 130, num_heads=1, scale=5.0),
    "window_one": Case(130, 130, num_heads=1, sliding_window=1),
    "head_dim_128": Case(130, 260, head_dim=128, num_heads=2, num_kv_heads=1),
    "head_dim_256": Case(70, 300, head_dim=256, num_heads=1, sliding_window=150),
}


def attend(arrays, interpret, tiles=None):
    """Returns a function of nothing that gives (out, lse) of the kernel."""
    function = functools.partial(flash_attention_mosaic_gpu, **arrays.case.options, tiles=tiles, interpret=interpret)
    function = jax.jit(function)
    return lambda: function(arrays.q, arrays.k, arrays.v, None, None, **arrays.scales)


def scores_and_values(arrays, b, n):
    """Returns the masked scores of a head and its values, in float64."""
    case = arrays.case
    q, k, v = (
        np.asarray(dequantize_blocks(x, scale), np.float64)
        for x, scale in zip((arrays.q, arrays.k, arrays.v), arrays.scales.values())
    )
    kv_head = n // (case.num_heads // case.num_kv_heads)
    s = q[b, :, n] @ k[b, :, kv_head].T * case.options["scale"]
    if case.soft_cap is not None:
        s = case.soft_cap * np.tanh(s / case.soft_cap)
    return np.where(visible(arrays)[b], s, -np.inf), v[b, :, kv_head]


def rounded(arrays, block_kv):
    """Returns what the kernel means to compute: each block's weights in e4m3, relative to the maximum so far."""
    case = arrays.case
    visibility = Visibility(case.num_q, case.num_k, case.causal, case.sliding_window, False)
    out = np.zeros((case.batch, case.num_q, case.num_heads, case.head_dim))
    for b, n in np.ndindex(case.batch, case.num_heads):
        s, v = scores_and_values(arrays, b, n)
        for start in range(0, case.num_q, 128):
            rows = slice(start, start + 128)
            visit = visibility.key_blocks(start, 128, block_kv)
            m, l, acc = np.full(len(s[rows]), -1e30), np.zeros(len(s[rows])), np.zeros(out[b, rows, n].shape)
            for block in [int(visit.block(i)) for i in range(int(visit.count))]:
                keys = slice(block * block_kv, (block + 1) * block_kv)
                m_new = np.maximum(m, s[rows, keys].max(1))
                p = 256 * np.exp(s[rows, keys] - m_new[:, None])
                codes = np.asarray(jnp.asarray(p, jnp.float32).astype(jnp.float8_e4m3fn), np.float64)
                alpha, m = np.exp(m - m_new), m_new
                l, acc = l * alpha + p.sum(1), acc * alpha[:, None] + codes @ v[keys]
            out[b, rows, n] = acc / np.where(l > 0, l, 1)[:, None]
    return out


def check(arrays, results, block_kv):
    """Asserts that (out, lse) agree with both oracles."""
    assert results[0].dtype == jnp.bfloat16
    out, lse = (np.asarray(x, np.float64) for x in results)
    exact, exact_lse = expected(arrays)[:2]
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5, err_msg="lse")
    np.testing.assert_allclose(out, rounded(arrays, block_kv), rtol=1e-2, atol=1e-2, err_msg="rounded")
    for b, n in np.ndindex(arrays.case.batch, arrays.case.num_heads):
        s, v = scores_and_values(arrays, b, n)
        s = s[np.isfinite(exact_lse[b, n])]
        here, want = (x[b, np.isfinite(exact_lse[b, n]), n] for x in (out, exact))
        weights = np.exp(s - exact_lse[b, n, np.isfinite(exact_lse[b, n])][:, None])
        bound = 2**-4 * weights @ np.abs(v) + 2**-18 * np.abs(v).sum(0) + 2**-8 * np.abs(want) + 1e-5
        assert (np.abs(here - want) <= bound).all()
    assert (out[~np.isfinite(exact_lse).transpose(0, 2, 1)] == 0).all()  # of queries that see nothing
    # Errors of many weights cancel.
    np.testing.assert_allclose(np.sqrt(np.mean((out - exact) ** 2)), 0, atol=2e-2)


def block_kv_of(arrays):
    return 64 if arrays.case.head_dim > 128 else 128


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_agrees(name):
    arrays = make(CASES[name], "float8", head_dim=None if name.startswith("head_dim") else 64)
    with interpreted() as interpret:
        check(arrays, attend(arrays, interpret)(), block_kv_of(arrays))


@pytest.mark.slow
def test_repeats_without_races_with_window_and_soft_cap():
    """Two tiles of queries, more blocks of keys than stages, two of them a scale, two groups of queries."""
    case = Case(130, 250, num_heads=4, num_kv_heads=2, head_dim=64, sliding_window=150, soft_cap=2.0, scale=0.2)
    arrays = make(case, "float8")
    with interpreted(detect_races=True) as interpret:
        function = attend(arrays, interpret, SMALL)
        first, second = function(), function()
    check(arrays, first, 64)
    for a, b in zip(first, second):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.slow
def test_has_no_races_in_pieces():
    """H = 256 has two pieces of values and of output."""
    arrays = make(Case(40, 350, num_heads=1, head_dim=256, causal=False), "float8")
    with interpreted(detect_races=True) as interpret:
        check(arrays, attend(arrays, interpret)(), 64)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["_wait_for_k", "_wait_for_v"])
def test_missing_barrier_is_found(place, monkeypatch):
    """The producer forgets to wait for keys or values to be free again."""
    wait = plgpu.barrier_wait

    def forgetful(barrier):
        if sys._getframe(1).f_code.co_name != place:
            wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", forgetful)
    arrays = make(Case(9, 290, num_heads=1, head_dim=64, causal=False), "float8")
    with interpreted(detect_races=True) as interpret, pytest.raises(Exception, match=MISSING_WAIT):
        jax.block_until_ready(attend(arrays, interpret, SMALL)())


@pytest.mark.parametrize(
    ("H", "options"),
    [
        (64, {"causal": False}),
        (128, {"soft_cap": 30.0}),
        pytest.param(256, {"sliding_window": 70}, marks=pytest.mark.slow),
    ],
)
def test_lowers_for_h200(H, options):
    q, k = (jax.ShapeDtypeStruct((1, 300, heads, H), jnp.float8_e4m3fn) for heads in (4, 2))
    q_scale, k_scale = (jax.ShapeDtypeStruct((1, heads, 3), jnp.float32) for heads in (4, 2))

    def function(q, k, v, q_scale, k_scale, v_scale):
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return flash_attention(q, k, v, **scales, **options, return_lse=True)  # without a choice: the first that can

    assert "mosaic_gpu" in lower(function, q, k, k, q_scale, k_scale, k_scale, target="h200")


@pytest.mark.slow
def test_spec_lowers_for_h200():
    (spec,) = (spec for spec in SPECS if spec.name.endswith("llama3_8b_4k_float8"))
    assert "mosaic_gpu" in lower(spec.function, *jax.eval_shape(spec.arguments), target="h200")


def test_declines_what_it_cannot_do():
    arrays = make(Case(9, 9, head_dim=64), "float8")
    q, k, v, options = arrays.q, arrays.k, arrays.v, {**arrays.scales, **arrays.case.options}
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        flash_attention_mosaic_gpu(q, k, v, None, None, **options)
    ids = jnp.zeros((1, 9), jnp.int32)
    with pytest.raises(NotImplementedError, match="no segment ids in float8"):
        flash_attention_mosaic_gpu(q, k, v, ids, ids, **options, interpret=True)
    with pytest.raises(NotImplementedError, match="got bfloat16"):
        flash_attention_mosaic_gpu(q.astype(jnp.bfloat16), k, v, None, None, **options, interpret=True)
    with pytest.raises(NotImplementedError, match=r"head dims .* got 16"):
        flash_attention_mosaic_gpu(q[..., :16], k[..., :16], v[..., :16], None, None, **options, interpret=True)
    with pytest.raises(NotImplementedError, match="block_kv 64 or 128"):
        flash_attention_mosaic_gpu(q, k, v, None, None, **options, interpret=True, tiles=ForwardTiles(block_kv=96))
