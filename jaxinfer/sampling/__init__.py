"""How the next token is chosen.

This package, `params`, `rows` and `result` import no jax; `state`, `sampler` and `logprobs` do.
"""

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.result import Logprob

__all__ = ["Logprob", "SamplingParams"]
