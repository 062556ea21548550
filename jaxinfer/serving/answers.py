"""Chunks of the engine -> the JSON of completions and chats, whole or as events of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxinfer.engine.outputs import CompletionChunk, most_probable
from jaxinfer.serving.logprobs import CompletionLogprobs, chat_logprobs
from jaxinfer.serving.prompts import Prompt
from jaxinfer.tokenizer import Tokenizer


class Answer(ABC):
    """Makes the JSON of one request. Choice i * n + k is completion k of prompt i."""

    event_name: ClassVar[str]  # the "object" of an event

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, logprobs: int | None):
        """Reports `logprobs` alternatives a token, or nothing about them if it is None."""
        self.id = request_id
        self.model = model
        self.created = int(time.time())
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self.choices: list[dict[str, Any]] = []

    @abstractmethod
    def begin(self, prompts: Sequence[Prompt], n: int) -> list[dict[str, Any]]:
        """Prepares the choices and returns the first events."""

    @abstractmethod
    def add(self, choice: int, chunk: CompletionChunk) -> list[dict[str, Any]]:
        """Adds a chunk to a choice and returns its events, which may be none."""

    @abstractmethod
    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the event that ends a stream whose client wants to know the usage."""
        return self._envelope(self.event_name, choices=[], usage=usage)

    def _envelope(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model} | fields

    def _event(self, **choice: Any) -> dict[str, Any]:
        return self._envelope(self.event_name, choices=[choice])


class ChatAnswer(Answer):
    """POST /v1/chat/completions."""

    event_name = "chat.completion.chunk"

    def begin(self, prompts: Sequence[Prompt], n: int) -> list[dict[str, Any]]:
        """See `Answer`. The first event of a choice says who speaks."""
        count = len(prompts) * n
        self.choices = [{"content": [], "logprobs": [], "finish_reason": None} for _ in range(count)]
        opening = {"role": "assistant", "content": ""}
        return [self._event(index=i, delta=opening, logprobs=None, finish_reason=None) for i in range(count)]

    def add(self, choice: int, chunk: CompletionChunk) -> list[dict[str, Any]]:
        """See `Answer`. The reason why a choice ended comes in an event of its own."""
        kept, scores, events = self.choices[choice], None, []
        kept["content"].append(chunk.text)
        if self.logprobs is not None and chunk.logprobs:
            entries = chat_logprobs(self.tokenizer, chunk.token_ids, chunk.logprobs, self.logprobs)
            kept["logprobs"] += entries
            scores = {"content": entries, "refusal": None}
        if chunk.text or scores:
            events.append(self._event(index=choice, delta={"content": chunk.text}, logprobs=scores, finish_reason=None))
        if chunk.finish_reason is not None:
            kept["finish_reason"] = chunk.finish_reason
            events.append(self._event(index=choice, delta={}, logprobs=None, finish_reason=chunk.finish_reason))
        return events

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See `Answer`."""
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(kept["content"]), "refusal": None},
                "logprobs": None if self.logprobs is None else {"content": kept["logprobs"], "refusal": None},
                "finish_reason": kept["finish_reason"],
            }
            for i, kept in enumerate(self.choices)
        ]
        return self._envelope("chat.completion", choices=choices, usage=usage)


class CompletionAnswer(Answer):
    """POST /v1/completions."""

    event_name = "text_completion"

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, logprobs: int | None, echo: bool, n: int):
        """With `echo`, the prompt's text and log-probabilities come first; the whole has the `n` best of a prompt."""
        super().__init__(request_id, model, tokenizer, logprobs)
        self.echo = echo
        self.n = n
        self._num_completions = n  # of a prompt, before the best are chosen

    def begin(self, prompts: Sequence[Prompt], n: int) -> list[dict[str, Any]]:
        """See `Answer`."""
        self._num_completions = n
        self.choices = [
            {
                "prompt": prompt,
                "text": [],
                "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []},
                "scores": CompletionLogprobs(self.tokenizer, self.logprobs or 0),
                "finish_reason": None,
                "cumulative_logprob": None,
            }
            for prompt in prompts
            for _ in range(n)
        ]
        return []

    def add(self, choice: int, chunk: CompletionChunk) -> list[dict[str, Any]]:
        """See `Answer`."""
        kept, text = self.choices[choice], chunk.text
        if self.echo and not kept["text"]:
            prompt = kept["prompt"]
            text = (self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text) + text
        kept["text"].append(text)
        kept["finish_reason"] = chunk.finish_reason
        kept["cumulative_logprob"] = chunk.cumulative_logprob
        scores = None
        if self.logprobs is not None:
            entries = [*(chunk.prompt_logprobs or []), *(chunk.logprobs or [])]
            tokens = [*kept["prompt"].token_ids, *chunk.token_ids] if chunk.prompt_logprobs else chunk.token_ids
            scores = kept["scores"].add(tokens, entries)
            for name, column in scores.items():
                kept["logprobs"][name] += column
        if not text and chunk.finish_reason is None and not (scores and scores["tokens"]):
            return []
        return [self._event(index=choice, text=text, logprobs=scores, finish_reason=chunk.finish_reason)]

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See `Answer`."""
        choices = [
            {
                "index": i,
                "text": "".join(kept["text"]),
                "logprobs": None if self.logprobs is None else kept["logprobs"],
                "finish_reason": kept["finish_reason"],
            }
            for i, kept in enumerate(self._best())
        ]
        return self._envelope("text_completion", choices=choices, usage=usage)

    def _best(self) -> list[dict[str, Any]]:
        """Returns the choices that the client gets."""
        size = self._num_completions
        groups = [self.choices[start : start + size] for start in range(0, len(self.choices), size)]
        return [
            choice for group in groups for choice in most_probable(group, self.n, lambda c: c["cumulative_logprob"])
        ]
