"""top_k, top_p, min_p and typical_p: which tokens may be drawn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.sampling.threshold import largest_threshold, share

NUM_CANDIDATES = 128
_ONE = np.uint32(1)


class Kept(NamedTuple):
    """Which tokens may be drawn: those with log weight >= threshold and |log weight - centre| <= radius."""

    threshold: jax.Array  # float32[S]
    centre: jax.Array  # float32[S]
    radius: jax.Array  # float32[S]

    def __call__(self, log_weights: jax.Array) -> jax.Array:
        """Returns bool[S, n] of float32[S, n]."""
        near = jnp.abs(log_weights - self.centre[:, None]) <= self.radius[:, None]
        return (log_weights >= self.threshold[:, None]) & near


def truncate(
    log_weights: jax.Array,
    masses: jax.Array,
    *,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    typical_p: jax.Array,
) -> Kept:
    """Returns what top_k, top_p, min_p, typical_p leave, each on the distribution left by the one before.

    Args:
        log_weights: float32[S, V], the greatest of each row 0.
        masses: uint32[S, V] of `threshold.masses`.
        top_k: int32[S]; 0 or less is off.
        top_p: float32[S]; 1 is off.
        min_p: float32[S]; 0 is off.
        typical_p: float32[S]; 1 is off.
    """
    off = jnp.full_like(top_p, -jnp.inf)
    threshold = lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: top_threshold(log_weights, masses, top_k, top_p),
        lambda: off,
    )
    threshold = jnp.maximum(threshold, jnp.log(min_p))  # log 0 = -inf is off
    centre, radius = lax.cond(
        jnp.any(typical_p < 1),
        lambda: typical_band(log_weights, masses, threshold, typical_p),
        lambda: (jnp.zeros_like(off), -off),
    )
    return Kept(threshold, centre, radius)


def top_threshold(log_weights: jax.Array, masses: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns the log weight, float32[S], that a token needs to pass top_k, then top_p; -inf if both are off.

    Both look first at the 128 most probable tokens, found by a partial sort (0.15 ms a row on a CPU core).
    Only if a row's answer lies beyond them do all rows take the bisection; the answers are bit equal.

    Args:
        log_weights: float32[S, V].
        masses: uint32[S, V] of `threshold.masses`.
        top_k: int32[S]; 0 or less is off.
        top_p: float32[S]; 1 is off.
    """
    vocab_size = log_weights.shape[1]
    num = min(NUM_CANDIDATES, vocab_size)
    limited, nucleus = (top_k > 0) & (top_k < vocab_size), top_p < 1
    k = jnp.clip(top_k, 1, vocab_size)

    def mass_target(k_threshold: jax.Array) -> jax.Array:
        left = jnp.sum(jnp.where(log_weights >= k_threshold[:, None], masses, np.uint32(0)), axis=1)
        return share(left, top_p)

    best, ids = lax.top_k(log_weights, num)
    kth = jnp.take_along_axis(best, jnp.minimum(k, num)[:, None] - 1, axis=1)[:, 0]
    kth = jnp.where(limited, kth, -jnp.inf)
    cumulative = jnp.cumsum(jnp.take_along_axis(masses, ids, axis=1), axis=1)
    short = jnp.sum(cumulative < mass_target(kth)[:, None], axis=1, dtype=jnp.int32)
    pth = jnp.take_along_axis(best, jnp.minimum(short, num - 1)[:, None], axis=1)[:, 0]
    found = (~limited | (k <= num)) & (~nucleus | (short < num))

    def by_candidates() -> jax.Array:
        return jnp.maximum(kth, jnp.where(nucleus, pth, -jnp.inf))

    def by_bisection() -> jax.Array:
        exact = jnp.where(limited, largest_threshold(log_weights, _ONE, k.astype(jnp.uint32)), -jnp.inf)
        pth = largest_threshold(log_weights, masses, mass_target(exact))
        return jnp.maximum(exact, jnp.where(nucleus, pth, -jnp.inf))

    return lax.cond(jnp.all(found), by_candidates, by_bisection)


def typical_band(
    log_weights: jax.Array, masses: jax.Array, threshold: jax.Array, typical_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns centre and radius, float32[S]: typical tokens have |log weight - centre| <= radius.

    Locally typical sampling (Meister et al., 2022) ranks tokens by |-log p - entropy|. With log p = y - log Z
    this is |y - E[y]|, so neither Z nor the entropy is needed.

    Args:
        log_weights: float32[S, V].
        masses: uint32[S, V] of `threshold.masses`.
        threshold: float32[S], the log weight below which tokens have been removed.
        typical_p: float32[S]; 1 is off: an infinite radius.
    """
    kept = log_weights >= threshold[:, None]
    log_weights, masses = jnp.where(kept, log_weights, -jnp.inf), jnp.where(kept, masses, np.uint32(0))
    weights = jnp.exp(log_weights)
    moment = jnp.sum(jnp.where(weights > 0, weights * log_weights, np.float32(0)), axis=1)
    centre = moment / jnp.maximum(jnp.sum(weights, axis=1), np.float32(1e-30))
    closeness = -jnp.abs(log_weights - centre[:, None])
    target = share(jnp.sum(masses, axis=1), typical_p)
    radius = -largest_threshold(closeness, masses, target)
    return centre, jnp.where(typical_p < 1, radius, jnp.inf)
