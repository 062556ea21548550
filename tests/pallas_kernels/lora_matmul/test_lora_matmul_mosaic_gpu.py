import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu_rows
from pallas_kernels.grouped_matmul.tiles import TileConfig
from pallas_kernels.lora_matmul.api import lora_matmul
from pallas_kernels.lora_matmul.mosaic_gpu import lora_matmul_mosaic_gpu
from pallas_kernels.lora_matmul.tiles import LoraTileConfig, choose_tiles
from tests.pallas_kernels.gpu_interpreter import MISSING_WAIT, interpreted
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


def run(args, kwargs, tiles, detect_races=False, times=1):
    with interpreted(detect_races) as interpret:
        f = jax.jit(functools.partial(lora_matmul_mosaic_gpu, tiles=tiles, interpret=interpret))
        return [jax.block_until_ready(f(*args, **kwargs)) for _ in range(times)]


SLOW = [  # the mixture is below
    pytest.param(case, SMALL, marks=pytest.mark.slow, id=str(case)) for case in CASES if case.name != "mixed"
]
OTHER = [pytest.param(CASES[8], WIDE, marks=pytest.mark.slow, id="neither, wide")]


@pytest.mark.parametrize(("case", "tiles"), [*OTHER, *SLOW])
def test_matches_the_exact_result(case, tiles):
    args, kwargs, expected = make(case, jnp.bfloat16)
    check(*run(args, kwargs, tiles), case, expected, kwargs, jnp.bfloat16)


@pytest.mark.parametrize("tiles", [SMALL, pytest.param(WIDE, marks=pytest.mark.slow)], ids=["small", "wide"])
def test_a_mixture_without_races_twice_equal_to_the_bit(tiles):
    args, kwargs, expected = make(CASES[4], jnp.bfloat16)
    first, second = run(args, kwargs, tiles, detect_races=True, times=2)
    check(first, CASES[4], expected, kwargs, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


class WithoutWaitsIn:
    """The Pallas module, less the waits for a barrier in the function called `name`."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __getattr__(self, name):
        return getattr(self.module, name)

    def barrier_wait(self, barrier):
        if inspect.currentframe().f_back.f_code.co_name != self.name:
            self.module.barrier_wait(barrier)


def test_the_race_detector_finds_a_missing_wait(monkeypatch):
    """The wait for base; the interpreter has no clocks for what wgmma reads, so it can not miss the wait for that."""
    args, kwargs, _ = make(CASES[0], jnp.bfloat16)
    monkeypatch.setattr(mosaic_gpu_rows, "plgpu", WithoutWaitsIn(mosaic_gpu_rows.plgpu, "multiply"))
    with pytest.raises(Exception, match=MISSING_WAIT):
        run(args, kwargs, SMALL, detect_races=True)


@pytest.mark.parametrize(
    ("tokens", "rank", "has_base"),
    [(1, 16, True), pytest.param(256, 64, False, marks=pytest.mark.slow), (4096, 128, True)],
)
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
