import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora_matmul.api import lora_matmul
from pallas_kernels.lora_matmul.specs import SPECS
from tests.pallas_kernels.lora_matmul.lora_cases import CASES, TOLERANCE, check, make


def mosaic_tpu(*args, **kwargs):
    module = importlib.import_module("pallas_kernels.lora_matmul.mosaic_tpu")
    return module.lora_matmul_mosaic_tpu(*args, **kwargs, interpret=True)


BACKENDS = {
    "reference": functools.partial(lora_matmul, implementation="reference"),
    "xla": functools.partial(lora_matmul, implementation="xla"),
    "mosaic_tpu": mosaic_tpu,
}


# By default every case in f32 and two in bf16; in the interpreter, which compiles each, a few.
QUICK = {
    jnp.float32: {"mosaic_tpu": ("mixed", "nobody", "no_scales")},
    jnp.bfloat16: dict.fromkeys(BACKENDS, ("mixed", "neither")),
}
ALL = [
    pytest.param(
        backend,
        case,
        dtype,
        id=f"{backend}-{case}-{dtype.__name__}",
        marks=pytest.mark.slow if backend in QUICK[dtype] and case.name not in QUICK[dtype][backend] else (),
    )
    for backend in BACKENDS
    for case in CASES
    for dtype in TOLERANCE
    if backend != "mosaic_tpu" or dtype == jnp.float32 or case.name in QUICK[dtype][backend]
]


@pytest.mark.parametrize(("backend", "case", "dtype"), ALL)
def test_matches_the_exact_result_twice_equal_to_the_bit(backend, case, dtype):
    args, kwargs, expected = make(case, dtype)
    run = jax.jit(BACKENDS[backend])
    out = run(*args, **kwargs)
    check(out, case, expected, kwargs, dtype)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(run(*args, **kwargs), np.float32))


def test_gradients_are_those_of_the_reference():
    case = next(case for case in CASES if case.name == "mixed")
    (x, a, b, indices), kwargs, _ = make(case, jnp.float32)
    x, a, b, scales = (jnp.nan_to_num(value) for value in (x, a, b, kwargs["scales"]))

    def loss(implementation, x, a, b, scales, base):
        out = lora_matmul(x, a, b, indices, scales=scales, base=base, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    gradients = [
        jax.jit(jax.grad(functools.partial(loss, name), argnums=range(5)))(x, a, b, scales, kwargs["base"])
        for name in ("xla", "reference")
    ]
    assert float(jnp.abs(gradients[1][1]).max()) > 0.1
    for got, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_xla_form_does_not_grow_with_the_adapters():
    def temporary(adapters):
        shapes = [(16, 64), (adapters, 8, 64), (adapters, 64, 8)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        run = jax.jit(functools.partial(lora_matmul, implementation="xla"))
        compiled = run.lower(*arrays, jax.ShapeDtypeStruct((16,), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(512) <= temporary(64) + 64 * 512


def test_errors():
    x, a, b, i = jnp.ones((3, 8)), jnp.ones((2, 4, 8)), jnp.ones((2, 6, 4)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"x, a and b must have shapes .* got \(3,\)"):
        lora_matmul(x[:, 0], a, b, i)
    with pytest.raises(ValueError, match=r"b must have shape \(2, 6, 4\) .* got \(2, 6, 3\)"):
        lora_matmul(x, a, b[..., :3], i)
    with pytest.raises(ValueError, match=r"adapter_indices must have shape \(3,\) .* got \(2,\)"):
        lora_matmul(x, a, b, i[:2])
    with pytest.raises(ValueError, match=r"scales must have shape \(2,\) .* got \(3,\)"):
        lora_matmul(x, a, b, i, scales=jnp.ones(3))
    with pytest.raises(ValueError, match=r"base must have the type of x, float32, got bfloat16"):
        lora_matmul(x, a, b, i, base=jnp.ones((3, 6), jnp.bfloat16))
    with pytest.raises(ValueError, match="no dimension may be 0"):
        lora_matmul(x[:0], a, b, i[:0])
    with pytest.raises(ValueError, match="unknown implementation='best'"):
        lora_matmul(x, a, b, i, implementation="best")


@pytest.mark.parametrize(("name", "machine"), [("mosaic_gpu", "a Hopper GPU"), ("mosaic_tpu", "a TPU")])
def test_kernels_decline_other_machines(name, machine):
    args, kwargs, _ = make(CASES[0], jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"{name} needs {machine}"):
        lora_matmul(*args, **kwargs, implementation=name)


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_specs_fit_the_function(spec):
    arguments = jax.eval_shape(spec.arguments)
    out = jax.eval_shape(functools.partial(spec.function, implementation="xla"), *arguments)
    assert out.shape == arguments[5].shape
