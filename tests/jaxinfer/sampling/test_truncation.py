import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import truncation
from jaxinfer.sampling.threshold import largest_threshold, masses, ordered, unordered
from jaxinfer.sampling.truncation import NUM_CANDIDATES, top_threshold, truncate
from tests.jaxinfer.sampling import reference

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


@jax.jit
def run(y, top_k, top_p, min_p, typical_p):
    weights = masses(y)
    return truncate(y, weights, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)(y)


def kept(y, **settings):
    """Kept tokens of every row; each setting is a scalar or one value a row."""
    columns = [
        jnp.asarray(np.broadcast_to(settings.get(k, v), len(y)), jnp.int32 if k == "top_k" else jnp.float32)
        for k, v in OFF.items()
    ]
    return np.asarray(run(jnp.asarray(y), *columns))


def log_weights(logits):
    return logits - logits.max(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_k", [1, 2, 5, 127, 128, 129, 700, 999, 1000, 5000]),
        ("top_p", [1e-30, 1e-3, 0.3, 0.5, 0.9, 0.99, 0.9995]),
        ("min_p", [1e-4, 0.05, 0.5, 1.0]),
        ("typical_p", [1e-30, 0.2, 0.5, 0.95]),
    ],
)
def test_keeps_the_tokens_of_the_reference(logits, name, values):
    y = log_weights(logits)
    finite = np.isfinite(y)
    for value in values:
        got = kept(y, **{name: value}) & finite
        want = np.array([getattr(reference, name)(row, value) for row in y]) & finite
        assert got.any(axis=1).all()
        np.testing.assert_array_equal(got, want, err_msg=f"{name}={value}")


def test_processors_apply_to_what_the_one_before_left(logits):
    y = log_weights(logits)
    settings = {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.7}
    got = kept(y, **settings) & np.isfinite(y)
    for row, mask in zip(y, got, strict=True):
        left = row.copy()
        for name, value in settings.items():
            left = np.where(getattr(reference, name)(left, value), left, -np.inf)
        np.testing.assert_array_equal(mask, np.isfinite(left))


@functools.cache
def thresholds(num_candidates):
    """The jitted `truncate` for one value of NUM_CANDIDATES, which is read when it is traced."""
    ks, ps = jnp.full(7, 60, jnp.int32), jnp.full(7, 0.7, jnp.float32)

    def function(y):
        assert num_candidates == truncation.NUM_CANDIDATES
        return truncate(y, masses(y), top_k=ks, top_p=ps, min_p=ps * 0, typical_p=ps * 0 + 1).threshold

    return jax.jit(function)


def test_candidates_and_bisection_agree_bit_for_bit(logits, monkeypatch):
    y = jnp.asarray(log_weights(logits))
    fast = thresholds(NUM_CANDIDATES)(y)
    monkeypatch.setattr("jaxinfer.sampling.truncation.NUM_CANDIDATES", 1)  # too few: bisection
    np.testing.assert_array_equal(fast, thresholds(1)(y))


def test_rows_do_not_feel_their_neighbours(logits):
    y = log_weights(logits)
    settings = {
        "top_k": [0, 5, 0, 0, 300, 0, 50],
        "top_p": [1, 1, 0.9, 1, 0.999, 1, 0.5],
        "min_p": [0, 0, 0, 0.1, 0, 0, 0.01],
        "typical_p": [1, 1, 1, 1, 1, 0.6, 0.9],
    }
    together = kept(y, **settings)
    assert together[0].all()
    for i in range(7):
        alone = kept(y[i : i + 1], **{k: v[i] for k, v in settings.items()})
        np.testing.assert_array_equal(alone[0], together[i])


def test_ordered_is_monotone_and_invertible():
    values = jnp.asarray([-jnp.inf, -3e38, -1.5, -1e-38, -0.0, 0.0, 1e-38, 2.0, 3e38, jnp.inf], jnp.float32)
    images = np.asarray(ordered(values))
    assert (np.diff(images.astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(
        np.asarray(unordered(jnp.asarray(images))).view(np.uint32), np.asarray(values).view(np.uint32)
    )


def test_largest_threshold_is_exact():
    values = jnp.asarray([[3.0, -1.0, 3.0, -jnp.inf, -0.0], [0.0, 0.0, 0.0, 0.0, 0.0]], jnp.float32)
    for target, want in [(1, 3), (2, 3), (3, 0), (4, -1), (5, -np.inf), (6, -np.inf)]:
        got = jax.jit(largest_threshold)(values, np.uint32(1), jnp.asarray([target, 1], jnp.uint32))
        np.testing.assert_array_equal(values >= got[:, None], values >= jnp.asarray([[want], [0]], jnp.float32))


def test_masses_are_probabilities(logits):
    y = log_weights(logits)
    got = np.asarray(masses(jnp.asarray(y))).astype(np.float64)
    total = got.sum(axis=1, keepdims=True)
    assert ((total >= 2**30 * 0.999) & (total < 2**32)).all()
    want = np.array([reference.softmax(row) for row in y])
    np.testing.assert_allclose(got / total, want, atol=2e-9, rtol=1e-6)


def test_top_p_stops_at_exactly_its_mass(monkeypatch):
    y = jnp.asarray([[0, -1, -2, -3]] * 4, jnp.float32)
    units = jnp.asarray([[4, 2, 1, 1]] * 4, jnp.uint32)
    for num_candidates in (128, 1):
        monkeypatch.setattr("jaxinfer.sampling.truncation.NUM_CANDIDATES", num_candidates)
        got = jax.jit(lambda *a: top_threshold(*a))(
            y, units, jnp.zeros(4, jnp.int32), jnp.asarray([0.5, 0.51, 0.75, 0.85], jnp.float32)
        )
        np.testing.assert_array_equal(got, np.float32([0, -1, -1, -2]))
