import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.api import write_full_pages, write_kv
from pallas_kernels.kv_write.specs import SPECS
from pallas_kernels.pages import dequantize, quantize
from tests.pallas_kernels.targets import targeting

K, P, PAGE_SIZE, H = 2, 5, 4, 8
SLOTS = [4 * 4 + 3, 1 * 4 + 0, 2 * 4 + 1, 0, 0, 1]  # three tokens of padding share the null page
KINDS = {"int8": (8, False), "fp8": (8, True), "int4": (4, False), "int2": (2, False)}


@pytest.fixture
def k(rng):
    return jnp.asarray(rng.standard_normal((6, K, H)), jnp.float32)


@pytest.fixture
def v(rng):
    return jnp.asarray(rng.standard_normal((6, K, H)) + 10, jnp.float32)


def _pages(dtype=jnp.float32):
    return jnp.full((K, P, PAGE_SIZE, H), jnp.nan, dtype)


def test_writes_every_slot_and_nothing_else(k, v):
    outs = write_kv(_pages(), _pages(), k, v, jnp.array(SLOTS))
    for out, new in zip(outs, (k, v)):
        out = np.asarray(out)
        np.testing.assert_array_equal(out[:, 4, 3], new[0])
        np.testing.assert_array_equal(out[:, 1, 0], new[1])
        np.testing.assert_array_equal(out[:, 2, 1], new[2])
        assert (~np.isnan(out[:, 1:]).any((0, 3))).sum() == 3


def test_casts_to_the_dtype_of_the_pages(k, v):
    k_pages, v_pages = write_kv(_pages(jnp.bfloat16), _pages(jnp.float16), k, v, jnp.arange(6))
    np.testing.assert_array_equal(k_pages.reshape(K, -1, H)[:, :6], k.astype(jnp.bfloat16).swapaxes(0, 1))
    np.testing.assert_array_equal(v_pages.reshape(K, -1, H)[:, :6], v.astype(jnp.float16).swapaxes(0, 1))


@pytest.mark.parametrize("half", [4, 2])
def test_rotates_pairs_of_the_rotary_channels(k, v, half, rng):
    angles = rng.uniform(0, 6, (6, 1, half)).astype(np.float32)
    out, _ = write_kv(_pages(), _pages(), k, v, jnp.arange(6), rope=(jnp.cos(angles), jnp.sin(angles)))
    wanted = np.asarray(k).copy()
    for i in range(half):
        a, c, s = angles[:, :, i], np.asarray(k)[..., i], np.asarray(k)[..., half + i]
        wanted[..., i], wanted[..., half + i] = c * np.cos(a) - s * np.sin(a), s * np.cos(a) + c * np.sin(a)
    np.testing.assert_allclose(np.asarray(out).reshape(K, -1, H)[:, :6], wanted.swapaxes(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k_kind", KINDS)
def test_quantizes_each_token_by_its_own_scale(k, v, k_kind):
    bits, float8 = KINDS[k_kind]
    empty = jax.jit(lambda: quantize(jnp.zeros((K, P, PAGE_SIZE, H)), bits, float8=float8))()
    out, plain = jax.jit(write_kv)(empty, _pages(), k, v, jnp.array(SLOTS))
    assert jax.tree.structure(out) == jax.tree.structure(empty)
    values, scale = np.asarray(jax.jit(dequantize)(out)), np.asarray(out.scale)
    for token, (page, offset) in enumerate([(4, 3), (1, 0), (2, 1)]):
        x = np.asarray(k)[token]
        limit = np.abs(x) / 15 if float8 else 0.501 * scale[:, page, offset, None]
        assert (np.abs(values[:, page, offset] - x) <= limit + 1e-6).all()
    np.testing.assert_array_equal(plain[:, 4, 3], v[0])


def test_is_in_place_when_donated(k, v):
    k_pages, v_pages = _pages(), quantize(jnp.zeros((K, P, PAGE_SIZE, H)), 4)
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((k_pages, v_pages))]
    out = jax.jit(write_kv, donate_argnums=(0, 1))(k_pages, v_pages, k, v, jnp.arange(6))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(out)] == addresses


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_writes_full_pages_with_any_scale(axis, rng):
    values = jnp.asarray(rng.standard_normal((K, 2, PAGE_SIZE, H)), jnp.float32)
    empty = jax.jit(lambda: quantize(jnp.zeros((K, P, PAGE_SIZE, H)), 4, axis))()
    out = jax.jit(lambda *a: dequantize(write_full_pages(*a)))(empty, values, jnp.array([3, 1]))
    np.testing.assert_allclose(out[:, jnp.array([3, 1])], dequantize(quantize(values, 4, axis)), rtol=1e-6)
    np.testing.assert_array_equal(out[:, 2], 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((6, 3, H))}, r"k must have shape \[T, K=2, H=8\], got \(6, 3, 8\)"),
        ({"v": jnp.zeros((6, K * H))}, r"v must have shape \[T, K=2, H=8\]"),
        ({"v": jnp.zeros((5, K, H))}, r"k and v must have one shape, got \(6, 2, 8\) and \(5, 2, 8\)"),
        ({"v_pages": jnp.zeros((K, 9, PAGE_SIZE, H))}, "k_pages and v_pages must have one shape"),
        ({"v_pages": jnp.zeros((9, PAGE_SIZE, H))}, r"v_pages must have shape \[K, P, page_size, H\]"),
        ({"slot_mapping": jnp.arange(5)}, r"slot_mapping must have shape \[T=6\] or \[K=2, T=6\], got \(5,\)"),
        ({"rope": (jnp.zeros((6, 5)), jnp.zeros((6, 5)))}, r"cos must have shape \[T=6, rotary / 2 <= 4\]"),
        ({"rope": (jnp.zeros((6, 4)), jnp.zeros((6, 3)))}, "sin must have shape"),
        ({"rope": (jnp.zeros((6, 4), jnp.bfloat16),) * 2}, "cos must be float32, got bfloat16"),
        ({"k_pages": quantize(jnp.zeros((K, P, PAGE_SIZE, H)), 4, "channel")}, "k_pages have one scale per channel"),
        ({"implementation": "fastest"}, "write_kv: unknown implementation='fastest'; choose from"),
    ],
)
def test_refuses(k, v, change, message):
    arguments = {"k_pages": _pages(), "v_pages": _pages(), "k": k, "v": v, "slot_mapping": jnp.arange(6)}
    with pytest.raises(ValueError, match=message):
        write_kv(**(arguments | change))


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_every_head_may_have_a_slot_of_its_own(k, v, kind):
    slots = jnp.stack([jnp.arange(4, 10), jnp.arange(12, 6, -1)]).astype(jnp.int32)
    pages = _pages() if kind == "float32" else quantize(_pages())
    both = write_kv(pages, pages, k, v, slots)
    for head in range(K):
        wanted = write_kv(pages, pages, k, v, slots[head])
        for found, one in zip(jax.tree.leaves(both), jax.tree.leaves(wanted)):
            np.testing.assert_array_equal(found[head, 1:], one[head, 1:])
    with pytest.raises(NotImplementedError, match="cpu: a slot for each head"):
        write_kv(pages, pages, k, v, slots, implementation="cpu")


def test_full_pages_must_fit():
    empty = quantize(jnp.zeros((K, P, PAGE_SIZE, H)), 4, "channel")
    with pytest.raises(ValueError, match=r"values must have shape \[K=2, C, page_size=4, H=8\]"):
        write_full_pages(empty, jnp.zeros((K, 2, PAGE_SIZE, H)), jnp.arange(3))


@pytest.mark.parametrize(
    ("target", "implementation", "message"),
    [("a100", "mosaic_gpu", "needs a Hopper GPU"), ("h200", "mosaic_tpu", "needs a TPU")],
)
def test_kernels_say_where_they_run(k, v, target, implementation, message):
    with targeting(target), pytest.raises(NotImplementedError, match=message):
        write_kv(_pages(), _pages(), k, v, jnp.arange(6), implementation=implementation)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_specs_are_valid(spec):
    arguments = jax.eval_shape(spec.arguments)
    jax.eval_shape(lambda *a: spec.function(*a, implementation="xla"), *arguments)
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[2:4]))
    assert spec.num_bytes > stored
