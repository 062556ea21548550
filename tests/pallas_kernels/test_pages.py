import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pages import QuantizedPages, dequantize, quantize

FORMATS = [(8, False), (8, True), (4, False), (2, False)]


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize(("bits", "float8"), FORMATS)
def test_every_value_is_within_half_a_step(rng, bits, float8, axis):
    values = rng.standard_normal((2, 3, 16, 64)).astype(np.float32) * rng.uniform(0.1, 9, (2, 3, 16, 1))
    values = (values + rng.standard_normal((2, 3, 1, 64))).astype(np.float32)
    pages = jax.jit(quantize, static_argnums=(1, 2, 3))(values, bits, axis, float8)
    assert pages.shape == values.shape
    assert pages.data.shape == (2, 3, 16, 64 * bits // 8)
    assert pages.scale.shape == ((2, 3, 16) if axis == "token" else (2, 3, 64))
    assert (pages.zero is None) == (bits == 8)
    out = np.asarray(jax.jit(dequantize)(pages))
    assert out.dtype == np.float32
    step = np.asarray(pages.scale)[..., None] if axis == "token" else np.asarray(pages.scale)[..., None, :]
    error = np.abs(out - values)
    bound = np.maximum(np.abs(values) * 2.0**-4, step * 2.0**-10) if float8 else step / 2
    assert (error <= bound * (1 + 1e-4)).all()


def test_bytes_of_a_token_are_planes_of_its_channels():
    """Byte j holds channels j, j + H/4, j + H/2, j + 3H/4 in 2 bits, as the docstring promises to the kernels."""
    values = np.tile(np.arange(16, dtype=np.float32) % 4, (1, 1, 2, 1))
    pages = quantize(jnp.asarray(values), 2)
    codes = np.asarray(pages.data)[0, 0, 1]
    for plane in range(4):
        np.testing.assert_array_equal((codes >> (2 * plane)) & 3, values[0, 0, 1, plane * 4 : plane * 4 + 4])


@pytest.mark.parametrize(("bits", "float8"), FORMATS)
def test_zero_and_constant_pages(bits, float8):
    there_and_back = jax.jit(lambda values: dequantize(quantize(values, bits, float8=float8)))
    zeros = np.asarray(there_and_back(jnp.zeros((1, 1, 4, 8))))
    np.testing.assert_array_equal(zeros, 0)
    for value in (3.0, -250.0):
        constant = np.asarray(there_and_back(jnp.full((1, 1, 4, 8), value)))
        np.testing.assert_allclose(constant, value, rtol=1e-6)


def test_plain_pages_stay_as_they_are_and_trees_keep_the_format(rng):
    plain = jnp.asarray(rng.standard_normal((1, 2, 4, 8)), jnp.bfloat16)
    assert dequantize(plain) is plain
    pages = jax.tree.map(jnp.asarray, quantize(plain, 4, "channel"))
    assert isinstance(pages, QuantizedPages)
    assert (pages.bits, pages.axis, pages.shape) == (4, "channel", (1, 2, 4, 8))


def test_wrong_arguments_are_explained():
    pages = jnp.ones((1, 1, 4, 8))
    with pytest.raises(ValueError, match='axis must be "token" or "channel", got \'head\''):
        quantize(pages, axis="head")
    with pytest.raises(ValueError, match="bits must be 2, 4 or 8, got 3"):
        quantize(pages, bits=3)
