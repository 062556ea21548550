import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.mosaic_tpu import quantized_matmul_mosaic_tpu
from pallas_kernels.quantized_matmul.tpu_tiles import TpuTiles, choose_tiles, prefer_xla
from pallas_kernels.quantized_matmul.weights import QuantizedWeight
from tests.pallas_kernels.quantized_matmul.cases import Case, assert_close, cases, check, make, make_weight
from tests.pallas_kernels.targets import lower, targeting

interpreted = functools.partial(quantized_matmul_mosaic_tpu, interpret=True)

QUICK = [
    Case("int8", 1, 192, 33, "bfloat16"),
    Case("int8", 9, 128, 40, "float32", "int8"),
    Case("int8_g32", 2, 192, 40),
    Case("int4", 7, 192, 33, "float16"),
    Case("int4_g32_zero", 8, 192, 129),
    Case("float8_g64", 2, 64, 24, "float32", "float8"),
]
# Several blocks in each direction, the last of the outputs (and of the rows) only in part there.
TILED = [
    (Case("int4_g32_zero", 33, 512, 200), TpuTiles(32, 128, 128)),
    (Case("int4_g128", 17, 512, 40, "bfloat16"), TpuTiles(16, 40, 128)),
    (Case("int8_g128", 9, 512, 129, "float32", "int8"), TpuTiles(32, 128, 256)),
    (Case("int4_zero", 9, 512, 129), TpuTiles(8, 128, 128)),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_kernel(case):
    check(interpreted, case)


@pytest.mark.parametrize(("case", "tiles"), TILED, ids=str)
def test_kernel_in_many_blocks(case, tiles):
    check(functools.partial(interpreted, tiles=tiles), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases()[4::9], ids=str)  # a stride that meets every format with many sizes
def test_more_cases(case):
    check(interpreted, case)


@pytest.mark.slow
def test_copies_do_not_race():
    case = Case("int4_g32_zero", 2, 256, 256)
    x, x_scale, weight = make(case)
    out = quantized_matmul_mosaic_tpu(
        x, weight, x_scale=x_scale, out_dtype=jnp.float32, tiles=TpuTiles(8, 128, 128),
        interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    )  # fmt: skip
    assert_close(np.asarray(out), x, x_scale, weight, "float32")


def test_a_bad_row_touches_no_other(rng):
    x = rng.standard_normal((3, 128)).astype(np.float32)
    bad = x.copy()
    bad[1, 5] = np.nan
    weight = make_weight("int4_g32_zero", 24, 128)
    run = jax.jit(functools.partial(interpreted, x_scale=None, out_dtype=jnp.float32))
    out, clean = np.asarray(run(bad, weight)), np.asarray(run(x, weight))
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("target", ["v5e", "v6e"])
@pytest.mark.parametrize("name", ["int8", "int8_g32", "float8", "int4", "int4_g32_zero", "int4_g128"])
def test_lowers(name, target):
    weight = jax.eval_shape(lambda: make_weight(name, 512, 4096))
    for rows in (1,) if target == "v5e" else (256,):
        text = lower(
            lambda x, w: quantized_matmul(x, w, implementation="mosaic_tpu"),
            jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), weight, target=target,
        )  # fmt: skip
        assert "tpu_custom_call" in text


@pytest.mark.parametrize(("name", "rows", "kernel"), [
    ("int8", 1, False), ("int4", 2048, False), ("int4", 64, True), ("int4_g128", 16, True), ("int4_g128", 2048, False),
    ("int4_g32_zero", 64, True), ("int4_g32_zero", 2048, False), ("int8_g128", 2048, True),
])  # fmt: skip
def test_a_tpu_takes_the_kernel_where_xla_would_store_the_matrix(name, rows, kernel):
    weight = jax.eval_shape(lambda: make_weight(name, 256, 256))
    text = lower(quantized_matmul, jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16), weight, target="v5e")
    assert ("tpu_custom_call" in text) == kernel
    assert prefer_xla(rows, weight) != kernel


def test_what_does_not_fit_is_refused():
    odd = QuantizedWeight(jnp.zeros((8, 192), jnp.int8), jnp.zeros((8, 2)), None, 8, 96)
    with targeting("v5e"), pytest.raises(NotImplementedError, match="groups of 96 inputs in 8 bits do not fit 128"):
        quantized_matmul(jnp.ones((1, 192)), odd, implementation="mosaic_tpu")
    assert prefer_xla(1, odd)
    x, x_scale, weight = make(Case("int8", 2, 192, 40))
    with pytest.raises(ValueError, match="block_l of whole 128s in 192"):
        interpreted(x, weight, x_scale=x_scale, out_dtype=jnp.float32, tiles=TpuTiles(8, 40, 128))


@pytest.mark.parametrize("stored", [32, 192, 2048, 4096, 7168, 14336])
def test_tiles_cover_the_weight_and_fit_vmem(stored):
    for rows, (unit, expansion) in ((r, u) for r in (16, 64, 2048) for u in ((128, 1), (128, 4), (512, 1))):
        tiles = choose_tiles(rows, 14336, stored, unit, expansion)
        assert stored % tiles.block_l == 0
        assert tiles.block_l == stored or tiles.block_l % unit == 0
        m, n, k = tiles.block_m, tiles.block_n, tiles.block_l
        assert 2 * n * k + 2 * 2 * 2 * m * k + (4 + 4 * expansion + 2 * 2) * m * n < 14 * 2**20
