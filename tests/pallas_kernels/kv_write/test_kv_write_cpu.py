"""The KV write in C++ on CPUs: the poisoned cases, every instruction set, in place in loops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import write_kv
from pallas_kernels.kv_write.cpu import write_kv_cpu
from pallas_kernels.kv_write.reference import write_kv_reference
from pallas_kernels.pages import dequantize, quantize
from tests.pallas_kernels import isas
from tests.pallas_kernels.kv_write.cases import CASES, FLOAT16, Case, check, make

ALL = (
    *CASES,
    Case("int8", "fp8", T=40, H=80, half=16, P=12, dtype="f32"),
    Case("fp8", "int8", T=5, H=4, dtype="f32"),
    Case("int2", "int4", T=300, H=64, P=90, padding=7),
    Case("f32", "bf16", T=40, H=8, half=3, P=12),
    Case("bf16", "f32", T=40, H=96, half=48, P=12, dtype="f32"),
    Case("f32", "f32", T=300, K=3, H=128, half=64, P=90, dtype="bf16", padding=7),  # enough for several threads
    Case("bf16", "bf16", T=300, K=3, H=128, half=16, P=90),
)


@functools.partial(jax.jit, static_argnames="library")
def write(*arguments, rope, library=None):
    return write_kv_cpu(*arguments, rope=rope, library=library)


@pytest.mark.parametrize("isa", isas.NAMES)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_matches_the_reference(case, isa):
    library = isas.library_for(isa)
    arguments = make(case)
    first, second = (write(*arguments[:5], rope=arguments[5], library=library) for _ in range(2))
    check(case, arguments, first, zero_points_are_exact=False)
    for a, b in zip(*map(jax.tree.leaves, (first, second))):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_slots_out_of_range_are_dropped():
    k_pages, v_pages, k, v, slots, _ = make(Case("f32", "f32", T=6, padding=0, dtype="f32"))
    bad = slots.at[1].set(16).at[2].set(-1).at[3].set(2**31 - 1)
    out, _ = write(k_pages, v_pages, k, v, bad, rope=None)
    wanted = np.full((2, 16, 64), np.nan, np.float32)
    for t in (0, 4, 5):
        wanted[:, slots[t]] = k[t]
    np.testing.assert_array_equal(np.asarray(out).reshape(2, 16, 64), wanted)


def test_the_last_of_equal_slots_stays():
    k_pages, v_pages, k, v, slots, _ = make(Case("f32", "f32", T=300, K=2, H=128, P=90, padding=0, dtype="f32"))
    out, _ = write(k_pages, v_pages, k, v, jnp.zeros_like(slots), rope=None)
    np.testing.assert_array_equal(out[:, 0, 0], k[-1])


@pytest.mark.parametrize("T", [1, 8])
def test_is_in_place_in_a_loop(T):
    """No copy of a cache is compiled into a loop over tokens with several layers, and the buffers stay."""
    caches = [jnp.zeros((2, 64, 4, 64)) for _ in range(6)]
    k = jnp.ones((T, 2, 64))

    def step(i, caches):
        slots = 4 + i + jnp.arange(T, dtype=jnp.int32)
        return [x for a, b in zip(caches[::2], caches[1::2]) for x in write_kv(a, b, k, k, slots)]

    run = jax.jit(lambda caches: jax.lax.fori_loop(0, 5, step, caches), donate_argnums=0).lower(caches).compile()
    assert not re.search(r"f32\[2,64,4,64\]\S* copy\(", run.as_text())
    addresses = [x.unsafe_buffer_pointer() for x in caches]
    caches = run(caches)
    assert [x.unsafe_buffer_pointer() for x in caches] == addresses
    assert all(float(x.sum()) == 2 * 64 * (5 + T - 1) for x in caches)


def test_what_is_not_donated_is_kept():
    k_pages, v_pages, k, v, slots, _ = make(Case("f32", "f32", T=6, dtype="f32"))
    k_pages = jnp.zeros_like(k_pages)
    out, _ = write(k_pages, v_pages, k, v, slots, rope=None)
    assert not np.asarray(k_pages).any()
    assert np.asarray(out[:, 1:]).any()


@pytest.mark.parametrize("kind", ["int8", "float8", "int4", "int2"])
def test_quantizes_any_number_as_the_reference_does(kind):
    """Of every size, zero and NaN among them: bit for bit, but for what depends on how a zero point is added."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 1, 32)) * rng.choice([0.0, 1e-30, 1e-6, 1.0, 1e3, 1e30], (64, 1, 32))
    x[:8] = rng.standard_normal((8, 1, 1))  # constant rows
    x = x.astype(np.float32)
    pages = quantize(jnp.zeros((1, 16, 4, 32)), {"int4": 4, "int2": 2}.get(kind, 8), float8=kind == "float8")
    slots = jnp.arange(64)
    for got, want in zip(
        write(pages, pages, x, x, slots, rope=None), jax.jit(write_kv_reference)(pages, pages, x, x, slots)
    ):
        if got.zero is not None:
            np.testing.assert_array_equal(got.scale, want.scale)
            error = np.abs(dequantize(got) - dequantize(want))
            assert (error <= 1.01 * np.asarray(want.scale)[..., None] + 1e-6 * np.abs(dequantize(want))).all()
            continue
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    bad = np.where(np.arange(32) == 9, np.float32(np.nan), x)
    scale = write(pages, pages, bad, x, slots, rope=None)[0].scale
    assert np.isnan(scale).all()


def test_quantized_pages_are_written_in_place():
    pages = jax.jit(lambda: [quantize(jnp.zeros((2, 8, 4, 64)), bits) for bits in (8, 4)])()
    k = jnp.ones((3, 2, 64))
    run = jax.jit(lambda k_pages, v_pages: write_kv(k_pages, v_pages, k, k, jnp.arange(3)), donate_argnums=(0, 1))
    compiled = run.lower(*pages).compile()
    assert " copy(" not in compiled.as_text()
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pages)]
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(compiled(*pages))] == addresses


def test_declines():
    arguments = make(FLOAT16)
    with pytest.raises(NotImplementedError, match="writes float32 and bfloat16, the key pages are float16"):
        write_kv(*arguments[:5], rope=arguments[5], implementation="cpu")
