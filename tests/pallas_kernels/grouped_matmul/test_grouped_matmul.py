import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.specs import SPECS
from pallas_kernels.grouped_matmul.work import make_items, max_items
from tests.pallas_kernels.grouped_matmul.grouped_cases import CASES, TOLERANCE, check, make


def mosaic_tpu(*args):
    module = importlib.import_module("pallas_kernels.grouped_matmul.mosaic_tpu")
    return module.grouped_matmul_mosaic_tpu(*args, interpret=True)


BACKENDS = {
    "reference": functools.partial(grouped_matmul, implementation="reference"),
    "xla": functools.partial(grouped_matmul, implementation="xla"),
    "mosaic_tpu": mosaic_tpu,
}


QUICK = {jnp.float32: CASES, jnp.bfloat16: ("ragged",)}  # of a dtype by default
ALL = [
    pytest.param(
        backend,
        case,
        dtype,
        id=f"{backend}-{case}-{dtype.__name__}",
        marks=() if case in QUICK[dtype] else pytest.mark.slow,
    )
    for backend in BACKENDS
    for case in CASES
    for dtype in TOLERANCE
]


@pytest.mark.parametrize(("backend", "case", "dtype"), ALL)
def test_matches_the_exact_result_twice_equal_to_the_bit(backend, case, dtype):
    (x, w, sizes), expected = make(case, dtype)
    if backend == "xla":  # reads every expert
        w = jnp.nan_to_num(w)
    run = jax.jit(BACKENDS[backend])
    out = run(x, w, sizes)
    check(out, expected, dtype)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(run(x, w, sizes), np.float32))


def test_gradients_are_those_of_the_reference():
    (x, w, sizes), _ = make("ragged", jnp.float32)

    def loss(implementation, x, w):
        return jnp.sum(jnp.sin(grouped_matmul(x, w, sizes, implementation=implementation)))

    x, w = jnp.nan_to_num(x), jnp.nan_to_num(w)
    got, wanted = (jax.jit(jax.grad(functools.partial(loss, i), (0, 1)))(x, w) for i in ("xla", "reference"))
    assert float(jnp.abs(wanted[1]).max()) > 0.1
    for g, v in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, v, rtol=1e-4, atol=1e-5)


def test_items_cover_every_row_once_and_only_with_its_group():
    rng = np.random.default_rng(0)
    run = jax.jit(make_items, static_argnums=(1, 2))
    for number in range(30):
        groups, rows, block = [(1, 9, 4), (7, 40, 8), (5, 16, 1)][number % 3]
        sizes = rng.integers(0, 12, groups) * rng.integers(0, 2, groups)
        sizes = np.diff(np.minimum(np.cumsum(sizes), rows), prepend=0)
        items, count = (np.asarray(v) for v in run(jnp.asarray(sizes, jnp.int32), rows, block))
        assert len(items) == max_items(rows, groups, block) >= count[0]
        group = np.repeat(np.arange(groups + 1), [*sizes, rows - sizes.sum()])
        seen = np.zeros(rows, int)
        for number, (at, g, start, end) in enumerate(items):
            assert (number < count[0]) == (start < end)
            assert at * block <= start
            assert end <= (at + 1) * block
            assert (group[start:end] == g).all()
            seen[start:end] += 1
        assert (seen == 1).all()
        assert (np.diff(items[:, 0]) >= 0).all()


def test_errors():
    x, w, sizes = jnp.ones((3, 8)), jnp.ones((2, 6, 8)), jnp.array([1, 2], jnp.int32)
    with pytest.raises(ValueError, match=r"must have shapes .* got \(3, 7\), \(2, 6, 8\) and \(2,\)"):
        grouped_matmul(x[:, 1:], w, sizes)
    with pytest.raises(ValueError, match=r"must have shapes .* and \(1,\)"):
        grouped_matmul(x, w, sizes[1:])
    with pytest.raises(ValueError, match="x and weights must have one type, got float32 and bfloat16"):
        grouped_matmul(x, w.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="no dimension may be 0"):
        grouped_matmul(x[:0], w, sizes)


@pytest.mark.parametrize(("name", "machine"), [("mosaic_gpu", "a Hopper GPU"), ("mosaic_tpu", "a TPU")])
def test_kernels_decline_other_machines(name, machine):
    args, _ = make("one_row", jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"{name} needs {machine}"):
        grouped_matmul(*args, implementation=name)


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_specs_fit_the_function(spec):
    x, w, sizes = jax.eval_shape(spec.arguments)
    out = jax.eval_shape(functools.partial(spec.function, implementation="xla"), x, w, sizes)
    assert out.shape == (x.shape[0], w.shape[1])
