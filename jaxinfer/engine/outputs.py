"""What users get back: whole outputs, and the chunks of a stream. Imports no jax."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxinfer.engine.request import FinishReason, RequestMetrics
from jaxinfer.sampling.result import Logprob

TokenLogprobs = dict[int, Logprob]  # the token's own entry and the most probable alternatives


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the `n` completions.
        text: the text, ended before a stop string (the prompt first, if `echo`).
        token_ids: the output tokens, the end-of-sequence token included.
        logprobs: one entry a token, if `SamplingParams.logprobs` asked for them.
        finish_reason: why it ended; None while it runs.
        stop_reason: the stop string or the token id that ended it, or what the error was; None for the model's length
            and for aborts.
        cumulative_logprob: sum of the log-probabilities of `token_ids`, if they were scored: for `logprobs`, to choose
            among `best_of` completions, or in a beam search.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        request_id: as given, or made by the engine.
        prompt: text of the prompt; None if it was given as token ids.
        prompt_token_ids: its tokens.
        prompt_logprobs: one entry a prompt token, the first None, if asked for.
        outputs: `n` completions; with `best_of` or from a beam search, the best first.
        metrics: times of the first completion.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(output.finish_reason is not None for output in self.outputs)


def most_probable[T](completions: Sequence[T], n: int, logprob: Callable[[T], float]) -> list[T]:
    """Returns the `n` most probable completions of a prompt, the best first; if there are `n`, all as they are."""
    return list(completions) if len(completions) == n else sorted(completions, key=logprob, reverse=True)[:n]


@dataclasses.dataclass(frozen=True)
class CompletionChunk:
    """What one step added to one completion; the texts of all chunks joined are the completion's text.

    Attributes:
        prompt_logprobs: in the first chunk with tokens, one entry a prompt token, if asked for.
        metrics: in the last chunk.
        cumulative_logprob: in the last chunk, as in `CompletionOutput`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    cumulative_logprob: float | None = None
