"""Joins attention over disjoint keys."""

import jax
import jax.numpy as jnp

Part = tuple[jax.Array, jax.Array]  # f[T, N, H] and its log-sum-exp f32[T, N]


def join(first: Part, second: Part) -> Part:
    """Returns the attention over the keys of both, in the dtype of the second's, and its log-sum-exp.

    The second part of every real token must have keys; padding has a log-sum-exp of -inf in it and stays finite.
    """
    share = jnp.where(second[1] == -jnp.inf, 0.0, jax.nn.sigmoid(first[1] - second[1]))[..., None]
    out = first[0].astype(jnp.float32) * share + second[0].astype(jnp.float32) * (1 - share)
    return out.astype(second[0].dtype), jnp.logaddexp(first[1], second[1])
