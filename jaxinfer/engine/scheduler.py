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
from jaxinfer.engine.host_tier import HostTier
from jaxinfer.engine.page_moves import Load, PageMoves, Save
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.request import FinishReason, Request, Status
from jaxinfer.engine.swap_cost import SwapCost

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
    """What one dispatch computes; rows with a single token come first.

    Before it, pages are saved, then loaded, then copied.
    """

    rows: list[ScheduledRow]
    num_decode_rows: int
    admitted: list[Request]  # requests that got a slot in this step
    copies: list[tuple[int, int]]  # pages to copy before it, (source, destination); no destination is a source
    loads: list[Load] = dataclasses.field(default_factory=list)  # pages that come from the host tier
    saves: list[Save] = dataclasses.field(default_factory=list)  # pages that go there

    @property
    def num_tokens(self) -> int:
        """Tokens that the (first) step computes."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def takes_best(self) -> bool:
        """Whether no row needs the sampler."""
        return all(row.request.takes_best for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token from which the next is sampled."""
        return all(row.num_tokens == 1 and row.num_samples and not row.wants_prompt_logprobs for row in self.rows)


class Scheduler:
    """Waiting and running requests, the page pool and the device slots."""

    def __init__(
        self, config: EngineConfig, pool: PagePool, tier: HostTier | None = None, cost: SwapCost | None = None,
        namespace: bytes = b"",
    ):  # fmt: skip
        """Makes an empty scheduler over `pool`.

        Args:
            config: limits and policies.
            pool: the pages on the device.
            tier: where pages go that the pool evicts; None loses them.
            cost: decides how preempted requests get their pages back, with `preemption="auto"`.
            namespace: see `PrefixCache`.
        """
        self.config = config
        self.pool = pool
        self.tier = tier
        self.cost = cost or SwapCost()
        self.waiting: list[Request] = []  # both sorted by sort_key
        self.running: list[Request] = []
        self.forks: list[Request] = []  # join the waiting ones when their source has computed what they share
        self.prefix_cache = PrefixCache(pool, tier, namespace) if config.prefix_cache else None
        self._moves = None
        if tier is not None and self.prefix_cache:
            self._moves = PageMoves(tier, pool, self.prefix_cache, config.preemption, self.cost)
        self._has_open_pages = config.kv_spec("float32").open is not None
        self.num_preemptions = 0
        self.num_page_copies = 0
        self.num_prefill_tokens = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Puts a request into the waiting queue; a fork may have to wait for its source first."""
        weight = request.priority * PRIORITY_HEAD_START if self.config.policy == "priority" else 0
        request.sort_key = (self._arrivals + weight, self._arrivals)
        self._arrivals += 1
        if request.source is None:
            _insert(self.waiting, request)
            if self.prefix_cache:
                self.prefix_cache.read_ahead(request)
        else:
            self.forks.append(request)

    def schedule(self) -> ScheduledStep:
        """Returns the next step, empty when no request can go on now.

        Pages are allocated, requests admitted and, when pages run out, the youngest running request preempted:
        it loses its pages and is computed again later.
        """
        self._queue_forks()
        num_steps = self._num_decode_steps()
        decode_rows = self._schedule_decodes(num_steps)
        budget = self.config.max_num_batched_tokens - len(decode_rows)
        chunks: list[ScheduledRow] = []
        loading = [request for request in self.running if request.num_pages_to_load]
        loads = self._moves.loads(loading) if self._moves else []
        for request in self.running:
            if request.num_pages_to_load or not budget:
                continue
            if request.num_tokens_to_compute > 1 or request in loading:
                chunks.append(self._schedule_chunk(request, budget))
                budget -= chunks[-1].num_tokens
        admitted, copies = [], []
        while budget > 0 and (request := self._admit(chunks, copies)):
            admitted.append(request)
            if self._moves and request.num_pages_to_load:
                loads += self._moves.loads(self.running)
                if request.num_pages_to_load:
                    continue  # they are on their way
            chunks.append(self._schedule_chunk(request, budget))
            budget -= chunks[-1].num_tokens
        singles = [row for row in chunks if row.num_tokens == 1]
        rows = decode_rows + singles + [row for row in chunks if row.num_tokens > 1]
        self.num_prefill_tokens += sum(row.num_tokens for row in chunks)
        self.num_page_copies += len(copies)
        evicted = self.pool.take_evicted()
        saves = self._moves.saves(evicted) if self._moves else []
        return ScheduledStep(rows, len(decode_rows) + len(singles), admitted, copies, loads, saves)

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
            reason = _append(request, tokens[: row.num_samples])
            if self.prefix_cache and request.status is Status.RUNNING:
                self.prefix_cache.publish(request, request.num_known_tokens - 1)  # the last is not always written
            if reason:
                self.finish(request, reason)
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
            (self.waiting if request in self.waiting else self.forks).remove(request)
        request.source = None
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.metrics.finished = time.monotonic()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running or self.forks)

    @property
    def is_loading(self) -> bool:
        """Whether any request waits for its pages to come from the host tier."""
        return any(request.num_pages_to_load for request in self.running)

    @property
    def num_unused_places(self) -> int:
        """Places in the pages of running requests for which they have no token: only a last page has them."""
        return sum(len(r.pages) * self.pool.page_size - r.num_tokens for r in self.running)

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
            if request.num_published_pages * self.pool.page_size > request.num_computed_tokens:
                raise RuntimeError(
                    f"{request.request_id}: {request.num_published_pages} pages published, "
                    f"{request.num_computed_tokens} tokens computed"
                )
            if request.num_pages_to_load and request.num_published_pages * self.pool.page_size != (
                request.num_computed_tokens
            ):
                raise RuntimeError(f"{request.request_id} waits for pages and has computed beyond them")
            held = len(request.pages) * self.pool.page_size
            if not request.num_computed_tokens <= min(request.num_tokens, held):
                raise RuntimeError(
                    f"{request.request_id}: {request.num_computed_tokens} tokens computed, room for {held}"
                )
        for request in self.waiting + self.forks:
            held = request.num_computed_tokens, request.num_published_pages, request.num_pages_to_load
            if request.pages or request.slot is not None or any(held):
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
        if self.prefix_cache:
            self.prefix_cache.publish(request, request.num_computed_tokens)
        num_samples = int(request.num_tokens_to_compute == 0)
        request.num_in_flight += num_samples
        return ScheduledRow(request, start, num_tokens, num_samples)

    def _admit(self, chunks: Sequence[ScheduledRow], copies: list[tuple[int, int]]) -> Request | None:
        """Starts the first waiting request if a slot is free and all its tokens fit; nobody overtakes it."""
        if not self.waiting or not self._free_slots or self.waiting[0].num_in_flight:
            return None
        request = self.waiting[0]
        if any(row.request is request.source for row in chunks):
            return None  # what it shares is there after this step, and pages are copied before it
        forked = self._is_forkable(request)
        shared, partial = self._fork_pages(request) if forked else (self._cached_pages(request), [])
        num_shared = len(shared)
        pages = self.pool.allocate(self.pool.pages_for(request.num_tokens) - num_shared, shared)
        if pages is None:
            return None
        self.waiting.pop(0)
        copies += zip(partial, pages[num_shared:])
        request.pages = pages
        request.num_published_pages = num_shared
        request.num_computed_tokens = request.num_tokens - 1 if partial else num_shared * self.pool.page_size
        if self.prefix_cache and not forked:
            self.prefix_cache.count(request, request.num_computed_tokens)
            request.num_pages_to_load = self._moves.num_to_load(request) if self._moves else 0
        if not request.metrics.num_preemptions:
            request.metrics.num_cached_tokens = request.num_computed_tokens
        request.source = None
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.metrics.first_scheduled = request.metrics.first_scheduled or time.monotonic()
        _insert(self.running, request)
        return request

    def _queue_forks(self) -> None:
        """Queues the forks that need not wait for their source: it has computed what they share, or has ended."""
        if ready := [r for r in self.forks if self._is_forkable(r) or (r.source and r.source.is_finished)]:
            self.forks = [request for request in self.forks if request not in ready]
            for request in ready:
                _insert(self.waiting, request)

    def _is_forkable(self, request: Request) -> bool:
        source = request.source
        return (
            source is not None
            and source.status is Status.RUNNING
            and source.num_computed_tokens >= request.num_tokens - 1
        )

    def _fork_pages(self, request: Request) -> tuple[list[int], list[int]]:
        """Returns the source's pages that hold all tokens but the last: full ones, and the one that it goes on in.

        An open page is its owner's, who goes on writing it: what is in it the fork computes again.
        """
        source, (num_full, rest) = request.source, divmod(request.num_tokens - 1, self.pool.page_size)
        assert source is not None
        request.page_keys = source.page_keys[:num_full]
        return source.pages[:num_full], source.pages[num_full : num_full + (rest > 0 and not self._has_open_pages)]

    def _cached_pages(self, request: Request) -> list[int]:
        return self.prefix_cache.match(request) if self.prefix_cache else []

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
        request.num_published_pages = request.num_pages_to_load = 0
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None


def _append(request: Request, tokens: Sequence[int]) -> FinishReason | None:
    """Appends sampled tokens up to one that ends the request; returns why it ends."""
    for token in tokens:
        if token < 0:  # the request's own constraints forbid every token
            return FinishReason.STOP
        request.output_token_ids.append(token)
        if token in request.stop_token_ids:
            request.stop_reason = token
            return FinishReason.STOP
        if len(request.output_token_ids) >= request.max_tokens:
            return FinishReason.LENGTH
    return None


def _insert(queue: list[Request], request: Request) -> None:
    bisect.insort(queue, request, key=lambda r: r.sort_key)
