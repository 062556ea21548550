"""The engine: requests in, chunks out, one `step` at a time."""

import dataclasses
import secrets
import time
from collections.abc import Sequence as Ints

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.compile_cache import ProgramCache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.admission import fork_requests, make_requests
from jaxinfer.engine.disk_tier import HEADER_BYTES, DiskTier
from jaxinfer.engine.fingerprint import fingerprint
from jaxinfer.engine.host_tier import MAX_WRITES, HostTier, TierStats
from jaxinfer.engine.memory import free_memory, plan_pages
from jaxinfer.engine.outputs import CompletionChunk, RequestOutput
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.prefix_cache import PrefixStats
from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.engine.runner import CompileStats, ModelRunner, PendingStep, Progress, StepResult
from jaxinfer.engine.scheduler import ScheduledStep, Scheduler
from jaxinfer.engine.sequence import Sequence
from jaxinfer.engine.swap_cost import SwapCost
from jaxinfer.kv_spec import KVSpec
from jaxinfer.loading import Model
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.rows import takes_best


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine.

    Attributes:
        num_waiting: requests that have no slot yet.
        num_running: requests that have one.
        num_free_pages: KV pages that can be allocated.
        num_cached_pages: those of them that hold tokens which a new request may begin with.
        num_used_pages: pages that requests hold.
        num_shared_pages: those of them that several requests hold.
        kv_bytes_per_token: as allocated, all layers.
        kv_waste: share of the places in used pages for which their requests have no token.
        prefix_cache: what it was asked and has found.
        tiers: what pages are in host memory and on disk, and how many were moved.
        num_evictions: cached pages whose memory was needed.
        num_page_copies: pages copied for forks.
        num_prefill_tokens: tokens computed, but for those that were just sampled.
        num_preemptions: requests that lost their pages, counted each time.
        num_steps: dispatches.
        compile: what compilation has cost.
    """

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_used_pages: int
    num_shared_pages: int
    kv_bytes_per_token: float
    kv_waste: float
    prefix_cache: PrefixStats
    tiers: TierStats
    num_evictions: int
    num_page_copies: int
    num_prefill_tokens: int
    num_preemptions: int
    num_steps: int
    compile: CompileStats


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it (see `AsyncEngine`)."""

    def __init__(self, model: Model, config: EngineConfig | None = None, *, programs: ProgramCache | None = None):
        """Sizes the KV cache from the memory that is free and allocates it.

        Args:
            model: a loaded model.
            config: limits and options.
            programs: where compiled steps are kept for later processes; None keeps none.

        Raises:
            ValueError: the cache cannot hold one request of `max_model_len` tokens, a tier cannot hold one page, or the
                model lies on several devices.
        """
        self.model = model
        self.config = config = config or EngineConfig()
        devices = jax.tree.leaves(model.params)[0].devices()
        if len(devices) > 1:
            raise ValueError(
                f"the engine runs on one device so far, the model lies on {len(devices)}: load it without mesh, or use"
                " jaxinfer.generate, which works on any mesh"
            )
        [device] = devices
        kv = config.kv_spec(jnp.dtype(model.spec.dtype))
        num_pages, self.max_model_len = plan_pages(
            model.config, config, kv, free_memory(device), device.platform == "cpu"
        )
        self.runner = ModelRunner(
            dataclasses.replace(model.spec, implementation=config.attention_implementation),
            model.params, config, num_pages=num_pages, max_model_len=self.max_model_len,
            stop_token_ids=frozenset(model.tokenizer.eos_token_ids), programs=programs,
        )  # fmt: skip
        self.scheduler = self._make_scheduler(PagePool(num_pages, config.page_size), kv)
        self._seeds = np.random.default_rng(config.seed if config.seed is not None else secrets.randbits(64))
        self._groups: dict[str, list[Sequence]] = {}  # by the user's request id, one entry a completion
        self._sequences: dict[str, Sequence] = {}  # by the id of the engine's own request
        self._pending: PendingStep | None = None
        self._num_steps = 0
        self._last_read = 0.0

    def _make_scheduler(self, pool: PagePool, kv: KVSpec) -> Scheduler:
        """Returns a scheduler with the tiers that the configuration asks for."""
        config, transfer = self.config, self.runner.transfer
        if transfer is None:
            return Scheduler(config, pool)
        for name in ("host_cache_bytes", *(["disk_cache_bytes"] if config.disk_cache_dir is not None else [])):
            if (given := getattr(config, name)) < transfer.page_bytes + HEADER_BYTES:
                raise ValueError(
                    f"{name}={given} holds no page, which takes {transfer.page_bytes + HEADER_BYTES} bytes; raise it"
                )
        disk, namespace = None, b""
        if config.disk_cache_dir is not None:
            namespace = fingerprint(self.model, kv, config.page_size)
            disk = DiskTier(config.disk_cache_dir, config.disk_cache_bytes, namespace)
        tier = HostTier(config.host_cache_bytes // transfer.page_bytes, transfer, disk)
        return Scheduler(config, pool, tier, SwapCost(self.runner.measure_transfer()), namespace)

    def warmup(self, progress: Progress | None = None) -> None:
        """Compiles every step shape, so that none is compiled while requests run; `progress(done, total)`."""
        self.runner.warmup(progress)

    def prepare(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Compiles what a single such request needs, side by side instead of one after the other."""
        limit = self.config.max_num_batched_tokens
        chunks = {min(num_prompt_tokens, limit), num_prompt_tokens % limit or limit}
        buckets = self.runner.buckets
        ragged = {buckets.ragged(size, 1) for size in chunks if size > 1}
        shapes = [*ragged, buckets.decode(1)]
        self.runner.compile([dataclasses.replace(shape, takes_best=takes_best(params)) for shape in shapes])

    def add_request(
        self, request_id: str, prompt: str | Ints[int], params: SamplingParams | None = None, *, priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:  # fmt: skip
        """Queues a prompt, given as text or token ids; params.n completions of it are generated.

        Args:
            request_id: any string that no unfinished request has.
            prompt: text, to which the tokenizer adds BOS where the model wants it, or token ids taken as they are.
            params: None takes the model's own defaults (generation_config.json).
            priority: with the "priority" policy, lower goes first.
            cache_salt: keeps tenants apart: only requests of the same salt share cached prefixes, so that nobody can
                tell by the time to the first token what others have sent.

        Raises:
            ValueError: the prompt is empty, too long or holds an unknown token; a parameter does not fit the
                model; the id is in use.
        """
        self._check_unused(request_id)
        requests = make_requests(
            self.model, request_id, prompt, params or self.model.default_sampling_params, priority, cache_salt,
            self.max_model_len, self._seeds,
        )  # fmt: skip
        self._add(request_id, requests)

    def fork(self, request_id: str, new_id: str, params: SamplingParams | None = None, *, index: int = 0) -> None:
        """Starts a request that goes on from where another one is, sharing the pages of everything up to there.

        The fork has the prompt and the output so far as its own: its first chunk begins with that output, and
        `max_tokens` counts it.

        Args:
            request_id: a request that runs or waits.
            new_id: any string that no unfinished request has.
            params: of the fork, `n` of them; None takes those of its source with another seed.
            index: which of the source's completions.

        Raises:
            ValueError: there is no such request or completion, it has ended, or a parameter does not fit.
        """
        self._check_unused(new_id)
        group = self._groups.get(request_id, ())
        if not 0 <= index < len(group):
            raise ValueError(f"no completion {index} of a request {request_id!r} to fork")
        self._add(new_id, fork_requests(
            self.model, new_id, group[index].request, params, self.max_model_len, self._seeds
        ))  # fmt: skip

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes in all tiers; requests that run keep their pages."""
        self.scheduler.pool.forget()
        if self.scheduler.tier is not None:
            self.scheduler.tier.clear()

    def close(self) -> None:
        """Writes what is cached on the device and in host memory to the disk tier, if there is one.

        The engine must have no unfinished requests, and is of no use afterwards.
        """
        tier, pool = self.scheduler.tier, self.scheduler.pool
        if tier is None:
            return
        if self.config.disk_cache_dir is not None:
            pages = [(page, key) for page, key in pool.cached() if key not in tier]
            for start in range(0, len(pages), MAX_WRITES):
                self._save(pages[start : start + MAX_WRITES])
                tier.wait_for_writes()
            tier.flush()
        tier.close()

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._groups:
            raise ValueError(f"request id {request_id!r} is in use; choose another")

    def _add(self, request_id: str, requests: Ints[Request]) -> None:
        group = [Sequence(request_id, i, request, self.model.tokenizer) for i, request in enumerate(requests)]
        self._groups[request_id] = group
        for sequence in group:
            self._sequences[sequence.request.request_id] = sequence
            self.scheduler.add(sequence.request)

    def step(self) -> list[CompletionChunk]:
        """Runs the engine once and returns what was added to which completion.

        With asynchronous scheduling the step enqueued here is read in the next call, so that the device has
        work while the host handles the tokens of the step before.
        """
        scheduled = self.scheduler.schedule()
        self._move_pages(scheduled)
        for request in scheduled.admitted:
            self.runner.install(request)
        enqueued = None
        if scheduled.rows:
            enqueued = self.runner.dispatch(scheduled)
            self._num_steps += 1
        if self.config.async_scheduling:
            finished, self._pending = self._pending, enqueued
        else:
            finished = enqueued
        if finished is not None:
            return self._process(finished, self._read(finished))
        if enqueued is None and self.scheduler.is_loading:
            assert self.scheduler.tier is not None
            self.scheduler.tier.wait()
        elif enqueued is None and self.has_unfinished:
            raise RuntimeError(f"no request can go on: {self.stats()}")
        return []

    def abort(self, request_id: str) -> list[CompletionChunk]:
        """Ends a request now, wherever it is, and frees all it holds; unknown ids are ignored.

        Returns the last chunks of its completions, finish_reason "abort".
        """
        chunks = []
        for sequence in self._groups.get(request_id, ()):
            if not sequence.request.is_finished:
                self.scheduler.finish(sequence.request, FinishReason.ABORT)
                if chunk := sequence.advance():
                    chunks.append(chunk)
                del self._sequences[sequence.request.request_id]
        return chunks

    def is_finished(self, request_id: str) -> bool:
        """Returns whether all completions of a request have ended."""
        return all(sequence.request.is_finished for sequence in self._groups[request_id])

    def pop_output(self, request_id: str) -> RequestOutput:
        """Returns the whole output of a finished request and forgets it."""
        group = self._groups[request_id]
        if not self.is_finished(request_id):
            raise RuntimeError(f"request {request_id!r} has not finished")
        del self._groups[request_id]
        first = group[0].request
        return RequestOutput(
            request_id, first.prompt, list(first.prompt_token_ids),
            first.prompt_logprobs if first.params.prompt_logprobs is not None else None,
            [sequence.output() for sequence in group], first.metrics,
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: unfinished requests, or a step that has not been read."""
        return self.has_unfinished or self._pending is not None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished

    def stats(self) -> EngineStats:
        """Returns counters of queues, pages and compilation."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        prefix_stats = scheduler.prefix_cache.stats if scheduler.prefix_cache else PrefixStats()
        return EngineStats(
            num_waiting=len(scheduler.waiting) + len(scheduler.forks),
            num_running=len(scheduler.running),
            num_free_pages=pool.num_free,
            num_cached_pages=pool.num_cached,
            num_used_pages=pool.num_used,
            num_shared_pages=pool.num_shared,
            kv_bytes_per_token=self.runner.cache_bytes / (pool.num_pages * pool.page_size),
            kv_waste=scheduler.num_unused_places / max(1, pool.num_used * pool.page_size),
            prefix_cache=dataclasses.replace(prefix_stats),
            tiers=scheduler.tier.stats() if scheduler.tier is not None else TierStats(),
            num_evictions=pool.num_evictions,
            num_page_copies=scheduler.num_page_copies,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            compile=dataclasses.replace(self.runner.stats),
        )

    def _move_pages(self, scheduled: ScheduledStep) -> None:
        if scheduled.saves:
            self._save(scheduled.saves)
        if scheduled.loads:
            self.runner.load(scheduled.loads)

    def _save(self, saves: Ints[tuple[int, bytes]]) -> None:
        assert self.scheduler.tier is not None
        for (_, key), page in zip(saves, self.runner.save([page for page, _ in saves]), strict=True):
            self.scheduler.tier.put(key, page)

    def _read(self, step: PendingStep) -> StepResult:
        """Waits for a step and measures how fast prompts are computed, which `SwapCost` compares with moves."""
        result = self.runner.read(step)
        began, self._last_read = max(step.enqueued, self._last_read), time.monotonic()
        if self.scheduler.tier is not None and not step.scheduled.is_decode and self._last_read > began:
            self.scheduler.cost.record_step(step.scheduled.num_tokens, self._last_read - began)
        return result

    def _process(self, step: PendingStep, result: StepResult) -> list[CompletionChunk]:
        for i, row in enumerate(step.scheduled.rows):
            sequence = self._sequences.get(row.request.request_id)
            if sequence is None or sequence.request is not row.request:
                continue  # ended while the step ran; its id may be in use again
            if i in result.prompt_logprobs:
                sequence.add_prompt_logprobs(result.prompt_logprobs[i], row.start)
            if i in result.logprobs:
                sequence.add_logprobs(result.logprobs[i], [token for token in result.token_ids[i] if token >= 0])
        chunks = []
        for request in self.scheduler.update(step.scheduled, result.token_ids):
            sequence = self._sequences[request.request_id]
            chunk = sequence.advance()
            if sequence.stop_string is not None:
                self.scheduler.finish(request, FinishReason.STOP)
            if request.is_finished:
                del self._sequences[request.request_id]
            if chunk:
                chunks.append(chunk)
        return chunks
