import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import write_kv

K, P, PAGE_SIZE, H = 2, 5, 4, 3


@pytest.fixture
def new(rng):
    return jnp.asarray(rng.standard_normal((6, K, H)), jnp.float32)


def test_writes_every_slot_and_nothing_else(new):
    pages = jnp.full((K, P, PAGE_SIZE, H), jnp.nan)
    slots = [4 * 4 + 3, 1 * 4 + 0, 2 * 4 + 1, 0, 0, 1]  # three tokens of padding share the null page
    out = np.asarray(write_kv(pages, new, jnp.array(slots)))
    np.testing.assert_array_equal(out[:, 4, 3], new[0])
    np.testing.assert_array_equal(out[:, 1, 0], new[1])
    np.testing.assert_array_equal(out[:, 2, 1], new[2])
    written = ~np.isnan(out[:, 1:]).any((0, 3))
    assert written.sum() == 3


def test_casts_to_the_dtype_of_the_pages(new):
    out = write_kv(jnp.zeros((K, P, PAGE_SIZE, H), jnp.bfloat16), new, jnp.arange(6))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.reshape(K, -1, H)[:, :6], new.astype(jnp.bfloat16).swapaxes(0, 1))


def test_is_in_place_when_donated(new):
    pages = jnp.zeros((K, P, PAGE_SIZE, H))
    address = pages.unsafe_buffer_pointer()
    out = jax.jit(write_kv, donate_argnums=0)(pages, new, jnp.arange(6))
    assert out.unsafe_buffer_pointer() == address


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new": jnp.zeros((6, 3, H))}, r"new must have shape \[T, K=2, H=3\], got \(6, 3, 3\)"),
        ({"new": jnp.zeros((6, K * H))}, r"new must have shape \[T, K=2, H=3\]"),
        ({"slot_mapping": jnp.arange(5)}, r"slot_mapping must have shape \[T=6\], got \(5,\)"),
        ({"implementation": "fastest"}, "write_kv: unknown implementation='fastest'; choose from"),
    ],
)
def test_refuses(new, change, message):
    arguments = {"pages": jnp.zeros((K, P, PAGE_SIZE, H)), "new": new, "slot_mapping": jnp.arange(6)}
    with pytest.raises(ValueError, match=message):
        write_kv(**(arguments | change))
