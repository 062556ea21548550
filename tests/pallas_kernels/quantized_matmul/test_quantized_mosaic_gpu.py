import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul import mosaic_gpu_unpack, mosaic_gpu_w8a8
from pallas_kernels.quantized_matmul.mosaic_gpu import quantized_matmul_mosaic_gpu
from pallas_kernels.quantized_matmul.tiles import MAX_SHARED_MEMORY, TileConfig, choose_tiles, shared_memory
from tests.pallas_kernels.gpu_interpreter import MISSING_WAIT, interpreted
from tests.pallas_kernels.quantized_matmul.cases import FORMATS, Case, assert_close, make, make_weight
from tests.pallas_kernels.targets import lower

BF16 = "bfloat16"
# (case, tiles): block_m, block_n, block_k, stages, splits
QUICK = [
    # One scale an output, more steps than slots.
    (Case("float8", 5, 192, 64, BF16), TileConfig(8, 64, 64, 2)),
    # Two blocks of rows, three steps in two parts, a group for each half of a block of codes.
    (Case("int4_g32_zero", 9, 384, 64, BF16), TileConfig(8, 64, 128, 2, 2)),
    # A step narrower than a group, a number of groups that is padded, two warpgroups, result in f32.
    (Case("int8_g128", 1, 384, 128, "float16"), TileConfig(8, 128, 64, 3)),
    # Scales on the weights; pieces of the result.
    (Case("int4_g64_zero", 130, 128, 64, BF16), TileConfig(256, 64, 64, 2)),
    (Case("int8", 17, 640, 64, BF16, "int8"), TileConfig(32, 64, 128, 2, 2)),
    (Case("float8", 8, 384, 128, BF16, "float8"), TileConfig(8, 64, 128, 2)),
]
# Every format in every type, and every size, with the tiles that are chosen.
THOROUGH_SIZES = [(1, 128, 64), (8, 256, 192), (65, 256, 128), (129, 128, 64)]
THOROUGH = [
    (Case(name, *THOROUGH_SIZES[i % 4], (BF16, "float16")[(i // 2) % 2]), None) for i, name in enumerate(FORMATS)
] + [
    (Case("int4_zero", 5, 192, 64, BF16), TileConfig(8, 64, 64, 2)),
    (Case("int8", 65, 256, 128, BF16, "int8"), None),
    (Case("float8", 129, 256, 64, BF16, "float8"), None),
]


def run(case: Case, tiles: TileConfig | None, out_dtype: Any = None, x: jax.Array | None = None) -> np.ndarray:
    """The result of two runs of the interpreted kernel, with the race detector, which must be the same bits."""
    made, x_scale, weight = make(case)
    x = made if x is None else x
    with interpreted(detect_races=True) as interpret:
        function = jax.jit(
            functools.partial(
                quantized_matmul_mosaic_gpu, out_dtype=out_dtype or case.dtype, interpret=interpret, tiles=tiles
            )
        )
        first, second = (np.asarray(function(x, weight, x_scale=x_scale)) for _ in range(2))
    assert first.shape == (case.M, case.N)
    assert first.dtype == jnp.dtype(out_dtype or case.dtype)
    np.testing.assert_array_equal(first, second)
    return first


@pytest.mark.parametrize(("case", "tiles"), QUICK, ids=str)
def test_like_the_dequantized_product(case: Case, tiles: TileConfig) -> None:
    x, x_scale, weight = make(case)
    assert_close(run(case, tiles).astype(np.float64), x, x_scale, weight, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "tiles"), THOROUGH, ids=str)
def test_more_cases(case: Case, tiles: None) -> None:
    test_like_the_dequantized_product(case, tiles)


@pytest.mark.parametrize("name", ["int4_g128_zero"])
def test_sums_in_f32_and_rows_apart(name: str) -> None:
    """4-bit weights enter exactly (no 16-bit rounding of the products of codes and scales); NaN stays in its row."""
    case = Case(name, 3, 256, 64, BF16)
    x, _, weight = make(case)
    out = run(case, TileConfig(8, 64, 128, 2), jnp.float32, x.at[1, 5].set(jnp.nan))
    assert np.isnan(out[1]).all()
    kept = jnp.array([0, 2])
    assert_close(out[[0, 2]].astype(np.float64), x[kept], None, weight, "float32")


def test_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(copies: Any, full: Any, empty: Any, start: Any, count: Any, stages: int) -> None:
        del empty
        jax.lax.fori_loop(0, count, lambda i, _: copies(start + i, i % stages, full.at[i % stages]), None)

    monkeypatch.setattr(mosaic_gpu_w8a8, "produce", hasty)
    with pytest.raises(Exception, match=MISSING_WAIT):
        run(Case("int8", 8, 192, 64, BF16, "int8"), TileConfig(8, 64, 64, 2))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_unpacking_is_exact(dtype: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    dtype = jnp.dtype(dtype)
    for shift, expected in ((0, codes % 16), (4, codes // 16)):
        unpacked = mosaic_gpu_unpack._code(jnp.asarray(codes), shift, dtype, inline=False)
        np.testing.assert_array_equal(unpacked.astype(jnp.float32), expected * 1.0 - mosaic_gpu_unpack.CODE_OFFSET)
    signed = mosaic_gpu_unpack._int8(jnp.asarray(codes), dtype)
    np.testing.assert_array_equal(signed.astype(jnp.float32), codes.view(np.int8).astype(np.float32))
    float8 = mosaic_gpu_unpack._float8(jnp.asarray(codes), dtype)
    np.testing.assert_array_equal(float8.astype(jnp.float32), codes.view(jnp.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("shift", [0, 4])
def test_inline_code_is_the_array_operation(shift: int) -> None:
    """The words of `_inline_nibbles`, with the byte permutation of PTX, against `_nibbles`."""
    packed = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    words = (packed.view(np.uint32) >> shift) & mosaic_gpu_unpack.NIBBLES
    sources = np.concatenate([words.view(np.uint8).reshape(-1, 4), np.full((1024, 1), 0x43, np.uint8)], axis=1)
    permuted = [sources[:, [(selector >> (4 * i)) & 7 for i in range(4)]] for selector in mosaic_gpu_unpack.SPREAD]
    actual = np.ascontiguousarray(np.concatenate(permuted, axis=1)).view(np.uint16).reshape(-1)
    np.testing.assert_array_equal(actual, mosaic_gpu_unpack._nibbles(jnp.asarray(packed), shift, 0x43))


@pytest.mark.parametrize(("M", "x_bytes"), [(1, 2), (16, 2), (33, 2), (64, 2), (100, 2), (2048, 2), (16, 1), (2048, 1)])
def test_chosen_tiles_fit(M: int, x_bytes: int) -> None:
    most = 256 if x_bytes == 2 else 128
    for (N, K), bits, group in itertools.product(
        [(64, 64), (192, 11008), (14336, 4096), (4096, 14336), (128256, 4096)], (4, 8), (32, 64, 128, None)
    ):
        if K % (group or K):
            continue
        tiles = choose_tiles(M, N, K, bits, group or K, True, x_bytes, most)
        assert N % tiles.block_n == 0
        assert K % tiles.block_k == 0
        assert tiles.splits <= K // tiles.block_k
        assert tiles.block_k <= 4 * (group or K)
        assert shared_memory(tiles, bits, x_bytes, 0 if group is None else 2, True) <= MAX_SHARED_MEMORY


def test_chosen_tiles_use_the_machine() -> None:
    assert choose_tiles(1, 14336, 4096, 4, 128, True) == TileConfig(8, 128, 256, 8, 1)
    down = choose_tiles(16, 4096, 14336, 4, 128, True)
    assert 100 < 4096 // down.block_n * down.splits <= 132
    assert choose_tiles(2048, 14336, 4096, 8, 4096) == TileConfig(256, 128, 64, 4, 1)


def test_refusals() -> None:
    x, weight = jnp.zeros((2, 128), jnp.bfloat16), make_weight("int8", 64, 128)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        quantized_matmul_mosaic_gpu(x, weight)
    refuse = functools.partial(quantized_matmul_mosaic_gpu, interpret=plgpu.InterpretGPUParams())
    with pytest.raises(NotImplementedError, match="multiples of 64, got N=40"):
        refuse(x, make_weight("int8", 40, 128))
    with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
        refuse(x.astype(jnp.float32), weight)
    with pytest.raises(NotImplementedError, match="at least one row"):
        refuse(x[:0], weight)
    with pytest.raises(NotImplementedError, match="holds more than 4 groups of 32"):
        refuse(jnp.zeros((2, 256), jnp.bfloat16), make_weight("int8_g32", 64, 256), tiles=TileConfig(8, 64, 256, 2))
    with pytest.raises(NotImplementedError, match="does not fit"):
        refuse(x, weight, tiles=TileConfig(8, 128, 64, 2))
    codes, ones = jnp.zeros((2, 128), jnp.int8), jnp.ones(2)
    with pytest.raises(NotImplementedError, match="of one type"):
        refuse(codes, make_weight("float8", 64, 128), x_scale=ones)
    with pytest.raises(NotImplementedError, match="one scale an output"):
        refuse(codes, make_weight("int8_g32", 64, 128), x_scale=ones)
    with pytest.raises(ValueError, match="block_m must be"):
        TileConfig(24, 64, 64, 2)
    with pytest.raises(ValueError, match="block_k must be"):
        TileConfig(8, 64, 96, 2)


def lowered(name: str, M: int, dtype: str, activations: str | None = None, N: int = 256, K: int = 512) -> str:
    x, x_scale, weight = jax.eval_shape(lambda: make(Case(name, M, K, N, dtype, activations)))
    out_dtype = jnp.bfloat16 if activations else dtype
    return lower(functools.partial(quantized_matmul_mosaic_gpu, out_dtype=out_dtype), x, weight, target="h200") if (
        x_scale is None
    ) else lower(
        lambda x, weight, x_scale: quantized_matmul_mosaic_gpu(x, weight, x_scale=x_scale, out_dtype=out_dtype),
        x, weight, x_scale, target="h200",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "M", "dtype", "activations"),
    [
        ("int4_g128_zero", 1, BF16, None),
        ("float8_g64", 300, BF16, None),
        ("int8", 16, "float16", None),
        ("int8", 300, BF16, "int8"),
        ("float8", 8, BF16, "float8"),
    ],
)
def test_lowers_for_hopper(name: str, M: int, dtype: str, activations: str | None) -> None:
    assert "mosaic_gpu" in lowered(name, M, dtype, activations)
