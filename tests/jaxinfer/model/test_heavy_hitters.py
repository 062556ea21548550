"""The parts of H2O on the device, each against plain numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.heavy_hitters import compact_layer
from jaxinfer.model.key_mass import add_key_mass
from jaxinfer.model.kv_cache import KeyLog
from pallas_kernels.paged_attention import make_schedule
from pallas_kernels.pages import quantize

K, G, H, PAGE = 2, 2, 8, 4


@pytest.mark.parametrize("num_decode_rows", [2, None])
def test_key_mass_is_that_of_dense_attention(num_decode_rows, rng):
    """Two rows of one token and, in a ragged step, one of five; the first and an empty one do not count."""
    q_lens = [1, 1, 0, 0] if num_decode_rows is None else [1, 1, 5, 0]
    kv_lens, counted, T = [9, 14, 11 if q_lens[2] else 0, 0], [0, 1, 1, 0], 8 if q_lens[2] else 4
    page_indices = np.array([[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 10, 0], [0, 0, 0, 0]], np.int32)
    keys = rng.normal(size=(K, 11, PAGE, H)).astype(np.float32)
    q = rng.normal(size=(T, K * G, H)).astype(np.float32)
    mass = rng.normal(size=(K, 11, PAGE)).astype(np.float32)
    cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    lse, wanted = np.full((T, K * G), -np.inf, np.float32), mass.copy()
    for s, (start, stop) in enumerate(itertools.pairwise(cu)):
        for t in range(start, stop):
            count = kv_lens[s] - (stop - 1 - t)
            for n in range(K * G):
                k = keys[n // G, page_indices[s]].reshape(-1, H)[:count]
                scores = k @ q[t, n] * 0.3
                lse[t, n] = np.logaddexp.reduce(scores)
                for j, p in enumerate(np.exp(scores - lse[t, n])):
                    wanted[n // G, page_indices[s, j // PAGE], j % PAGE] += counted[s] * p
    decode_rows = None if num_decode_rows is None else jnp.int32(num_decode_rows)
    schedule = make_schedule(T, PAGE, 4, jnp.asarray(np.multiply(kv_lens, counted), jnp.int32), cu, decode_rows)
    args = (jnp.asarray(x) for x in (mass, q, keys, lse, page_indices))
    found = np.array(jax.jit(add_key_mass, static_argnames="scale")(*args, schedule, scale=0.3))
    np.testing.assert_allclose(found[:, 1:], wanted[:, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heavy", "recent"), [(3, 2), (0, 5), (4, 1), (5, 5)])
def test_compaction_keeps_heavy_hitters_and_recent_tokens_as_they_are_stored(heavy, recent, rng):
    num_tokens, pages = 11, np.array([3, 1, 5, 0], np.int32)
    keys, values = (quantize(jnp.asarray(rng.normal(size=(K, 6, PAGE, H)))) for _ in range(2))
    mass = rng.integers(0, 3, (K, 6, PAGE)).astype(np.float32)  # with equal ones
    positions = np.full((K, 6, PAGE), -1, np.int32)
    positions[:, pages[:3]] = np.arange(12).reshape(3, PAGE)
    before = (keys, values), KeyLog(jnp.asarray(mass), jnp.asarray(positions))
    arguments = (np.int32(x) for x in (num_tokens, heavy, recent))
    after = jax.jit(compact_layer)(*before, pages, *arguments)
    used = -(-(heavy + recent) // PAGE)
    for head in range(K):
        sums = mass[head, pages].ravel()
        older = sorted(range(num_tokens - recent), key=lambda p: (-sums[p], p))
        wanted = sorted([*older[:heavy], *range(num_tokens - recent, num_tokens)])
        places = np.asarray(after[1].positions)[head, pages].ravel()[: heavy + recent]
        assert sorted(places.tolist()) == wanted
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            old, new = np.asarray(old)[head], np.asarray(new)[head]
            moved = old[pages].reshape(-1, *old.shape[2:])[places]
            np.testing.assert_array_equal(new[pages].reshape(-1, *new.shape[2:])[: heavy + recent], moved)
            for page in {1, 2, 3, 4, 5} - set(pages[:used].tolist()):  # nobody else's pages are touched
                np.testing.assert_array_equal(new[page], old[page])
