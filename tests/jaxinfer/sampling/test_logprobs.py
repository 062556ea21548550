import jax
import numpy as np
import pytest

from jaxinfer.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("k", [1, 20, 5000])
def test_logprobs_match_float64(logits, k):
    ids = np.argsort(-logits, axis=1)[np.arange(7), [0, 1, 2, 10, 100, 200, 50]].astype(np.int32)
    own, rank, top_ids, top = jax.jit(token_logprobs, static_argnums=2)(logits, ids, k)
    x = logits.astype(np.float64)
    want = x - x.max(1, keepdims=True)
    want -= np.log(np.exp(want).sum(1, keepdims=True))
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(want, order, 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(own, want[np.arange(7), ids], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rank, 1 + (x > x[np.arange(7), ids][:, None]).sum(1))
