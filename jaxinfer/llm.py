"""LLM: the offline interface, prompts in and outputs out."""

import itertools
import numbers
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from jaxinfer.beam_search import run_beam_search
from jaxinfer.compile_cache import default_program_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import CompletionChunk, RequestOutput
from jaxinfer.engine.stats import EngineStats
from jaxinfer.interrupts import interrupts_deferred
from jaxinfer.loading import Model, load
from jaxinfer.sampling.beam import BeamSearchParams
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Progress = Callable[[int, int], None]


class LLM:
    """A model and its engine.

    Example:
        >>> llm = LLM("smollm2-135m")
        >>> [output] = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
        >>> output.outputs[0].text
    """

    def __init__(
        self, model: str | Path | Model, *, dtype: str | None = None, quantize: str | None = None,
        activations: str | None = None, compile_cache: bool = True, progress: Progress | None = None,
        **engine_options: Any,
    ):  # fmt: skip
        """Loads the model and allocates the KV cache; steps are compiled when they first occur, or by `warmup`.

        Args:
            model: what `load` accepts, or a loaded model.
            dtype: see `load`; this and the next two only for a model that is yet to be loaded.
            quantize: see `load`.
            activations: see `load`.
            compile_cache: keep compiled steps on disk, so that the next start need not compile them.
            progress: called with bytes done and in all during a download.
            **engine_options: fields of `EngineConfig`.

        Raises:
            ValueError: an option is unknown or out of range, or see `load` and `Engine`.
        """
        config = _engine_config(engine_options)
        if isinstance(model, Model):
            if (dtype, quantize, activations) != (None, None, None):
                raise ValueError("dtype, quantize and activations go to load() when the model is already loaded")
        else:
            model = load(model, dtype=dtype, quantize=quantize, activations=activations, progress=progress)
        self.model = model
        self.engine = Engine(model, config, programs=default_program_cache() if compile_cache else None)
        self._ids = itertools.count()
        self._inboxes: dict[str, list[CompletionChunk]] = {}  # of open streams: another call may run their steps
        self._streams: weakref.WeakKeyDictionary[Generator, str] = weakref.WeakKeyDictionary()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    def warmup(self, progress: Progress | None = None) -> None:
        """Compiles every step shape now; `progress(done, total)`."""
        self.engine.warmup(progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Returns the outputs of the prompts, in their order; all run at once, as far as the engine's limits allow.

        Args:
            prompts: one prompt or several, each text or token ids.
            sampling_params: for all prompts or one each; None takes the model's defaults.
            priority: one a prompt, lower first; needs `policy="priority"`.
            cache_salt: for all prompts or one each; only prompts of the same salt share cached prefixes.
            progress: called with the number of finished prompts and of all.

        Raises:
            ValueError: a prompt or parameter is not valid; then none of the prompts has run.
        """
        several: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = _per_prompt("sampling_params", sampling_params, len(several))
        if priority is not None and self.engine.config.policy != "priority":
            raise ValueError('priority needs LLM(..., policy="priority")')
        priorities = [0] * len(several) if priority is None else _per_prompt("priority", priority, len(several))
        salts = _per_prompt("cache_salt", cache_salt, len(several))
        ids = [f"llm-{next(self._ids)}" for _ in several]
        open_ids: set[str] = set()
        try:
            for request_id, prompt, param, level, salt in zip(ids, several, params, priorities, salts):
                self.engine.add_request(request_id, prompt, param, priority=level, cache_salt=salt)
                open_ids.add(request_id)
            outputs: dict[str, RequestOutput] = {}
            while open_ids:
                for request_id in self._finished(self._step(), open_ids):
                    outputs[request_id] = self.engine.pop_output(request_id)
                    open_ids.remove(request_id)
                    if progress:
                        progress(len(outputs), len(ids))
        finally:  # an error or Ctrl-C: nothing is left behind in the engine
            self._discard(open_ids)
        return [outputs[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Returns the answers to one conversation or several, rendered by the model's chat template.

        Args:
            messages: {"role": ..., "content": ...} entries, oldest first; or a list of such conversations.
            sampling_params: as for `generate`.
            tools: JSON schemas of functions, for templates that know them.
            cache_salt: as for `generate`.
            **template_options: further variables of the template.

        Raises:
            ValueError: the model has no chat template, or a message is malformed.
        """
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.apply_chat_template(one, tools=tools, **template_options) for one in conversations]
        return self.generate(prompts, sampling_params, cache_salt=cache_salt)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Returns the most probable continuations of the prompts that a beam search finds, the best first.

        The `cumulative_logprob` of a continuation is the sum that its score is made of.

        Args:
            prompts: one prompt or several, each text or token ids.
            params: for all prompts or one each.
            cache_salt: as for `generate`.
            progress: called with the number of finished prompts and of all.

        Raises:
            ValueError: a prompt or parameter is not valid; then none of the prompts has run.
        """
        several: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        each, salts = (
            _per_prompt(name, value, len(several)) for name, value in (("params", params), ("cache_salt", cache_salt))
        )
        prefix = f"llm-{next(self._ids)}"
        return run_beam_search(self.engine, self._step, prefix, several, each, salts, progress)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None,
        *, cache_salt: str | None = None,
    ) -> Generator[CompletionChunk]:  # fmt: skip
        """Yields the output of one prompt, or of one conversation, piece by piece.

        The texts of the chunks joined are the text that `generate` returns. Closing the iterator, or breaking out
        of its loop, aborts the request.

        Raises:
            ValueError: the prompt or a parameter is not valid, or `best_of` leaves out completions, which only shows
                when all have ended.
        """
        if sampling_params is not None and sampling_params.num_completions > sampling_params.n:
            raise ValueError("best_of cannot be streamed: the best completions are known when all have ended")
        text: Any = self.tokenizer.apply_chat_template(prompt) if _is_conversation(prompt) else prompt
        request_id = f"llm-{next(self._ids)}"
        self.engine.add_request(request_id, text, sampling_params, cache_salt=cache_salt)
        return self._open(request_id)

    def fork(
        self, stream: Generator[CompletionChunk], sampling_params: SamplingParams | None = None
    ) -> Generator[CompletionChunk]:
        """Returns another stream that goes on from where an open stream of `stream` or `fork` is.

        It shares the memory of everything up to there and computes none of it again. Its first chunk begins with the
        text so far, which `max_tokens` counts.

        Args:
            stream: a stream that has not ended.
            sampling_params: None takes those of `stream` with another seed.

        Raises:
            ValueError: the stream has ended, or a parameter is not valid.
        """
        if stream not in self._streams:
            raise ValueError("only a stream of this LLM that has not ended can be forked")
        request_id = f"llm-{next(self._ids)}"
        self.engine.fork(self._streams[stream], request_id, sampling_params)
        return self._open(request_id)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, as before a measurement."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Lets the disk tier keep what is cached (`disk_cache_dir`); nothing may run any more, nor be asked for."""
        self.engine.close()

    def stats(self) -> EngineStats:
        """Returns counters of queues, pages and compilation."""
        return self.engine.stats()

    def _open(self, request_id: str) -> Generator[CompletionChunk]:
        self._inboxes[request_id] = []
        stream: Any = self._stream(request_id)
        next(stream)  # started: dropping the iterator unread aborts the request as well
        self._streams[stream] = request_id
        return stream

    def _stream(self, request_id: str) -> Generator[CompletionChunk | None]:
        try:
            yield None
            while not self.engine.is_finished(request_id) or self._inboxes[request_id]:
                if not self._inboxes[request_id]:
                    self._step()
                chunks, self._inboxes[request_id] = self._inboxes[request_id], []
                yield from chunks
        finally:
            for stream in [stream for stream, id_ in self._streams.items() if id_ == request_id]:
                del self._streams[stream]
            del self._inboxes[request_id]
            self._discard({request_id})

    def _step(self) -> list[CompletionChunk]:
        with interrupts_deferred():
            chunks = self.engine.step()
            for chunk in chunks:
                if chunk.request_id in self._inboxes:
                    self._inboxes[chunk.request_id].append(chunk)
        return chunks

    def _finished(self, chunks: Sequence[CompletionChunk], open_ids: set[str]) -> list[str]:
        candidates = dict.fromkeys(chunk.request_id for chunk in chunks if chunk.finish_reason is not None)
        return [i for i in candidates if i in open_ids and self.engine.is_finished(i)]

    def _discard(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
            self.engine.pop_output(request_id)


def _engine_config(options: Mapping[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"unknown option {', '.join(unknown)}; LLM takes {', '.join(known)}")
    return EngineConfig(**options)


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral))


def _is_conversation(prompt: Any) -> TypeGuard[Sequence[Message]]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} must be one for all or one for each of the {count} prompts, got {len(value)}")
    return list(value)
