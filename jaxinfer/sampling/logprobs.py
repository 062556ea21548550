"""Log-probabilities of tokens under the model."""

import jax
import jax.numpy as jnp
from jax import lax


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, k: int = 20
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities of one token a row and of the most probable ones.

    From the raw logits, before penalties and temperature, as in vLLM by default and the OpenAI API.

    Args:
        logits: float32[S, V].
        token_ids: int32[S], below V.
        k: Static number of alternatives; at most V are returned.

    Returns:
        logprob float32[S], rank int32[S] (1 + the number of strictly greater logits), and of the min(k, V)
        most probable tokens in falling order, the lower id first among equals, ids int32[S, k] and
        logprobs float32[S, k].
    """
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    own = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    rank = 1 + jnp.sum(logits > own, axis=1, dtype=jnp.int32)
    top, top_ids = lax.top_k(logits, min(k, logits.shape[1]))
    return (own - normaliser)[:, 0], rank, top_ids.astype(jnp.int32), top - normaliser
