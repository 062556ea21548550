import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import mosaic_gpu
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.kv_write.mosaic_gpu import write_kv_mosaic_gpu
from pallas_kernels.kv_write.tiles import TileConfig, choose_tiles
from tests.pallas_kernels.gpu_interpreter import interpreted
from tests.pallas_kernels.kv_write.cases import CASES, DEFAULT, EMPTY, FLOAT16, SLOW, Case, check, make
from tests.pallas_kernels.targets import lower


def _run(arguments, tiles=None):
    *positional, rope = arguments
    with interpreted(detect_races=True) as interpret:
        function = functools.partial(write_kv_mosaic_gpu, rope=rope, interpret=interpret, tiles=tiles)
        return jax.block_until_ready(jax.jit(function)(*positional))


@pytest.mark.parametrize(
    "case", [*DEFAULT, *(pytest.param(c, marks=pytest.mark.slow) for c in (*SLOW, FLOAT16, EMPTY))], ids=str
)
def test_equals_the_reference_without_races(case):
    arguments = make(case)
    check(case, arguments, _run(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 5, 64])
def test_any_block_gives_the_same_bits(block):
    arguments = make(Case("int8", "bf16", half=32))
    tiled, again = _run(arguments, TileConfig(block)), _run(arguments)
    for a, b in zip(jax.tree.leaves(tiled), jax.tree.leaves(again)):
        np.testing.assert_array_equal(np.asarray(a[:, 1:]).view(np.uint8), np.asarray(b[:, 1:]).view(np.uint8))


def test_the_race_detector_sees_a_missing_barrier(monkeypatch):
    monkeypatch.setattr(mosaic_gpu.plgpu, "barrier_wait", lambda *_: None)
    with pytest.raises(Exception, match="race"):
        _run(make(Case("bf16", "bf16", T=1, H=64, K=1, padding=0)))


@pytest.mark.parametrize("case", [*CASES, FLOAT16], ids=str)
def test_lowers_for_hopper(case):
    *positional, rope = make(case)
    text = lower(lambda *a: write_kv(*a, rope=rope, implementation="mosaic_gpu"), *positional, target="h200")
    assert "mosaic_gpu" in text


def test_refuses_rows_that_the_copy_engine_cannot_move():
    *positional, rope = make(Case("int2", "bf16", H=96))
    with pytest.raises(NotImplementedError, match="k would be stored in rows of 24 bytes"):
        lower(lambda *a: write_kv(*a, rope=rope, implementation="mosaic_gpu"), *positional, target="h200")


def test_refuses_heads_too_large_for_shared_memory():
    *positional, rope = make(Case("f32", "f32", dtype="f32", H=512, half=256))
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        lower(lambda *a: write_kv(*a, rope=rope, implementation="mosaic_gpu"), *positional, target="h200")


def test_blocks_are_large_when_they_fill_the_card():
    assert choose_tiles(8192, 8) == TileConfig(64)
    assert choose_tiles(64, 8) == TileConfig(4)
    assert choose_tiles(1, 8) == TileConfig(1)
    with pytest.raises(ValueError, match=r"block_tokens must be in 1\.\.64, got 65"):
        TileConfig(65)


def test_takes_slots_of_any_integer_type():
    k_pages, v_pages, k, v, slots, rope = make(EMPTY)
    lower(
        lambda *a: write_kv(*a, rope=rope, implementation="mosaic_gpu"), k_pages, v_pages, k, v,
        slots.astype(jnp.uint32), target="h200",
    )  # fmt: skip
