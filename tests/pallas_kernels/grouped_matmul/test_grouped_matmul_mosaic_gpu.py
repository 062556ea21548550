import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu
from pallas_kernels.grouped_matmul.tiles import TileConfig, choose_tiles
from tests.pallas_kernels.gpu_interpreter import interpreted
from tests.pallas_kernels.grouped_matmul.grouped_cases import CASES, check, make
from tests.pallas_kernels.targets import lower

SMALL = TileConfig(8, 64, 64, stages=2, programs=2)
TALL = TileConfig(128, 128, 32, stages=3, io_slots=1, programs=1)


def run(args, tiles, detect_races=False, times=1):
    with interpreted(detect_races) as interpret:
        f = jax.jit(functools.partial(grouped_matmul_mosaic_gpu, tiles=tiles, interpret=interpret))
        return [jax.block_until_ready(f(*args)) for _ in range(times)]


SLOW = [pytest.param(case, SMALL, marks=pytest.mark.slow, id=f"{case}, small") for case in CASES]
SLOW.append(pytest.param("tile_edges", TALL, marks=pytest.mark.slow, id="tile_edges, tall"))


@pytest.mark.parametrize(("case", "tiles"), SLOW)
def test_matches_the_exact_result(case, tiles):
    args, expected = make(case, jnp.bfloat16)
    check(*run(args, tiles), expected, jnp.bfloat16)


def test_ragged_groups_without_races_twice_equal_to_the_bit():
    args, expected = make("ragged", jnp.bfloat16)
    first, second = run(args, SMALL, detect_races=True, times=2)
    check(first, expected, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


@pytest.mark.parametrize("tokens", [16, 256, 4096])
def test_lowers_for_h200(tokens):
    x, w = jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((8, 14336, 4096), jnp.bfloat16)
    f = functools.partial(grouped_matmul, implementation="mosaic_gpu")
    assert "mosaic_gpu" in lower(f, x, w, jax.ShapeDtypeStruct((8,), jnp.int32), target="h200")


@pytest.mark.parametrize("target", ["b200", "a100"])
def test_declines_other_gpus(target):
    args, _ = make("one_row", jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        lower(functools.partial(grouped_matmul, implementation="mosaic_gpu"), *args, target=target)


def test_what_it_declines():
    args, _ = make("one_row", jnp.float32)
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, got float32"):
        run(args, None)
    (x, w, sizes), _ = make("one_row", jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="multiple of 16, got 120"):
        run((x, w[:, :120], sizes), None)
    with pytest.raises(ValueError, match=r"does not divide a matrix \[128, 128\]"):
        run((x, w, sizes), TileConfig(8, 96))


@pytest.mark.parametrize("tokens", [1, 16, 256, 4096, 16384])
@pytest.mark.parametrize("size", [(14336, 4096), (4096, 14336), (768, 2048), (48, 80)])
def test_chosen_tiles_fit(tokens, size):
    t = choose_tiles(tokens, 8, *size)
    t.check(*size)
    rows = max(64, t.block_rows)
    assert t.stages * (rows + t.block_n) * t.block_k * 2 + t.io_slots * rows * t.block_n * 2 <= 226 * 1024
    assert t.stages >= 3
