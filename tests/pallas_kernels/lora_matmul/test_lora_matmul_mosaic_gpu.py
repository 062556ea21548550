import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.tiles import TileConfig
from pallas_kernels.lora_matmul.api import lora_matmul
from pallas_kernels.lora_matmul.mosaic_gpu import lora_matmul_mosaic_gpu
from pallas_kernels.lora_matmul.tiles import LoraTileConfig, choose_tiles
from tests.pallas_kernels.gpu_interpreter import interpreted
from tests.pallas_kernels.lora_matmul.lora_cases import CASES, check, make
from tests.pallas_kernels.targets import lower

SMALL = LoraTileConfig(
    shrink=TileConfig(8, 16, 64, stages=2, consumers=1, splits=2, programs=2),
    expand=TileConfig(8, 64, 16, stages=2, consumers=2, programs=2),
)
WIDE = LoraTileConfig(
    shrink=TileConfig(64, 16, 32, stages=3, consumers=1, programs=1),
    expand=TileConfig(16, 128, 16, stages=2, io_slots=1, consumers=1, programs=3),
)


def run(args, kwargs, tiles, detect_races=False):
    with interpreted(detect_races) as interpret:
        f = functools.partial(lora_matmul_mosaic_gpu, tiles=tiles, interpret=interpret)
        return jax.block_until_ready(jax.jit(f)(*args, **kwargs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_exact_result(case):
    args, kwargs, expected = make(case, jnp.bfloat16)
    check(run(args, kwargs, SMALL), case, expected, kwargs, jnp.bfloat16)


@pytest.mark.parametrize("case", [CASES[4], CASES[8]], ids=str)
def test_other_tiles(case):
    args, kwargs, expected = make(case, jnp.bfloat16)
    check(run(args, kwargs, WIDE), case, expected, kwargs, jnp.bfloat16)


def test_no_races_and_a_second_run_is_equal_to_the_bit():
    args, kwargs, _ = make(CASES[4], jnp.bfloat16)
    first, second = (np.asarray(run(args, kwargs, SMALL, races), np.float32) for races in (True, False))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("tokens", "rank"), [(1, 16), (256, 64), (4096, 128)])
@pytest.mark.parametrize("has_base", [True, False])
def test_lowers_for_h200(tokens, rank, has_base):
    shapes = [(tokens, 4096), (64, rank, 4096), (64, 14336, rank)]
    x, a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    base = jax.ShapeDtypeStruct((tokens, 14336), jnp.bfloat16) if has_base else None
    f = functools.partial(lora_matmul, implementation="mosaic_gpu")
    i, scales = jax.ShapeDtypeStruct((tokens,), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.float32)
    text = lower(lambda *args: f(*args[:4], scales=args[4], base=args[5]), x, a, b, i, scales, base, target="h200")
    assert text.count("mosaic_gpu") >= 2


@pytest.mark.parametrize("target", ["b200", "a100"])
def test_declines_other_gpus(target):
    args, kwargs, _ = make(CASES[0], jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        lower(functools.partial(lora_matmul, implementation="mosaic_gpu", **kwargs), *args, target=target)


def test_what_it_declines():
    args, kwargs, _ = make(CASES[0], jnp.float32)
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, got float32"):
        run(args, kwargs, None)
    x, a, b, i = jnp.ones((3, 64)), jnp.ones((2, 8, 64)), jnp.ones((2, 64, 8)), jnp.zeros(3, jnp.int32)
    with pytest.raises(NotImplementedError, match="a rank that is a multiple of 16 up to 256"):
        run([*(value.astype(jnp.bfloat16) for value in (x, a, b)), i], {}, None)
    args, kwargs, _ = make(CASES[0], jnp.bfloat16)
    with pytest.raises(ValueError, match=r"does not divide a matrix \[128, 16\]"):
        run(args, kwargs, LoraTileConfig(SMALL.shrink, TileConfig(8, 64, 64)))


@pytest.mark.parametrize("tokens", [1, 7, 16, 256, 4096])
@pytest.mark.parametrize("rank", [16, 32, 64, 128])
def test_chosen_tiles_fit(tokens, rank):
    tiles = choose_tiles(tokens, 64, rank, 4096, 14336)
    for t, n, k, itemsize in ((tiles.shrink, rank, 4096, 4), (tiles.expand, 14336, rank, 2)):
        t.check(n, k)
        rows = max(64, t.block_rows)
        used = t.stages * (rows + t.block_n) * t.block_k * 2 + t.io_slots * rows * t.block_n * itemsize
        assert used <= 226 * 1024
        assert t.stages >= 2
