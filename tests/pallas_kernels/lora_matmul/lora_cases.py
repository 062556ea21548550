"""Cases of the LoRA product that every backend must pass: NaN stands in all that must not be used."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
RANK, D_IN, D_OUT = 16, 128, 128


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    adapters: int
    indices: tuple[int, ...]
    has_scales: bool = True
    has_base: bool = True

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("one_token", 3, (2,)),
    Case("nobody", 3, (3, 3, -1, 7)),
    Case("each_its_own", 32, tuple(int(i) for i in np.random.default_rng(1).permutation(32)[:11])),
    Case("one_adapter", 4, (1,) * 19),
    Case("mixed", 4, (2, 4, 0, 2, -1, 0, 0, 2, 4, 2, 2, 0, 100, 2, 2, 2, 2, 2, 0, 2, 2, 2)),
    Case("tile_edges", 5, (0,) * 8 + (3,) * 16 + (4,) + (5,) * 7),
    Case("no_base", 3, (0, 3, 2, 0, 0, 2, 3), has_base=False),
    Case("no_scales", 3, (0, 3, 2, 0, 0, 2, 3), has_scales=False),
    Case("neither", 3, (0, 3, 2, 0, 0, 2, 3), has_scales=False, has_base=False),
)


def make(case: Case, dtype: Any, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any], np.ndarray]:
    """Returns positional arguments, keyword arguments and the exact result."""
    rng = np.random.default_rng(seed)
    indices = np.array(case.indices)
    used = np.isin(np.arange(case.adapters), indices)
    has_adapter = (indices >= 0) & (indices < case.adapters)
    x = np.where(has_adapter[:, None], rng.normal(size=(len(indices), D_IN)), np.nan)
    a = np.where(used[:, None, None], rng.normal(size=(case.adapters, RANK, D_IN)) / D_IN**0.5, np.nan)
    b = np.where(used[:, None, None], rng.normal(size=(case.adapters, D_OUT, RANK)) / RANK**0.5, np.nan)
    a[:, -5:] = np.where(used[:, None, None], 0, np.nan)  # a lower rank, padded
    x, a, b = (jnp.asarray(value, dtype) for value in (x, a, b))
    scales = np.where(used, rng.uniform(0.5, 1.5, case.adapters), np.nan).astype(np.float32)
    base = jnp.asarray(rng.normal(size=(len(indices), D_OUT)), dtype)

    expected = np.array(base, np.float64) if case.has_base else np.zeros((len(indices), D_OUT))
    for t, i in enumerate(indices):
        if has_adapter[t]:
            h = np.array(a[i], np.float64) @ np.array(x[t], np.float64)
            h = h * scales[i] if case.has_scales else h
            expected[t] += np.array(b[i], np.float64) @ np.array(jnp.asarray(h, dtype), np.float64)
    kwargs = {
        "scales": jnp.asarray(scales) if case.has_scales else None,
        "base": base if case.has_base else None,
    }
    return (x, a, b, jnp.asarray(indices, jnp.int32)), kwargs, expected


def check(out: Any, case: Case, expected: np.ndarray, kwargs: dict[str, Any], dtype: Any) -> None:
    """Asserts that `out` is right, and exact for tokens without adapter."""
    assert out.dtype == dtype
    assert out.shape == expected.shape
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    indices = np.array(case.indices)
    rest = (indices < 0) | (indices >= case.adapters)
    kept = 0 if kwargs["base"] is None else np.asarray(kwargs["base"], np.float64)[rest]
    np.testing.assert_array_equal(np.asarray(out, np.float64)[rest], kept)
