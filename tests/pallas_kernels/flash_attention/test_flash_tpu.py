"""The TPU kernels of flash attention, interpreted against the oracle of `cases` and lowered for v5e."""

import functools
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_attention import api, flash_attention
from pallas_kernels.flash_attention.mosaic_tpu_backward import flash_attention_backward_mosaic_tpu
from pallas_kernels.flash_attention.mosaic_tpu_blocks import TpuTiles, choose_tiles
from pallas_kernels.flash_attention.mosaic_tpu_forward import flash_attention_mosaic_tpu
from pallas_kernels.flash_attention.specs import SPECS
from pallas_kernels.flash_attention.vjp import with_backward
from tests.pallas_kernels.flash_attention.cases import CASES, check_twice, make
from tests.pallas_kernels.targets import lower

ALWAYS = ["segments_one", "segments_all_options"]


def interpreted(monkeypatch, tiles=None, interpret=True):
    options = {"tiles": tiles, "interpret": interpret}
    attend = with_backward(
        functools.partial(flash_attention_mosaic_tpu, **options),
        functools.partial(flash_attention_backward_mosaic_tpu, **options),
    )
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"mosaic_tpu": attend})
    return functools.partial(flash_attention, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[::4] if n not in ALWAYS)]
)
def test_small_tiles(name, monkeypatch):
    check_twice(interpreted(monkeypatch, TpuTiles(block_q=32, block_k=64)), make(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edge_129", "segments_all_options", "mqa"])
def test_own_tiles(name, monkeypatch):
    check_twice(interpreted(monkeypatch), make(CASES[name]))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("window_more_keys", "bfloat16"),
        pytest.param("segments_all_options", "bfloat16", marks=pytest.mark.slow),
        pytest.param("segments_all_options", "float8", marks=pytest.mark.slow),
    ],
)
def test_16_and_8_bits(name, dtype, monkeypatch):
    check_twice(interpreted(monkeypatch, TpuTiles(block_q=32, block_k=64)), make(CASES[name], dtype))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_races(monkeypatch):
    interpret = pltpu.InterpretParams(detect_races=True)
    check_twice(interpreted(monkeypatch, TpuTiles(block_q=32, block_k=64), interpret), make(CASES["edge_65"]))


def test_float16_is_refused(monkeypatch):
    q = jnp.zeros((1, 4, 2, 8), jnp.float16)
    with pytest.raises(NotImplementedError, match="no float16"):
        interpreted(monkeypatch)(q, q, q)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 32, 128])
@pytest.mark.parametrize("length", [1, 65, 129, 1000, 5000])
def test_tiles_fit_the_hardware(group, length):
    tiles = choose_tiles(length, length, group)
    assert group * tiles.block_q % 128 == 0
    assert tiles.block_q % 16 == 0
    assert tiles.block_k % 128 == 0
    assert tiles.block_q - length < 128
    assert tiles.block_k - length < 128


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS[::3], ids=lambda spec: spec.name)
def test_specs_lower(spec):
    start = time.process_time()
    function = functools.partial(spec.function, implementation="mosaic_tpu")
    text = lower(function, *jax.eval_shape(spec.arguments), target="v5e")
    assert text.count("tpu_custom_call") == (3 if "gradients" in spec.name else 1)
    assert time.process_time() - start < 4  # well under 2 s where nothing else runs


@pytest.mark.parametrize(
    "name",
    ["segments_all_options", *(pytest.param(n, marks=pytest.mark.slow) for n in ("one", "head_dim_80", "not_causal"))],
)
def test_cases_lower(name):
    arrays = make(CASES[name], "bfloat16")

    def gradients(q, k, v, segments):
        attend = functools.partial(flash_attention, **segments, **arrays.case.options, implementation="mosaic_tpu")
        return jax.grad(lambda *x: jnp.sum(attend(*x).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    text = lower(gradients, arrays.q, arrays.k, arrays.v, arrays.segments, target="v5e")
    assert text.count("tpu_custom_call") == 3


def test_tpu_takes_it_by_default():
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    assert "tpu_custom_call" in lower(flash_attention, q, q, q, target="v5e")
