"""The text side of a request: detokenizer, log-probabilities with their texts, chunks and outputs."""

from jaxinfer.engine.outputs import CompletionChunk, CompletionOutput, TokenLogprobs
from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.engine.scoring import ScoredTokens
from jaxinfer.sampling.result import Logprob
from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer


class Sequence:
    """One completion: a request and the text it has produced."""

    def __init__(self, parent_id: str, index: int, request: Request, tokenizer: Tokenizer):
        """Starts the completion `index` of the request `parent_id`."""
        params = request.params
        self.parent_id = parent_id
        self.index = index
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            stop=params.stop,
            stop_from=params.min_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            continuation=True,
        )
        self._num_pushed = 0
        self._echo = ""
        if params.echo:
            self._echo = request.prompt if request.prompt is not None else tokenizer.decode(request.prompt_token_ids)
        self._prefix = self._echo  # of the next chunk

    @property
    def stop_string(self) -> str | None:
        """The stop string that has been found."""
        return self._detokenizer.stopped

    def advance(self) -> CompletionChunk | None:
        """Returns what the tokens read since the last call add, None if that is nothing.

        If they complete a stop string, surplus tokens are taken off the request.
        """
        request = self.request
        text = self._detokenizer.push(request.output_token_ids[self._num_pushed :])
        if self._detokenizer.stopped is not None:
            end = self._detokenizer.stop_token_index
            assert end is not None
            del request.output_token_ids[end + 1 :], request.logprobs[end + 1 :]
            request.finish_reason, request.stop_reason = FinishReason.STOP, self._detokenizer.stopped
        if request.is_finished:
            text += self._detokenizer.flush()
        new = request.output_token_ids[self._num_pushed :]
        logprobs = request.logprobs[self._num_pushed :] if request.params.logprobs is not None else None
        is_first = new and not self._num_pushed and request.params.prompt_logprobs is not None
        self._num_pushed = len(request.output_token_ids)
        if not new and not text and request.finish_reason is None:
            return None
        text, self._prefix = self._prefix + text, ""
        prompt_logprobs = list(request.prompt_logprobs) or [None] if is_first else None
        ends = request.finish_reason is not None
        return CompletionChunk(
            self.parent_id, self.index, text, new, logprobs, request.finish_reason, request.stop_reason,
            prompt_logprobs, request.metrics if ends else None, self.cumulative_logprob if ends else None,
        )  # fmt: skip

    def output(self, index: int) -> CompletionOutput:
        """Returns the completion as it stands, under the index that it has among those that are returned."""
        request = self.request
        logprobs = list(request.logprobs) if request.params.logprobs is not None else None
        text = self._echo + self._detokenizer.text
        return CompletionOutput(
            index, text, list(request.output_token_ids), logprobs, request.finish_reason, request.stop_reason,
            self.cumulative_logprob,
        )  # fmt: skip

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the output tokens, if they are scored."""
        request = self.request
        if not request.needs_logprobs:
            return None
        return sum(entry[token].logprob for token, entry in zip(request.output_token_ids, request.logprobs))

    def add_logprobs(self, scored: ScoredTokens, tokens: list[int]) -> None:
        """Adds the entries of sampled tokens."""
        count = self.request.params.logprobs or 0
        self.request.logprobs += [self._entry(scored, i, token, count) for i, token in enumerate(tokens)]

    def add_prompt_logprobs(self, scored: ScoredTokens, start: int) -> None:
        """Adds the entries of the prompt tokens from `start` + 1 on."""
        request, count = self.request, self.request.params.prompt_logprobs
        assert count is not None
        request.prompt_logprobs = request.prompt_logprobs[: start + 1] or [None]
        targets = request.prompt_token_ids[start + 1 : start + 1 + len(scored.rank)]
        request.prompt_logprobs += [self._entry(scored, i, token, count) for i, token in enumerate(targets)]

    def _entry(self, scored: ScoredTokens, i: int, token: int, count: int) -> TokenLogprobs:
        top = zip(scored.top_ids[i, :count].tolist(), scored.top_logprobs[i, :count].tolist())
        entry = {token: Logprob(float(scored.logprob[i]), int(scored.rank[i]), self._text(token))}
        for rank, (other, logprob) in enumerate(top, 1):
            entry.setdefault(other, Logprob(logprob, rank, self._text(other)))
        return entry

    def _text(self, token: int) -> str:
        known = token < self._tokenizer.vocab_size  # logits may be wider than the vocabulary
        return self._tokenizer.decode([token], skip_special_tokens=False, continuation=True) if known else ""
