"""What an output says about one token; no jax."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model, before penalties and temperature (as in the OpenAI API).

    Attributes:
        logprob: Natural logarithm of the probability; -inf for a token the model rules out.
        rank: 1 + the number of tokens the model finds strictly more probable.
        token: Text of the token, or None when nothing was detokenized.
    """

    logprob: float
    rank: int
    token: str | None = None
