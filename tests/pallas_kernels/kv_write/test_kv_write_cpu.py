"""The KV write in C++ on CPUs: the poisoned cases, every instruction set, in place in loops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import write_kv
from pallas_kernels.kv_write.cpu import write_kv_cpu
from tests.pallas_kernels import isas
from tests.pallas_kernels.kv_write.cases import CASES, FLOAT16, Case, check, make

PLAIN = (
    *(case for case in CASES if {case.k, case.v} <= {"f32", "bf16"}),
    Case("f32", "bf16", T=40, H=8, half=3, P=12),
    Case("bf16", "f32", T=40, H=96, half=48, P=12, dtype="f32"),
    Case("f32", "f32", T=300, K=3, H=128, half=64, P=90, dtype="bf16", padding=7),  # enough for several threads
    Case("bf16", "bf16", T=300, K=3, H=128, half=16, P=90),
)


@functools.partial(jax.jit, static_argnames="library")
def write(*arguments, rope, library=None):
    return write_kv_cpu(*arguments, rope=rope, library=library)


@pytest.mark.parametrize("isa", isas.NAMES)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_matches_the_reference(case, isa):
    library = isas.library_for(isa)
    arguments = make(case)
    first, second = (write(*arguments[:5], rope=arguments[5], library=library) for _ in range(2))
    check(case, arguments, first)
    for a, b in zip(first, second):
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


@pytest.mark.parametrize(
    ("case", "message"),
    [(FLOAT16, "writes float32 and bfloat16, the key pages are float16"), (CASES[1], "key pages have 8 bits")],
    ids=str,
)
def test_declines(case, message):
    arguments = make(case)
    with pytest.raises(NotImplementedError, match=message):
        write_kv(*arguments[:5], rope=arguments[5], implementation="cpu")
