"""Beam search over token sequences, without a model: `BeamSearchParams` and the bookkeeping of one prompt; no jax.

The rules are those of transformers 5 (`_beam_search` in its generation/utils.py).
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Literal

from jaxinfer.sampling import checks
from jaxinfer.sampling.params import MAX_LOGPROBS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search for the most probable continuations of a prompt. Checked, immutable.

    A continuation's score is the sum of the log-probabilities of its tokens, its last one included, over
    length ** `length_penalty`.

    Attributes:
        beam_width: Continuations that are followed at a time.
        n: Number of continuations that are returned, the best first; None is `beam_width`.
        max_tokens: Most output tokens; None is what the model's length leaves.
        length_penalty: Above 0 favours long continuations, below 0 short ones; in [-10, 10].
        early_stopping: When to stop once `beam_width` continuations have ended. True: at once. False: when the best
            running one, at its present length, scores no better than the worst of them. "never": when it could not
            at any length.
        ignore_eos: Go on past the model's own end-of-sequence tokens.
        stop_token_ids: Tokens that end a continuation, besides the model's own; kept in the output.
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        ValueError: A value of the wrong type or outside its range; the message names it.
    """

    beam_width: int
    n: int | None = None
    max_tokens: int | None = 256
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("beam_width", checks.integer("beam_width", self.beam_width, 1, MAX_LOGPROBS))
        if self.n is not None:
            put("n", checks.integer("n", self.n, 1, self.beam_width))
        if self.max_tokens is not None:
            put("max_tokens", checks.integer("max_tokens", self.max_tokens, 1))
        put("length_penalty", checks.real("length_penalty", self.length_penalty, -10, 10))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping must be True, False or "never", got {self.early_stopping!r}')
        put("stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            put(name, checks.boolean(name, getattr(self, name)))


@dataclasses.dataclass(frozen=True, slots=True)
class Beam:
    """A continuation: its tokens, the sum of their log-probabilities, and which beam of the step before it extends."""

    token_ids: list[int]
    logprob: float
    parent: int = 0


class BeamSearch:
    """The beams of one prompt.

    Attributes:
        running: those to be extended, the best first.
        finished: those that have ended, by falling score, at most `beam_width`.
        is_done: whether `running` need not be extended any more.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, stop_token_ids: frozenset[int]):
        """Starts with one beam without tokens; `stop_token_ids` are all that end a continuation."""
        self.params = params
        self.running = [Beam([], 0.0)]
        self.finished: list[Beam] = []
        self.is_done = False
        self._max_tokens = max_tokens
        self._stops = stop_token_ids

    @property
    def num_candidates(self) -> int:
        """How many next tokens of each beam can matter: as many as there are beams, besides those that end it."""
        return self.params.beam_width + len(self._stops)

    def score(self, beam: Beam) -> float:
        """Returns what beams are ranked by once they have ended."""
        return beam.logprob / len(beam.token_ids) ** self.params.length_penalty

    def advance(self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Extends every running beam by one token.

        Args:
            candidates: for each running beam, at least its `num_candidates` most probable next tokens, and their
                log-probabilities.
        """
        width = self.params.beam_width
        extended = (
            (beam.logprob + logprob, -i, -token)  # of equals the earlier beam, then the lower token
            for i, (beam, (tokens, logprobs)) in enumerate(zip(self.running, candidates, strict=True))
            for token, logprob in zip(tokens, logprobs)
        )
        best = heapq.nlargest(width * max(2, 1 + len(self._stops)), extended)
        beams = [Beam([*self.running[-i].token_ids, -token], logprob, -i) for logprob, i, token in best]
        self.running = [beam for beam in beams if not self._ends(beam)][:width]
        # One that ends must be among the best `width`; the others are there so that as many can go on.
        ended = [beam for beam in beams[:width] if self._ends(beam)]
        self.finished = sorted([*self.finished, *ended], key=self.score, reverse=True)[:width]
        self.is_done = not self.running or not self._can_improve()

    def _ends(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._stops or len(beam.token_ids) == self._max_tokens

    def _can_improve(self) -> bool:
        if len(self.finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        best, penalty = self.running[0], self.params.length_penalty
        longest = self.params.early_stopping == "never" and penalty > 0
        length = self._max_tokens if longest else len(best.token_ids)
        return best.logprob / length**penalty > self.score(self.finished[-1])
