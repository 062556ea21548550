import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul.weights import QuantizedWeight, dequantize_weight, quantize_weight
from tests.pallas_kernels.quantized_matmul.cases import FORMATS, dequantized, make_weight, quantize

dequantize = jax.jit(dequantize_weight)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantization_is_that_of_the_docstring(name):
    weight = make_weight(name, 5, 512)
    assert weight.shape == (5, 512)
    np.testing.assert_allclose(np.asarray(dequantize(weight)), dequantized(weight), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_is_within_half_a_step(rng, name):
    bits, group, float8, zero_point = FORMATS[name]
    matrix = rng.standard_normal((6, 256)).astype(np.float32) + rng.standard_normal((6, 1)).astype(np.float32)
    weight = quantize(jnp.asarray(matrix), bits, group or None, float8, zero_point)
    error = np.abs(dequantized(weight) - matrix)
    step = np.repeat(np.asarray(weight.scale, np.float64), weight.group, axis=1)
    if float8:
        assert (error <= np.maximum(np.abs(matrix) * 2.0**-4, step * 2.0**-10) * (1 + 1e-5)).all()
    elif zero_point:  # the zero point is rounded too, so that an extreme value may be cut by up to half a step more
        assert (error <= step * (1 + 1e-5)).all()
        assert np.mean(error <= step / 2 * (1 + 1e-5)) > 0.9
    else:
        assert (error <= step / 2 * (1 + 1e-5)).all()
    assert weight.scale.shape == (6, 256 // weight.group)


def test_values_on_the_grid_come_back_as_they_were():
    """Blocks as GGUF has them, Q4_0 (code 8 is zero) and Q4_1 (minimum and step): exact when the steps are."""
    codes = np.tile(np.arange(16, dtype=np.float32), (4, 12))  # [4, 192]
    symmetric = (codes - 8).clip(-7) * 0.25
    weight = quantize(jnp.asarray(symmetric), 4, 32, zero_point=False)
    np.testing.assert_array_equal(np.asarray(dequantize(weight)), symmetric)
    shifted = (codes - 3) * 0.5
    weight = quantize(jnp.asarray(shifted), 4, 32)
    np.testing.assert_array_equal(np.asarray(dequantize(weight)), shifted)
    np.testing.assert_array_equal(np.asarray(weight.zero), 3)
    whole = np.tile(np.arange(-127, 128, dtype=np.float32), (2, 1))
    np.testing.assert_array_equal(np.asarray(dequantize(quantize(jnp.asarray(whole)))), whole)


@pytest.mark.parametrize("name", ["int8", "float8", "int4_g32", "int4_g32_zero"])
def test_zeros_and_constants(name):
    bits, group, float8, zero_point = FORMATS[name]
    matrix = jnp.zeros((2, 64)).at[1].set(0.0)
    np.testing.assert_array_equal(np.asarray(dequantize(quantize(matrix, bits, group or None, float8, zero_point))), 0)


def test_quantize_is_the_same_under_jit_and_survives_tree_functions(rng):
    matrix = jnp.asarray(rng.standard_normal((8, 128)), jnp.float32)
    eager = quantize_weight(matrix, 4, 32)
    traced = quantize(matrix, bits=4, group=32)
    assert (traced.bits, traced.group) == (4, 32)
    np.testing.assert_array_equal(np.asarray(traced.data), np.asarray(eager.data))
    copied = jax.tree.map(jnp.asarray, eager)
    assert isinstance(copied, QuantizedWeight)
    assert copied.shape == (8, 128)


@pytest.mark.parametrize(("bits", "group", "message"), [
    (2, None, "bits must be 8 or 4, got 2"), (8, 48, "K=128 must be a multiple of group=48"),
    (4, 24, "K=128 must be a multiple of group=24 and of 64"),
])  # fmt: skip
def test_wrong_arguments_are_explained(bits, group, message):
    with pytest.raises(ValueError, match=message):
        quantize_weight(jnp.ones((2, 128)), bits, group)
