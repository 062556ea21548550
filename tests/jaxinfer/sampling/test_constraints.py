import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.constraints import allowed_by, forbid_ends, penalize
from tests.jaxinfer.sampling import reference


def test_penalties_match_the_reference(logits, rng):
    counts = rng.integers(0, 3, logits.shape).astype(np.int32)
    in_prompt = rng.random(logits.shape) < 0.2
    settings = np.float32([[1, 0, 0], [1.3, 0, 0], [0.7, 0, 0], [1, 0.5, 0], [1, 0, -0.4], [1.2, 2, 1], [1, -2, 0]])
    got = np.asarray(jax.jit(penalize)(logits, counts, in_prompt, *settings.T))
    np.testing.assert_array_equal(got[0], logits[0])
    for i, row in enumerate(logits):
        want = reference.penalize(row, counts[i], in_prompt[i], *settings[i].astype(np.float64))
        np.testing.assert_allclose(got[i], want, rtol=1e-6, atol=1e-6)


def test_mask_bits_are_tokens():
    words = np.zeros((2, 3), np.uint32)
    for token in (0, 31, 32, 69):
        words[0, token // 32] |= np.uint32(1 << token % 32)
    got = np.asarray(allowed_by(jnp.asarray(words), 70))
    assert got.shape == (2, 70)
    assert np.flatnonzero(got[0]).tolist() == [0, 31, 32, 69]
    assert not got[1].any()


def test_ends_are_forbidden_while_early_unless_nothing_else_is_left():
    logits = jnp.asarray([[1.0, 2, 3], [1, 2, 3], [-jnp.inf, -jnp.inf, 3]], jnp.float32)
    ends = jnp.asarray([[False, False, True]] * 3)
    got = forbid_ends(logits, ends, jnp.asarray([True, False, True]))
    np.testing.assert_array_equal(got, [[1, 2, -np.inf], [1, 2, 3], [-np.inf, -np.inf, 3]])
