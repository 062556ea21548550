import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.draw import _high_product, draw, random_words
from jaxinfer.sampling.rows import seed_words

jitted_draw = jax.jit(draw, static_argnums=2)


def everything(y):
    return y > -jnp.inf


def test_high_product_is_exact(rng):
    a, b = rng.integers(0, 2**32, (2, 1000), dtype=np.uint64)
    a[:3], b[:3] = [0, 2**32 - 1, 2**32 - 1], [5, 2**32 - 1, 1]
    got = np.asarray(_high_product(jnp.asarray(a, jnp.uint32), jnp.asarray(b, jnp.uint32)))
    np.testing.assert_array_equal(got, (a * b) >> np.uint64(32))


def test_draw_inverts_the_cumulative_mass(rng):
    for vocab_size in (1, 5, 256, 257, 1000):
        masses = rng.integers(0, 2**21, (6, vocab_size)).astype(np.uint32)
        masses[:, ::3] = 0
        masses[:, -1] = 7
        words = rng.integers(0, 2**32, 6, dtype=np.uint64)
        words[:2] = [0, 2**32 - 1]
        y = jnp.zeros(masses.shape, jnp.float32)
        got = np.asarray(jitted_draw(jnp.asarray(masses), y, everything, jnp.asarray(words, jnp.uint32)))
        for row, word, token in zip(masses.astype(np.uint64), words, got, strict=True):
            rest = (word * row.sum()) >> np.uint64(32)
            assert token == np.searchsorted(np.cumsum(row), rest, side="right")


def test_dropped_tokens_are_never_drawn():
    masses = jnp.full((64, 600), 1000, jnp.uint32)
    y = jnp.tile(jnp.where(jnp.arange(600) % 100 == 7, 0.0, -jnp.inf)[None], (64, 1))
    words = jnp.arange(64, dtype=jnp.uint32) * np.uint32(2**26)
    got = np.asarray(jitted_draw(masses, y, everything, words))
    assert set(got.tolist()) == {7, 107, 207, 307, 407, 507}


def test_words_are_fold_in_of_seed_and_position():
    seeds = [0, 5, 2**32 + 1, 2**63 - 1]
    positions = [0, 7, 7, 2**31 - 1]
    words = random_words(jnp.asarray([seed_words(s) for s in seeds], jnp.uint32), jnp.asarray(positions, jnp.int32))
    with jax.enable_x64(True):
        for word, seed, position in zip(np.asarray(words), seeds, positions, strict=True):
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), np.uint32(position))
            assert word == np.asarray(jax.random.key_data(key))[0]
    assert len(set(np.asarray(words).tolist())) == 4
