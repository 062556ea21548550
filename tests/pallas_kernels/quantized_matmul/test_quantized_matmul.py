import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.activations import quantize_per_token
from pallas_kernels.quantized_matmul.api import IMPLEMENTATIONS, quantized_matmul
from pallas_kernels.quantized_matmul.specs import SPECS, bf16_matmul
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, quantize_weight
from pallas_kernels.target import Target
from tests.pallas_kernels.quantized_matmul.cases import (
    Case,
    cases,
    check,
    dequantized,
    make_weight,
)
from tests.pallas_kernels.targets import lower

# One shape a format, every form of the XLA backend: digits, loop, converted weight, one row.
QUICK = [
    Case("int8", 1, 192, 33),
    Case("int8", 65, 64, 24),
    Case("int8", 9, 128, 40, "float32", "int8"),
    Case("int8_g32", 1, 192, 40),
    Case("int8_g128", 8, 512, 24, "bfloat16"),
    Case("float8", 1, 192, 33, "bfloat16"),
    Case("float8", 7, 64, 24, "float32", "float8"),
    Case("float8_g64", 2, 192, 33),
    Case("int4", 2, 192, 33, "bfloat16"),
    Case("int4_g32", 1, 192, 40),
    Case("int4_g32_zero", 9, 192, 33),
    Case("int4_g64_zero", 3, 128, 40, "float16"),
    Case("int4_g128", 2, 512, 24),
    Case("int4_g128_zero", 1, 512, 129, "float32", "int8"),
    Case("int4_zero", 1, 64, 8),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_xla(case):
    check(IMPLEMENTATIONS["xla"], case)


@pytest.mark.parametrize("case", QUICK[::3], ids=str)
def test_reference(case):
    check(IMPLEMENTATIONS["reference"], case, jit=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases()[::9], ids=str)  # a stride that meets every format with many sizes
def test_more_cases(case):
    check(IMPLEMENTATIONS["xla"], case)


@pytest.mark.parametrize("case", [QUICK[i] for i in (0, 2, 6, 10, 14)], ids=str)
def test_the_form_for_gpu_and_tpu_computes_the_same(monkeypatch, case):
    monkeypatch.setattr(xla, "current_target", lambda: Target("gpu", "pretended"))
    check(xla.quantized_matmul_xla, case)


@pytest.mark.parametrize("name", ["int8", "int4_g32_zero", "float8"])
def test_a_bad_row_touches_no_other(rng, name):
    x = rng.standard_normal((3, 192)).astype(np.float32)
    bad = x.copy()
    bad[1, 5] = np.nan
    weight = make_weight(name, 24, 192)
    for activations in (None, "float8" if name == "float8" else "int8"):
        run = jax.jit(lambda x, how=activations: quantized_matmul(x, weight, activations=how))
        out, clean = np.asarray(run(bad)), np.asarray(run(x))
        assert np.isnan(out[1]).all()
        np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


def test_digits_of_a_row_with_an_outlier_stay_as_exact_as_f32(rng):
    x = rng.standard_normal((1, 512)).astype(np.float32)
    x[0, 7] = 1e4
    weight = make_weight("int8", 24, 512)
    out = np.asarray(IMPLEMENTATIONS["xla"](jnp.asarray(x), weight, x_scale=None, out_dtype=jnp.float32))
    exact = x.astype(np.float64) @ dequantized(weight).T
    np.testing.assert_allclose(out, exact, atol=1e4 * 2.0**-22 * np.abs(dequantized(weight)).max() * 23, rtol=1e-6)


def test_batch_axes_types_and_no_rows(rng):
    weight = make_weight("int8", 24, 64)
    x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.bfloat16)
    out = quantized_matmul(x, weight)
    assert (out.shape, out.dtype) == ((2, 3, 24), jnp.bfloat16)
    vector = quantized_matmul(x[0, 0], weight, out_dtype=jnp.float32)
    assert (vector.shape, vector.dtype) == ((24,), jnp.float32)
    np.testing.assert_allclose(np.asarray(vector), np.asarray(out[0, 0], np.float32), rtol=1e-2, atol=1e-2)
    assert quantized_matmul(x[:0], weight).shape == (0, 3, 24)


@pytest.mark.parametrize(("kind", "limit"), [("int8", 127.0), ("float8", 448.0)])
def test_activations_are_rounded_to_nearest(rng, kind, limit):
    x = jnp.asarray(rng.standard_normal((4, 96)) * np.array([[1], [1e-20], [0], [1e4]]), jnp.float32)
    codes, scale = quantize_per_token(x, kind)
    values, scale = np.asarray(codes).astype(np.float64), np.asarray(scale, np.float64)[:, None]
    assert (np.abs(values).max(axis=1) == [limit, limit, 0, limit]).all()
    step = 0.5 * scale if kind == "int8" else np.maximum(np.abs(np.asarray(x)) * 2.0**-4, scale * 2.0**-10)
    assert (np.abs(values * scale - np.asarray(x)) <= step * (1 + 1e-5)).all()
    assert not np.asarray(quantized_matmul(x, make_weight("float8" if kind == "float8" else "int8", 8, 96)))[2].any()


@pytest.mark.parametrize(("name", "activations"), [("int8", None), ("int4_g32_zero", None), ("float8", "float8")])
def test_gradient_of_x_is_that_of_the_dequantized_product(rng, name, activations):
    weight = make_weight(name, 24, 192)
    x = jnp.asarray(rng.standard_normal((3, 192)), jnp.float32)
    cotangent = rng.standard_normal((3, 24)).astype(np.float32)

    def loss(x):
        return jnp.sum(quantized_matmul(x, weight, activations=activations) * cotangent)

    gradient = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(np.asarray(gradient), cotangent @ dequantized(weight), rtol=1e-5, atol=1e-4)


def test_an_adapter_trains_beside_a_frozen_weight(rng):
    weight = make_weight("int8", 24, 64)
    down = jnp.asarray(rng.standard_normal((4, 64)), jnp.float32)

    def loss(down, x, weight):
        h = x + x @ down.T @ down
        return jnp.sum(quantized_matmul(h, weight) ** 2)

    def dense(down, x, matrix):
        return jnp.sum(((x + x @ down.T @ down) @ matrix.T) ** 2)

    x = jnp.asarray(rng.standard_normal((2, 64)), jnp.float32)
    got = jax.jit(jax.grad(loss))(down, x, weight)
    wanted = jax.grad(dense)(down, x, jnp.asarray(dequantized(weight), jnp.float32))
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-3)


def test_a_gradient_of_the_weight_is_refused(rng):
    weight = make_weight("int8", 24, 64)
    x = jnp.ones((2, 64))

    def loss(scale):
        return jnp.sum(quantized_matmul(x, QuantizedWeight(weight.data, scale, None, 8, 64)))

    with pytest.raises(ValueError, match="no gradient with respect to a quantized weight"):
        jax.grad(loss)(weight.scale)


def test_wrong_arguments_are_explained():
    int8, float8, int4 = (make_weight(name, 24, 64) for name in ("int8", "float8", "int4_g32"))
    x = jnp.ones((2, 64))
    for message, call in [
        (r"x must have shape \[..., K=64\].*\(24, 64\), got \(2, 32\)", lambda: quantized_matmul(x[:, :32], int8)),
        ("x must be bf16, f16 or f32, got int8", lambda: quantized_matmul(x.astype(jnp.int8), int8)),
        ("activations must be one of .* got 'int4'", lambda: quantized_matmul(x, int8, activations="int4")),
        (
            'does not go with int8 weights in QuantizedWeight; use "int8"',
            lambda: quantized_matmul(x, int8, activations="float8"),
        ),
        ('use "float8" or None', lambda: quantized_matmul(x, float8, activations="int8")),
        ("out_dtype must be bf16, f16, f32 or None, got int32", lambda: quantized_matmul(x, int8, out_dtype=jnp.int32)),
        ("unknown implementation='cuda'", lambda: quantized_matmul(x, int8, implementation="cuda")),
        (
            "bits must be 8 or 4, got 2",
            lambda: quantized_matmul(x, QuantizedWeight(int4.data, int4.scale, None, 2, 32)),
        ),
        (r"must be uint8\[N, K \* 4", lambda: quantized_matmul(x, QuantizedWeight(int8.data, int8.scale, None, 4, 64))),
        ("must be a multiple of weight.group", lambda: quantized_matmul(x, QuantizedWeight(int8.data, int8.scale))),
        (
            r"weight.scale must be f32\[N=24, K / group=2\], got float32\(24, 1\)",
            lambda: quantized_matmul(x, QuantizedWeight(int8.data, int8.scale, None, 8, 32)),
        ),
        (
            r"weight.zero must be f32\[N=24, K / group=1\]",
            lambda: quantized_matmul(x, QuantizedWeight(int8.data, int8.scale, int4.scale, 8, 64)),
        ),
        ("activations must be one of", lambda: quantize_per_token(x, "int4")),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="XLA's own bf16 product"):
        bf16_matmul(x, x, implementation="reference")


def test_the_kernels_refuse_this_machine():
    with pytest.raises(NotImplementedError, match="needs a TPU, this is cpu"):
        quantized_matmul(jnp.ones((2, 64)), make_weight("int8", 24, 64), implementation="mosaic_tpu")


def test_no_weight_is_expanded_to_floats_on_a_cpu():
    """A decode step of each integer format reads the codes as they are: no float array of the weight's size."""
    for name in ("int8", "int8_g128", "int4_g32_zero", "int4"):
        weight = jax.eval_shape(lambda name=name: make_weight(name, 512, 1024))
        compiled = jax.jit(quantized_matmul).lower(jax.ShapeDtypeStruct((1, 1024), jnp.float32), weight).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 512 * 1024, name


@pytest.mark.parametrize("target", ["h200", "a100", "v5e"])
@pytest.mark.parametrize("name", ["int8", "int4_g32_zero", "float8"])
def test_xla_lowers_for_other_machines(name, target):
    weight = jax.eval_shape(lambda: make_weight(name, 64, 128))
    text = lower(
        lambda x, w: quantized_matmul(x, w, implementation="xla"),
        jax.ShapeDtypeStruct((16, 128), jnp.bfloat16), weight, target=target,
    )  # fmt: skip
    assert "dot_general" in text


def test_specs_state_shapes_and_run(rng):
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    for spec in SPECS[::7]:
        x, weight, *_ = arguments = jax.eval_shape(spec.arguments)
        out = jax.eval_shape(spec.function, *arguments)
        assert out.shape == (x.shape[0], weight.shape[0])
        assert spec.flops == 2 * x.shape[0] * weight.shape[0] * weight.shape[1]
        arrays = [*jax.tree.leaves(arguments), out]
        assert spec.num_bytes == sum(each.size * each.dtype.itemsize for each in arrays)


def test_quantize_under_jit_and_use(rng):
    matrix = jnp.asarray(rng.standard_normal((24, 64)), jnp.float32)
    out = jax.jit(lambda x, m: quantized_matmul(x, quantize_weight(m)))(jnp.eye(64), matrix)
    assert np.abs(np.asarray(out).T - np.asarray(matrix)).max() <= np.abs(np.asarray(matrix)).max() / 127 / 2 * 1.001
