"""Beam search as a client of the engine: every running beam is a steered request.

After each step the engine tells what could come next in each beam. The first continuation of a beam is its request,
extended; further ones are forks of it, which share all its full pages and copy the one that they write; a beam that
none of the best continues is aborted. All of that is in time for the next step, in which every beam computes one token.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.admission import make_requests
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import CompletionOutput, RequestOutput
from jaxinfer.engine.request import FinishReason
from jaxinfer.sampling.beam import Beam, BeamSearch, BeamSearchParams
from jaxinfer.sampling.params import MAX_LOGPROBS, SamplingParams

Progress = Callable[[int, int], None]


def run_beam_search(
    engine: Engine, step: Callable[[], Any], prefix: str, prompts: Sequence[str | Sequence[int]],
    params: Sequence[BeamSearchParams], cache_salts: Sequence[str | None], progress: Progress | None = None,
) -> list[RequestOutput]:  # fmt: skip
    """Returns the best continuations of each prompt; all prompts run at once, as far as slots and pages allow.

    Args:
        engine: other requests may run in it.
        step: runs the engine once.
        prefix: of the ids of the requests.
        prompts: text or token ids.
        params: one a prompt.
        cache_salts: one a prompt.
        progress: called with the number of finished prompts and of all.

    Raises:
        ValueError: a prompt or parameter does not fit the model or the engine; then nothing has run.
    """
    given = zip(prompts, params, cache_salts, strict=True)
    searches = [_PromptSearch(engine, f"{prefix}-{i}", *one) for i, one in enumerate(given)]
    waiting, running = list(searches), []
    try:
        while waiting or running:
            while waiting and _fit(engine, [*running, waiting[0]]):
                running.append(waiting.pop(0))
                running[-1].start()
            step()
            for search in running:
                search.advance()
            running = [search for search in running if search.is_running]
            if progress:
                progress(len(searches) - len(waiting) - len(running), len(searches))
    finally:  # an error or Ctrl-C: nothing is left behind in the engine
        for search in running:
            search.end()
    return [search.output() for search in searches]


class _PromptSearch:
    """The search of one prompt, and its requests in the engine."""

    def __init__(
        self, engine: Engine, prefix: str, prompt: str | Sequence[int], params: BeamSearchParams, cache_salt: str | None
    ):
        self.params = params
        self._engine = engine
        self._prefix = prefix
        sampling = SamplingParams(
            temperature=0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids, logprobs=MAX_LOGPROBS,
        )  # fmt: skip
        [self._request] = make_requests(  # checks everything, and makes token ids of the prompt
            engine.model, prefix, prompt, sampling, 0, cache_salt, engine.max_model_len, np.random.default_rng(0)
        )
        self._search = BeamSearch(params, self._request.max_tokens, self._request.stop_token_ids)
        self._metrics = self._request.metrics
        self._ids: list[str] = []  # of the requests of the running beams
        self._num_requests = 0
        self._check_limits()

    @property
    def is_running(self) -> bool:
        """Whether it has requests in the engine."""
        return bool(self._ids)

    @property
    def num_pages(self) -> int:
        """Pages that it may need: those of the prompt once, those of the rest for each beam."""
        pages_for, request = self._engine.scheduler.pool.pages_for, self._request
        own = pages_for(request.max_tokens) + 1  # which begin in the middle of a page
        return pages_for(request.num_prompt_tokens) + self.params.beam_width * own

    def start(self) -> None:
        """Queues the prompt."""
        request = self._request
        self._ids = [self._new_id()]
        self._engine.add_request(
            self._ids[0], request.prompt_token_ids, request.params, cache_salt=request.cache_salt, is_steered=True
        )

    def advance(self) -> None:
        """Goes on by one token if the candidates of all beams are there."""
        engine, search = self._engine, self._search
        candidates = [found for i in self._ids if (found := engine.candidates(i))]
        if len(candidates) < len(self._ids):
            return
        search.advance(candidates)
        if search.is_done:
            self.end()
            return
        children: dict[int, list[Beam]] = {}  # by parent
        for beam in search.running:
            children.setdefault(beam.parent, []).append(beam)
        ids: dict[int, str] = {}  # by the identity of the beam
        for i, parent in enumerate(self._ids):
            if i not in children:
                self._abort(parent)
                continue
            heir, *others = children[i]
            for other in others:  # before their source goes on
                ids[id(other)] = self._new_id()
                engine.fork(parent, ids[id(other)], token=other.token_ids[-1])
            ids[id(heir)] = parent
            engine.extend(parent, heir.token_ids[-1])
        self._ids = [ids[id(beam)] for beam in search.running]

    def end(self) -> None:
        """Takes the requests out of the engine."""
        for request_id in self._ids:
            self._abort(request_id)
        self._ids = []
        self._metrics.finished = time.monotonic()

    def output(self) -> RequestOutput:
        """Returns the best continuations that have ended, as far as there are `n` of them."""
        request = self._request
        wanted = self._search.finished[: self.params.n or self.params.beam_width]
        completions = [self._completion(i, beam) for i, beam in enumerate(wanted)]
        return RequestOutput(
            self._prefix, request.prompt, list(request.prompt_token_ids), None, completions, self._metrics
        )

    def _completion(self, index: int, beam: Beam) -> CompletionOutput:
        tokenizer = self._engine.model.tokenizer
        text = tokenizer.decode(beam.token_ids, skip_special_tokens=self.params.skip_special_tokens, continuation=True)
        last = beam.token_ids[-1]
        stopped = last in self._request.stop_token_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return CompletionOutput(index, text, beam.token_ids, None, reason, last if stopped else None, beam.logprob)

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"{self._prefix}-{self._num_requests}"

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        output = self._engine.pop_output(request_id)
        if request_id.endswith("-1"):
            self._metrics = output.metrics  # of the request that has computed the prompt

    def _check_limits(self) -> None:
        params, request, config = self.params, self._request, self._engine.config
        if self._search.num_candidates > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width and the number of tokens that end a continuation must be at most {MAX_LOGPROBS} together, "
                f"got {params.beam_width} and {len(request.stop_token_ids)}"
            )
        if not _fit(self._engine, [self]):
            raise ValueError(
                f"beam_width={params.beam_width} with {request.num_prompt_tokens} prompt tokens and "
                f"max_tokens={request.max_tokens} takes {params.beam_width} slots and up to {self.num_pages} pages, "
                f"the engine has {config.max_num_seqs} and {self._engine.scheduler.pool.num_pages - 1}; lower "
                "beam_width or max_tokens, or raise max_num_seqs or num_pages"
            )


def _fit(engine: Engine, searches: Sequence[_PromptSearch]) -> bool:
    """Whether so many searches can run at once: their requests wait for each other, so all must get what they need."""
    slots, pages = (sum(values) for values in zip(*((s.params.beam_width, s.num_pages) for s in searches)))
    return slots <= engine.config.max_num_seqs and pages < engine.scheduler.pool.num_pages
