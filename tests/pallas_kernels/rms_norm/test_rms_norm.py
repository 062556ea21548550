"""RMS normalization against float64: every implementation and instruction set, ranks, threads, derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.rms_norm.cpu import rms_norm_cpu
from tests.pallas_kernels import isas

EPS = 1e-5
SHAPES = [(1, 576), (3, 37), (5, 2, 64), (700, 96), (2, 4096)]  # one row, a rest, heads, several threads, wide


def arguments(rng, shape, dtype=np.float32):
    x, y = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    return x, y, jnp.asarray(rng.standard_normal(shape[-1]), dtype)


def wanted(x, y, scale):
    total = np.asarray(x, np.float64) + np.asarray(y, np.float64)
    return total, total / np.sqrt((total**2).mean(-1, keepdims=True) + EPS) * np.asarray(scale, np.float64)


@pytest.mark.parametrize("isa", isas.NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_matches_float64(rng, shape, isa):
    library = isas.library_for(isa)
    x, y, scale = arguments(rng, shape)
    run = jax.jit(functools.partial(rms_norm_cpu, eps=EPS, library=library))
    first, again = run(x, y, scale), run(x, y, scale)
    for got, repeated, value in zip(first, again, wanted(x, y, scale)):
        np.testing.assert_allclose(got, value, rtol=2e-6, atol=1e-6)
        np.testing.assert_array_equal(got, repeated)
    total, norm = run(x, None, scale)
    np.testing.assert_array_equal(total, x)
    np.testing.assert_allclose(norm, wanted(x, np.zeros(shape), scale)[1], rtol=2e-6, atol=1e-6)


def test_a_row_does_not_depend_on_the_others(rng):
    x, y, scale = arguments(rng, (700, 96))
    _, many = add_rms_norm(x, y, scale, EPS, implementation="cpu")
    _, one = add_rms_norm(x[5:6], y[5:6], scale, EPS, implementation="cpu")
    np.testing.assert_array_equal(many[5:6], one)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_dtype(rng, dtype):
    x, y, scale = arguments(rng, (4, 64), dtype)
    total, norm = add_rms_norm(x, y, scale, EPS)
    assert total.dtype == norm.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 3 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(norm.astype(np.float32), wanted(total, 0 * total, scale)[1], rtol=tolerance, atol=1e-6)
    np.testing.assert_array_equal(norm, rms_norm(total, scale, EPS))


def test_derivatives_and_vmap_are_those_of_xla(rng):
    x, y, scale = arguments(rng, (3, 32))

    def loss(implementation, *args):
        total, norm = add_rms_norm(*args, EPS, implementation=implementation)
        return (norm**3).sum() + (total * norm).sum() + rms_norm(args[0], args[2], EPS).sum()

    got, want = (jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(x, y, scale) for name in ("cpu", "xla"))
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    each = jax.vmap(lambda x, y: add_rms_norm(x, y, scale, EPS, implementation="cpu"))(x[:, None], y[:, None])
    whole = add_rms_norm(x, y, scale, EPS, implementation="cpu")
    for a, b in zip(each, whole):
        np.testing.assert_array_equal(a[:, 0], b)


def test_refusals(rng):
    x, y, scale = arguments(rng, (3, 32))
    with pytest.raises(NotImplementedError, match="cpu norms float32, got bfloat16"):
        rms_norm(x.astype(jnp.bfloat16), scale, EPS, implementation="cpu")
    with pytest.raises(ValueError, match=r"scale must have the shape of x's last axis, x is \[3, 32\], got \[31\]"):
        rms_norm(x, scale[1:], EPS)
    with pytest.raises(ValueError, match=r"y must be like x, float32\[3, 32\], got float32\[2, 32\]"):
        add_rms_norm(x, y[1:], scale, EPS)
