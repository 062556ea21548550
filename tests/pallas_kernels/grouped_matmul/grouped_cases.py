"""Cases of the grouped product that every backend must pass."""

import jax.numpy as jnp
import numpy as np

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
N, K = 128, 128
CASES = {  # rows of each group, and rows after them
    "one_row": ((0, 1, 0), 0),
    "no_groups": ((0, 0, 0), 5),
    "tile_edges": ((8, 16, 1, 7), 8),
    "one_group": ((0, 37, 0), 0),
    "ragged": ((3, 0, 13, 0, 0, 9, 1), 4),
}


def make(case, dtype):
    """Returns the arguments and the exact result; rows after the groups are NaN, and so are experts without rows."""
    sizes, tail = CASES[case]
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(len(sizes) + 1), [*sizes, tail])
    x = np.where((group < len(sizes))[:, None], rng.normal(size=(len(group), K)), np.nan)
    w = rng.normal(size=(len(sizes), N, K)) / K**0.5
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    expected = np.zeros((len(group), N))
    for t, e in enumerate(group):
        if e < len(sizes):
            expected[t] = np.array(w[e], np.float64) @ np.array(x[t], np.float64)
    poison = jnp.asarray(np.array(sizes) == 0)[:, None, None]
    return (x, jnp.where(poison, jnp.asarray(jnp.nan, dtype), w), jnp.asarray(sizes, jnp.int32)), expected


def check(out, expected, dtype):
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
