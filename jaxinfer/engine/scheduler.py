"""Decides what every step computes. Touches only integers; imports no jax.

There is no prefill or decode phase: a request has `num_computed_tokens` and its tokens, and a step lets the
former catch up with the latter, within a budget of tokens (continuous batching, Orca, OSDI 2022; chunked
prefill, Sarathi-Serve, OSDI 2024). Requests that are one token behind come first, so that a long prompt never
holds up those that are generating.
"""

import bisect
import dataclasses
import time
from collections.abc import Sequence

from jaxinfer.config import EngineConfig
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import FinishReason, Request, Status

# One level of priority is worth so many places in the queue: later arrivals pass, but not for ever.
PRIORITY_HEAD_START = 256


@dataclasses.dataclass(frozen=True)
class ScheduledRow:
    """One request's part of a step: tokens [start, start + num_tokens), then up to `num_samples` new ones."""

    request: Request
    start: int
    num_tokens: int
    num_samples: int  # 0 for a chunk that does not reach the request's last token

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are to be computed from this row."""
        params, end = self.request.params, self.request.num_prompt_tokens - 1
        return params.prompt_logprobs is not None and self.start < end


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """What one dispatch computes; rows with a single token come first."""

    rows: list[ScheduledRow]
    num_decode_rows: int
    admitted: list[Request]  # requests that got a slot in this step

    @property
    def num_tokens(self) -> int:
        """Tokens that the (first) step computes."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token from which the next is sampled."""
        return all(row.num_tokens == 1 and row.num_samples and not row.wants_prompt_logprobs for row in self.rows)


class Scheduler:
    """Waiting and running requests, the page pool and the device slots."""

    def __init__(self, config: EngineConfig, pool: PagePool):
        """Makes an empty scheduler over `pool`."""
        self.config = config
        self.pool = pool
        self.waiting: list[Request] = []  # both sorted by sort_key
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Puts a request into the waiting queue."""
        weight = request.priority * PRIORITY_HEAD_START if self.config.policy == "priority" else 0
        request.sort_key = (self._arrivals + weight, self._arrivals)
        self._arrivals += 1
        _insert(self.waiting, request)

    def schedule(self) -> ScheduledStep:
        """Returns the next step, empty when no request can go on now.

        Pages are allocated, requests admitted and, when pages run out, the youngest running request preempted:
        it loses its pages and is computed again later.
        """
        num_steps = self._num_decode_steps()
        decode_rows = self._schedule_decodes(num_steps)
        budget = self.config.max_num_batched_tokens - len(decode_rows)
        chunks: list[ScheduledRow] = []
        for request in self.running:
            if request.num_tokens_to_compute > 1 and budget > 0:
                chunks.append(self._schedule_chunk(request, budget))
                budget -= chunks[-1].num_tokens
        admitted = []
        while budget > 0 and (request := self._admit()):
            admitted.append(request)
            chunks.append(self._schedule_chunk(request, budget))
            budget -= chunks[-1].num_tokens
        singles = [row for row in chunks if row.num_tokens == 1]
        rows = decode_rows + singles + [row for row in chunks if row.num_tokens > 1]
        return ScheduledStep(rows, len(decode_rows) + len(singles), admitted)

    def update(self, step: ScheduledStep, sampled: Sequence[Sequence[int]]) -> list[Request]:
        """Appends the sampled tokens of a finished step and returns the requests that got tokens or ended.

        Tokens after a stop token are dropped, as are those of requests that ended while the step ran.
        """
        changed = []
        for row, tokens in zip(step.rows, sampled, strict=True):
            request = row.request
            if request.is_finished or not row.num_samples:
                continue
            request.num_in_flight -= row.num_samples
            now = time.monotonic()
            request.metrics.first_token = request.metrics.first_token or now
            for token in tokens[: row.num_samples]:
                if token < 0:  # the request's own constraints forbid every token
                    self.finish(request, FinishReason.STOP)
                    break
                request.output_token_ids.append(token)
                if token in request.stop_token_ids:
                    request.stop_reason = token
                    self.finish(request, FinishReason.STOP)
                elif len(request.output_token_ids) >= request.max_tokens:
                    self.finish(request, FinishReason.LENGTH)
                if request.is_finished:
                    break
            changed.append(request)
        return changed

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request at once, wherever it is, and frees what it holds.

        Its pages may be reused by the next step although an enqueued one still writes there: the device runs
        steps in order.
        """
        if request.is_finished:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.metrics.finished = time.monotonic()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def check_integrity(self) -> None:
        """Checks that pages and slots are owned exactly once and that counters fit together.

        Raises:
            RuntimeError: they do not.
        """
        self.pool.check_integrity([page for request in self.running for page in request.pages])
        slots = sorted([*self._free_slots, *(request.slot for request in self.running if request.slot is not None)])
        if slots != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"slots are inconsistent: {slots}")
        for queue, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            if [r.sort_key for r in queue] != sorted(r.sort_key for r in queue):
                raise RuntimeError("a queue is out of order")
            for request in queue:
                if request.status is not status:
                    raise RuntimeError(f"{request.request_id} has status {request.status} in the queue of {status}")
                if request.num_in_flight < 0:
                    raise RuntimeError(f"{request.request_id}: {request.num_in_flight} tokens are in flight")
        for request in self.running:
            held = len(request.pages) * self.pool.page_size
            if not request.num_computed_tokens <= min(request.num_tokens, held):
                raise RuntimeError(
                    f"{request.request_id}: {request.num_computed_tokens} tokens computed, room for {held}"
                )
        for request in self.waiting:
            if request.pages or request.slot is not None or request.num_computed_tokens:
                raise RuntimeError(f"{request.request_id} waits and holds pages, a slot or computed tokens")

    def _num_decode_steps(self) -> int:
        """Several steps in one dispatch when nobody waits, all rows decode and the pages suffice."""
        config, running = self.config, self.running
        if self.waiting or not running or any(r.num_tokens_to_compute > 1 or r.needs_host_mask for r in running):
            return 1
        steps = max(1, min(config.decode_steps, max(r.num_tokens_to_sample for r in running)))
        return steps if sum(self._missing_pages(r, steps) for r in running) <= self.pool.num_free else 1

    def _missing_pages(self, request: Request, num_steps: int) -> int:
        ahead = max(1, min(num_steps, request.num_tokens_to_sample))
        return self.pool.pages_for(request.num_computed_tokens + ahead) - len(request.pages)

    def _schedule_decodes(self, num_steps: int) -> list[ScheduledRow]:
        rows = []
        for request in list(self.running):
            if request.status is not Status.RUNNING or request.num_tokens_to_compute != 1:
                continue
            if request.num_tokens_to_sample < 1 or (request.needs_host_mask and request.num_in_flight):
                continue  # its last tokens are on their way, or the host must see them first
            if self._grow(request, num_steps):
                num_samples = min(num_steps, request.num_tokens_to_sample)
                rows.append(ScheduledRow(request, request.num_computed_tokens, 1, num_samples))
                request.num_computed_tokens += num_samples
                request.num_in_flight += num_samples
        return rows

    def _grow(self, request: Request, num_steps: int) -> bool:
        """Gives a decoding request the pages it needs; preempts from the back of the queue, itself last."""
        while (pages := self.pool.allocate(max(0, self._missing_pages(request, num_steps)))) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += pages
        return True

    def _schedule_chunk(self, request: Request, budget: int) -> ScheduledRow:
        start = request.num_computed_tokens
        num_tokens = min(request.num_tokens_to_compute, budget)
        request.num_computed_tokens += num_tokens
        num_samples = int(request.num_tokens_to_compute == 0)
        request.num_in_flight += num_samples
        return ScheduledRow(request, start, num_tokens, num_samples)

    def _admit(self) -> Request | None:
        """Starts the first waiting request if a slot is free and all its tokens fit; nobody overtakes it."""
        if not self.waiting or not self._free_slots or self.waiting[0].num_in_flight:
            return None
        request = self.waiting[0]
        pages = self.pool.allocate(self.pool.pages_for(request.num_tokens))
        if pages is None:
            return None
        self.waiting.pop(0)
        request.pages = pages
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.metrics.first_scheduled = request.metrics.first_scheduled or time.monotonic()
        _insert(self.running, request)
        return request

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        _insert(self.waiting, request)

    def _release(self, request: Request) -> None:
        self.pool.free(request.pages)
        request.pages = []
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None


def _insert(queue: list[Request], request: Request) -> None:
    bisect.insort(queue, request, key=lambda r: r.sort_key)
