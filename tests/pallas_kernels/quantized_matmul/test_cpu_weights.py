import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import cpu_library
from pallas_kernels.quantized_matmul import (
    CpuWeight,
    cpu_repack,
    dequantize_cpu_weight,
    pack_cpu,
    quantize_cpu_weight,
    repack_gguf,
    take_rows,
)

# type -> bytes of a block, places of its f16 numbers, exact
GGUF = {
    "Q8_0": (34, (0,), True),
    "Q4_0": (18, (0,), True),
    "Q4_1": (20, (0, 2), True),
    "Q5_0": (22, (0,), True),
    "Q5_1": (24, (0, 2), True),
    "Q4_K": (144, (0, 2), False),
    "Q5_K": (176, (0, 2), False),
    "Q6_K": (210, (208,), False),
}


def gguf_blocks(rng, name, N=13, blocks=3):
    """Random bytes with scales of either sign that a model could have."""
    num_bytes, places, _ = GGUF[name]
    data = rng.integers(0, 256, (N, blocks, num_bytes), dtype=np.uint8)
    for place in places:
        halves = rng.normal(0, 0.01, (N, blocks)).astype(np.float16)
        data[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    return data.reshape(N, -1)


def by_definition(weight):
    """The matrix, element by element as the docstring of CpuWeight has it."""
    N, K = weight.shape
    bits, group = weight.bits, weight.group
    matrix = np.empty((N, K))
    for n in range(N):
        for k in range(K):
            planes = np.asarray(weight.data)[n // 8, k // 32, :, n % 8, k % 4]
            chunk = k % 32 // 4
            if bits == 8:
                code = int(planes[chunk])
            else:
                code = int(planes[chunk % 4]) >> (4 if chunk >= 4 else 0) & 15
                if bits == 5:
                    code += (int(planes[4]) >> chunk & 1) * 16
                if bits == 6:
                    code += (int(planes[4 + chunk // 4]) >> 2 * (chunk % 4) & 3) * 16
            scale = float(weight.scale[n // 8, k // group, n % 8])
            offset = 0.0 if bits == 8 else -scale * 2 ** (bits - 1)
            if weight.offset is not None:
                offset = float(weight.offset[n // 8, k // group, n % 8])
            matrix[n, k] = code * scale + offset
    return matrix


@pytest.mark.parametrize("name", GGUF)
def test_gguf_blocks_mean_what_gguf_says(rng, name):
    blocks = gguf_blocks(rng, name)
    weight = repack_gguf(blocks, name)
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert weight.shape == wanted.shape
    assert (weight.bits, weight.group) == (int(name[1]), 16 if name == "Q6_K" else 32)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(weight))
    actual = np.asarray(dequantize_cpu_weight(weight))
    if GGUF[name][2]:
        np.testing.assert_array_equal(actual, wanted)
    else:  # a scale and an offset, each half a unit of f16 off
        size = np.abs(wanted).reshape(len(wanted), -1, 16).max(axis=2).repeat(16, axis=1)
        assert (np.abs(actual - wanted) <= 2.0**-9 * np.maximum(size, 0.01)).all()
    np.testing.assert_allclose(actual[::5], by_definition(weight)[::5], rtol=1e-6, atol=1e-8)


def test_many_rows_are_repacked_in_parts(rng):
    blocks = gguf_blocks(rng, "Q4_1", N=5003, blocks=4)
    weight = repack_gguf(blocks, "Q4_1")
    assert weight.shape == (5003, 128)
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(np.asarray(dequantize_cpu_weight(weight)), wanted)


@pytest.mark.parametrize("name", cpu_repack.TYPES)
@pytest.mark.parametrize("N", [1, 16, 43])
def test_the_library_repacks_as_numpy_does(rng, name, N):
    blocks = gguf_blocks(rng, name, N=N)
    wanted, actual = repack_gguf(blocks, name), repack_gguf(blocks, name, cpu_library())
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), actual) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    for leaf in jax.tree.leaves(actual):  # so that a device array is made of it without a copy
        assert jax.device_put(leaf).unsafe_buffer_pointer() == leaf.ctypes.data


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 96])
def test_packed_codes_come_back(rng, bits, group):
    N, K = 11, 96
    codes = rng.integers(0, 2**bits, (N, K), dtype=np.uint8)
    codes = codes.view(np.int8) if bits == 8 else codes
    scale = rng.uniform(0.5, 2, (N, K // group)).astype(np.float16)
    offset = None if bits == 8 else rng.normal(size=scale.shape).astype(np.float16)
    wide = np.repeat(scale.astype(np.float32), group, axis=1)
    for used in (None, offset):
        weight = pack_cpu(codes, scale, used, bits)
        assert (weight.shape, weight.bits, weight.group) == ((N, K), bits, min(group, 32))
        shift = -wide * 2 ** (bits - 1) if bits < 8 else 0
        shift = shift if used is None else np.repeat(used.astype(np.float32), group, axis=1)
        np.testing.assert_allclose(
            np.asarray(dequantize_cpu_weight(weight)), codes * wide + shift, rtol=1e-6, atol=1e-6
        )
        np.testing.assert_allclose(by_definition(weight), codes * wide + shift, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q5_0", "Q6_K"])
def test_take_rows_reads_rows_and_no_more(rng, name):
    weight = jax.tree.map(jnp.asarray, repack_gguf(gguf_blocks(rng, name, N=43), name))
    ids = jnp.asarray([[42, 0], [7, 8]])
    rows = jax.vmap(lambda ids: take_rows(weight, ids))(ids)
    np.testing.assert_array_equal(np.asarray(rows), np.asarray(dequantize_cpu_weight(weight))[np.asarray(ids)])
    outside = take_rows(weight, jnp.asarray([43, -1]))
    np.testing.assert_array_equal(np.asarray(outside), np.asarray(dequantize_cpu_weight(weight))[[42, 0]])


def test_take_rows_needs_no_memory_of_the_matrix():
    weight = jax.eval_shape(lambda: CpuWeight(
        jnp.zeros((4096, 18, 4, 8, 4), jnp.uint8), jnp.zeros((4096, 18, 8), jnp.float16), None, 4096 * 8,
    ))  # fmt: skip
    compiled = jax.jit(take_rows).lower(weight, jax.ShapeDtypeStruct((4,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32), (4, 16), (4, 64), (4, None)])
def test_quantized_values_are_within_half_a_step(rng, bits, group):
    matrix = (rng.standard_normal((13, 128)) + rng.standard_normal((13, 1))).astype(np.float32)
    weight = quantize_cpu_weight(matrix, bits, group)
    groups = matrix.reshape(13, -1, group or 128)
    span = np.abs(groups).max(-1) / 127 if bits == 8 else (groups.max(-1) - groups.min(-1)) / 15
    limit = (span * 0.51 + 2.0**-10 * np.abs(groups).max(-1)).repeat(group or 128, axis=1)
    error = np.abs(np.asarray(dequantize_cpu_weight(weight)) - matrix)
    assert (error <= limit).all()
    assert weight.bits == bits
    assert not np.asarray(dequantize_cpu_weight(quantize_cpu_weight(np.zeros((3, 32)), bits))).any()


def test_a_weight_is_a_tree_with_static_rows(rng):
    weight = quantize_cpu_weight(rng.standard_normal((13, 64)), 4, 32)
    assert [leaf.shape for leaf in jax.tree.leaves(weight)] == [(2, 2, 4, 8, 4), (2, 2, 8), (2, 2, 8)]
    copied = jax.tree.map(jnp.asarray, weight)
    assert copied.shape == (13, 64)
    assert jax.tree.structure(copied) == jax.tree.structure(weight)


def test_wrong_arguments_are_explained(rng):
    codes, scale = np.zeros((8, 64), np.uint8), np.ones((8, 2))
    for message, call in [
        (r"bits must be one of \(4, 5, 6, 8\), got 3", lambda: pack_cpu(codes, scale, None, 3)),
        (r"codes of 8 bits must be int8\[N, K\], got uint8", lambda: pack_cpu(codes, scale, None, 8)),
        ("K=48 must be a multiple of 32", lambda: pack_cpu(codes[:, :48], scale, None, 4)),
        (r"scale must be \[N=8, .*got \(8, 8\)", lambda: pack_cpu(codes, np.ones((8, 8)), None, 4)),
        (r"offset must be \[N=8, .*got \(4, 2\)", lambda: pack_cpu(codes, scale, scale[:4], 4)),
        ("offset must have the shape of scale", lambda: pack_cpu(codes, scale, np.ones((8, 4)), 4)),
        ("8 bits are signed and have no offset", lambda: pack_cpu(codes.view(np.int8), scale, scale, 8)),
        ("are made of Q8_0, Q4_0, .*, not of Q2_K", lambda: repack_gguf(codes, "Q2_K")),
        (r"blocks of Q4_0 must be uint8\[N, a multiple of 18\]", lambda: repack_gguf(codes, "Q4_0")),
        ("bits must be 8 or 4, got 6", lambda: quantize_cpu_weight(scale, 6)),
        ("K=64 must be a multiple of group=48", lambda: quantize_cpu_weight(codes, 4, 48)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
