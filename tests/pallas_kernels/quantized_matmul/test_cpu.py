import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import (
    CpuWeight,
    dequantize_cpu_weight,
    pack_cpu,
    quantize_cpu_weight,
    quantize_weight,
    quantized_matmul,
    quantized_matmuls,
)
from pallas_kernels.quantized_matmul.cpu import quantized_matmul_cpu, round_activations
from tests.pallas_kernels import isas
from tests.pallas_kernels.targets import targeting

K = 96


def make_weight(bits, group, offset, N=21, seed=0):
    """Full-range codes, so that sums in 16 bits would overflow if they could; rows and groups of many sizes."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (N, K), dtype=np.uint8)
    codes[:2] = 2**bits - 1
    codes = codes.view(np.int8) if bits == 8 else codes
    if bits == 8:
        codes[:2] = -128
    scale = rng.uniform(0.5, 2, (N, K // group)) * rng.choice([-1, 1, 1e-5], (N, K // group))  # some subnormal in f16
    return pack_cpu(codes, scale, rng.normal(size=scale.shape) * 2.0 ** (bits - 1) if offset else None, bits)


def make_x(M, dtype="float32", seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((M, K)) * rng.uniform(0.1, 10, (M, 1))
    x[-1, :32] = 3.0  # all codes 127
    x[0, 32:64] = 0
    return jnp.asarray(x, dtype)


def multiply(x, weight, **options):
    """The C++ kernel with one weight."""
    return quantized_matmul_cpu(x, weight, **options)[0]


def expect(x, weight, activations):
    """The product in f64, and what K random terms of it sum to."""
    values = x.astype(jnp.float32) if activations is None else round_activations(x, activations)
    values = np.asarray(values, np.float64)
    matrix = np.asarray(dequantize_cpu_weight(weight), np.float64)
    return values @ matrix.T, np.sqrt((values**2).sum(1)[:, None] * (matrix**2).mean(1)[None])


FORMATS = [(bits, 32, offset) for bits in (4, 5, 6) for offset in (False, True)]
FORMATS += [(8, 32, False), (6, 16, False), (6, 16, True)]


@pytest.mark.parametrize("isa", isas.NAMES)
@pytest.mark.parametrize("activations", [None, "int16", "int8"])
@pytest.mark.parametrize(("bits", "group", "offset"), FORMATS)
def test_product(isa, activations, bits, group, offset):
    """All numbers of rows in one compiled program: each is checked, twice, against f64."""
    weight = make_weight(bits, group, offset)
    xs = [make_x(M, dtype) for M, dtype in itertools.product((1, 2, 3, 5, 8, 33), ("float32", "bfloat16"))]

    @jax.jit
    def run(xs, weight):
        return [multiply(x, weight, activations=activations, library=isas.library_for(isa)) for x in xs]

    outs, again = run(xs, weight), run(xs, weight)
    for x, out, other in zip(xs, outs, again):
        wanted, size = expect(x, weight, activations)
        assert (out.shape, out.dtype) == ((len(x), 21), jnp.float32)
        error = np.abs(np.asarray(out, np.float64) - wanted)
        assert (error <= 1e-5 * np.maximum(size, np.abs(wanted))).all(), (x.shape, x.dtype, (error / size).max())
        np.testing.assert_array_equal(np.asarray(out), np.asarray(other))


@pytest.mark.parametrize("isa", isas.NAMES)
@pytest.mark.parametrize("activations", [None, "int16", "int8"])
@pytest.mark.parametrize(("bits", "group", "offset"), [FORMATS[i] for i in (0, 3, 6, 8)])
def test_a_result_depends_neither_on_its_neighbours_nor_on_the_split(isa, activations, bits, group, offset):
    """Bit for bit: rows of x alone or among others, rows of the weight alone or among others."""
    weight = make_weight(bits, group, offset, N=200)
    x = make_x(33)
    run = jax.jit(functools.partial(multiply, activations=activations, library=isas.library_for(isa)))
    whole = np.asarray(run(x, weight))
    for M in (1, 2, 4, 7):
        np.testing.assert_array_equal(np.asarray(run(x[:M], weight)), whole[:M])
    for first, last in ((0, 3), (5, 6), (10, 25)):
        part = jax.tree.map(lambda leaf: leaf[first:last], weight)  # noqa: B023
        part = dataclasses.replace(part, num_rows=8 * (last - first))
        np.testing.assert_array_equal(np.asarray(run(x, part)), whole[:, 8 * first : 8 * last])


@pytest.mark.parametrize("activations", [None, "int16", "int8"])
def test_several_weights_are_as_one_after_the_other(activations):
    """Bit for bit, in one call if their format is one, else in several; gradients are added up."""
    formats = [(6, 16, False, 21), (6, 16, False, 200), (6, 16, False, 3), (4, 32, True, 8)]
    weights = [jax.tree.map(jnp.asarray, make_weight(*each, seed=i)) for i, each in enumerate(formats)]
    x = make_x(5)
    run = jax.jit(functools.partial(quantized_matmuls, activations=activations, implementation="cpu"))
    one = functools.partial(quantized_matmul, activations=activations, implementation="cpu")
    for some, calls in ((weights[:3], 1), (weights, 4)):
        assert run.lower(x, some).as_text().count("@jaxinfer_quantized_matmul") == calls
        for out, weight in zip(run(x, some), some):
            np.testing.assert_array_equal(np.asarray(out), np.asarray(one(x, weight)))
    gradient = jax.grad(lambda x: sum(jnp.sum(out) for out in run(x, weights)[1:]))(x)
    matrices = [np.asarray(dequantize_cpu_weight(weight)) for weight in weights[1:]]
    wanted = np.broadcast_to(sum(matrix.sum(0) for matrix in matrices), x.shape)
    np.testing.assert_allclose(np.asarray(gradient), wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("N", [1, 7, 8, 9, 64])
def test_any_number_of_rows_and_nothing_beyond(N, out_dtype):
    weight = make_weight(4, 32, True, N)
    padding = np.arange(8 * len(weight.data)).reshape(-1, 1, 8) >= N
    poisoned = dataclasses.replace(
        weight, scale=np.where(padding, np.float16(np.nan), weight.scale),
        data=np.where(padding[..., None, None].transpose(0, 1, 3, 2, 4), np.uint8(255), weight.data),
    )  # fmt: skip
    x = make_x(3)
    out = quantized_matmul(x, poisoned, activations="int8", out_dtype=out_dtype, implementation="cpu")
    assert (out.shape, out.dtype) == ((3, N), out_dtype)
    wanted, size = expect(x, weight, "int8")
    error = np.abs(np.asarray(out, np.float64) - wanted)
    assert (error <= np.maximum(1e-5 * size, (2.0**-8 if out_dtype == jnp.bfloat16 else 1e-5) * np.abs(wanted))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activations", [None, "int16", "int8"])
@pytest.mark.parametrize("isa", isas.NAMES)
def test_a_bad_row_stays_bad_and_touches_no_other(isa, activations, value):
    weight = make_weight(4, 32, True)
    x = make_x(5)
    bad = x.at[2, 5].set(value)
    run = functools.partial(multiply, activations=activations, library=isas.library_for(isa))
    out, clean = np.asarray(run(bad, weight)), np.asarray(run(x, weight))
    assert not np.isfinite(out[2]).any()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("implementation", ["cpu", "xla", "reference"])
@pytest.mark.parametrize("activations", [None, "int16", "int8"])
def test_public_function(implementation, activations):
    weight = jax.tree.map(jnp.asarray, make_weight(6, 16, False))
    x = make_x(6).reshape(2, 3, K)
    out = jax.jit(functools.partial(quantized_matmul, activations=activations, implementation=implementation))(
        x, weight
    )
    wanted, size = expect(x.reshape(6, K), weight, activations)
    assert out.shape == (2, 3, 21)
    assert (np.abs(np.asarray(out).reshape(6, 21) - wanted) <= 1e-5 * np.maximum(size, np.abs(wanted))).all()
    assert quantized_matmul(x[:0], weight, implementation=implementation).shape == (0, 3, 21)


def test_scan_and_vmap():
    weights = [jax.tree.map(jnp.asarray, make_weight(4, 32, True, N=K, seed=seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    x = make_x(2) * 1e-3
    product = functools.partial(quantized_matmul, activations="int8", implementation="cpu")
    scanned = jax.jit(lambda x, ws: jax.lax.scan(lambda x, w: (product(x, w), None), x, ws)[0])(x, stacked)
    looped = x
    for weight in weights:
        looped = product(looped, weight)
    np.testing.assert_array_equal(np.asarray(scanned), np.asarray(looped))
    mapped = jax.jit(jax.vmap(product, in_axes=(None, 0)))(x, stacked)
    np.testing.assert_array_equal(np.asarray(mapped), np.stack([np.asarray(product(x, weight)) for weight in weights]))
    rows = jax.vmap(product, in_axes=(0, None))(x[:, None], weights[0])
    np.testing.assert_array_equal(np.asarray(rows[:, 0]), np.asarray(product(x, weights[0])))


@pytest.mark.parametrize("activations", [None, "int16", "int8"])
def test_gradient_of_x(rng, activations):
    weight = make_weight(5, 32, True)
    cotangent = jnp.asarray(rng.standard_normal((3, 21)), jnp.float32)
    matrix = np.asarray(dequantize_cpu_weight(weight))

    def loss(x):
        return jnp.sum(quantized_matmul(x, weight, activations=activations, implementation="cpu") * cotangent)

    gradient = np.asarray(jax.jit(jax.grad(loss))(make_x(3)))
    np.testing.assert_allclose(gradient, np.asarray(cotangent) @ matrix, rtol=1e-4, atol=1e-3)


def test_the_kernel_is_taken_by_default_and_allocates_little():
    weight = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, quantize_cpu_weight(np.zeros((512, 1024)), 4, 32)))
    lowered = jax.jit(quantized_matmul).lower(jax.ShapeDtypeStruct((1, 1024), jnp.float32), weight)
    assert "jaxinfer_quantized_matmul" in lowered.as_text()
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 10_000


def test_refusals():
    x, weight = make_x(2), make_weight(4, 32, False)
    other = quantize_weight(jnp.ones((8, K)))
    for message, call in [
        ("pack it with quantize_cpu_weight", lambda: quantized_matmul(x, other, implementation="cpu")),
        ("is laid out for CPUs", lambda: quantized_matmul(x, weight, implementation="mosaic_gpu")),
        ("is laid out for CPUs", lambda: quantized_matmul(x, weight, implementation="mosaic_tpu")),
        ("x in f32 or bf16, got float16", lambda: quantized_matmul(x.astype("float16"), weight, implementation="cpu")),
        (
            "out_dtype in f32 or bf16, got float16",
            lambda: quantized_matmul(x, weight, out_dtype="float16", implementation="cpu"),
        ),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            call()
    assert quantized_matmul(x.astype(jnp.float16), weight).dtype == jnp.float16
    with targeting("h200"), pytest.raises(NotImplementedError, match="cpu is for CPUs, this is gpu"):
        jax.eval_shape(functools.partial(quantized_matmul, implementation="cpu"), x, weight)
    with targeting("h200"):
        assert jax.eval_shape(quantized_matmul, x, weight).shape == (2, 21)


def test_wrong_arguments_are_explained():
    x, weight = make_x(2), make_weight(4, 32, True)
    replace = functools.partial(dataclasses.replace, weight)
    for message, call in [
        (r"x must have shape \[..., K=96\]", lambda: quantized_matmul(x[:, :64], weight)),
        ('use "int16" or "int8" or None', lambda: quantized_matmul(x, weight, activations="float8")),
        ("weight.data must be", lambda: quantized_matmul(x, replace(data=weight.data[:, :, :3]))),
        ("of 4 bits must be uint8, got int8", lambda: quantized_matmul(x, replace(data=weight.data.view(np.int8)))),
        ("num_rows=25 does not fit", lambda: quantized_matmul(x, replace(num_rows=25))),
        ("K = 0", lambda: quantized_matmul(x[:, :0], replace(data=weight.data[:, :0]))),
        (r"weight.scale must be f16\[3, 3 or 6, 8\]", lambda: quantized_matmul(x, replace(scale=weight.scale[:1]))),
        ("weight.offset must be f16", lambda: quantized_matmul(x, replace(offset=weight.offset.astype(np.float32)))),
        (
            "weight.offset must have the shape",
            lambda: quantized_matmul(x, replace(offset=np.repeat(weight.offset, 2, axis=1))),
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert isinstance(weight, CpuWeight)
