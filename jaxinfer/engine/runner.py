"""ModelRunner: owns parameters and device state, enqueues steps and reads their results."""

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.compile_cache import ProgramCache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.batch import BatchShape, Buckets, build_batch
from jaxinfer.engine.memory import trim_heap
from jaxinfer.engine.page_moves import Load
from jaxinfer.engine.page_pool import NULL_PAGE
from jaxinfer.engine.page_transfer import Page, PageTransfer
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import ScheduledStep
from jaxinfer.engine.scoring import ScoredTokens, Scorer
from jaxinfer.engine.state import EngineState, StepOutput
from jaxinfer.model.params import Params
from jaxinfer.model.spec import DecoderSpec
from jaxinfer.sampling.rows import build_row, needs_row
from jaxinfer.sampling.state import install_row, to_device
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.pages import Pages

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # done, total


@dataclasses.dataclass
class CompileStats:
    """What compilation has cost so far."""

    num_compiled: int = 0
    num_loaded: int = 0  # found in the program cache instead
    num_after_warmup: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A step that the device has been given and the host has not read."""

    scheduled: ScheduledStep
    output: StepOutput
    enqueued: float = dataclasses.field(default_factory=time.monotonic)  # when


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A step's tokens on the host, with scores for the rows that want them."""

    token_ids: list[list[int]]  # per row; -1 where nothing was allowed to the row
    logprobs: dict[int, ScoredTokens]  # by row
    prompt_logprobs: dict[int, ScoredTokens]  # by row: of the prompt tokens that follow those of the step


class ModelRunner:
    """The device side of the engine: one jitted, donated step per batch shape."""

    def __init__(
        self, decoder: DecoderSpec, params: Params, config: EngineConfig, *, num_pages: int, max_model_len: int,
        stop_token_ids: frozenset[int], programs: ProgramCache | None = None,
    ):  # fmt: skip
        """Allocates the KV cache and the sampler state.

        Args:
            decoder: what makes the model; its modules are imported when a step has to be compiled.
            params: its parameters.
            config: limits.
            num_pages: pages of the cache, the null page included.
            max_model_len: longest request in tokens.
            stop_token_ids: the model's end-of-sequence tokens.
            programs: where compiled steps are kept; None keeps them in this process alone.
        """
        self.decoder = decoder
        self.params = params
        self.config = config
        self.buckets = Buckets.of(config, max_model_len, _min_decode_rows(decoder))
        self.stats = CompileStats()
        self._stop_token_ids = stop_token_ids
        self._dirty_slots: set[int] = set()
        self._compiled: dict[BatchShape, Any] = {}
        self._lock = threading.Lock()
        self._warm = False
        self._masks: dict[int, jax.Array] = {}
        self._scorer = Scorer(decoder, params)
        kv = config.kv_spec(jnp.dtype(decoder.dtype))
        self.state = EngineState.init(
            decoder, config.max_num_seqs, num_pages, config.page_size, kv, stop_token_ids, on_demand=True
        )
        self._programs = programs
        self._step: Any = None
        self._copy_pages = jax.jit(functools.partial(copy_pages, disjoint=True), donate_argnums=0)
        self.transfer = PageTransfer(self._pages) if config.host_cache_bytes else None

    def install(self, request: Request) -> None:
        """Gives a request's slot the sampler row that its parameters need; nothing to do for most requests."""
        assert request.slot is not None
        if not needs_row(request.params) and request.slot not in self._dirty_slots:
            return
        row = build_row(
            request.params, request.prompt_token_ids, request.output_token_ids, self._stop_token_ids,
            request.banned_token_ids, self.decoder.config.vocab_size,
        )  # fmt: skip
        sampler = install_row(self.state.sampler, np.int32(request.slot), *row)
        self.state = dataclasses.replace(self.state, sampler=sampler)
        self._dirty_slots.add(request.slot)
        if not needs_row(request.params):
            self._dirty_slots.remove(request.slot)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all KV pages of the pool, as allocated."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._pages))

    def save(self, pages: Sequence[int]) -> list[Page]:
        """Enqueues copies of pages to the host."""
        assert self.transfer is not None
        return self.transfer.save(self._pages, pages)

    def load(self, loads: Sequence[Load]) -> None:
        """Enqueues that pages from the host come into the pool."""
        assert self.transfer is not None
        self._pages = self.transfer.load(self._pages, *zip(*loads))

    def measure_transfer(self) -> float:
        """Compiles the moves of pages to and from the host and returns the bytes a second of the latter."""
        assert self.transfer is not None
        self._pages, rate = self.transfer.warmup(self._pages)
        return rate

    def dispatch(self, scheduled: ScheduledStep) -> PendingStep:
        """Enqueues a step, with the page copies that come before it, and returns at once."""
        if scheduled.copies:
            self._copy(scheduled.copies)
        shape = self._shape_for(scheduled)
        ints, floats = build_batch(scheduled, shape, self.config.page_size)
        step = self._compile(shape)
        mask = self._token_mask(scheduled, shape.num_rows)
        self.state, output = step(self.params, self.state, ints, floats, mask)
        return PendingStep(scheduled, output)

    def read(self, pending: PendingStep) -> StepResult:
        """Waits for a step and returns its tokens."""
        rows, hidden = pending.scheduled.rows, pending.output.hidden
        token_ids = np.asarray(pending.output.token_ids)
        result = StepResult([token_ids[: row.num_samples, s].tolist() for s, row in enumerate(rows)], {}, {})
        begin = 0
        for s, row in enumerate(rows):
            request, end = row.request, begin + row.num_tokens
            if request.params.logprobs is not None and (sampled := [t for t in result.token_ids[s] if t >= 0]):
                steps = np.arange(len(sampled))
                where = steps * hidden.shape[1] + s if hidden.ndim == 3 else np.full(1, end - 1)
                result.logprobs[s] = self._scorer.score(hidden, where, np.asarray(sampled))
            if row.wants_prompt_logprobs:
                targets = np.asarray(request.prompt_token_ids[row.start + 1 : row.start + 1 + row.num_tokens])
                where = np.arange(begin, begin + len(targets))
                result.prompt_logprobs[s] = self._scorer.score(hidden, where, targets)
            begin = end
        return result

    def warmup(self, progress: Progress | None = None) -> None:
        """Compiles every batch shape; any compilation after it is reported as a defect."""
        self.compile(self.buckets.all(), progress)
        self._scorer.warmup()
        for size in self.buckets.ragged_rows:
            self._copy([(NULL_PAGE, NULL_PAGE)] * size)
        self._warm = True

    def compile(self, shapes: Sequence[BatchShape], progress: Progress | None = None) -> None:
        """Compiles the given shapes, two at a time (XLA compiles outside Python's lock)."""
        with ThreadPoolExecutor(2) as pool:
            for done, _ in enumerate(pool.map(self._compile, shapes), 1):
                if progress:
                    progress(done, len(shapes))
        trim_heap()

    def _shape_for(self, scheduled: ScheduledStep) -> BatchShape:
        """Leaves the sampler out where nobody needs it and the step with it has not been compiled."""
        shape = self.buckets.shape_for(scheduled)
        if shape in self._compiled or not scheduled.takes_best:
            return shape
        return dataclasses.replace(shape, takes_best=True)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages of all layers, (source, destination), in one operation; as many at most as there are rows."""
        size = next(rows for rows in self.buckets.ragged_rows if rows >= len(copies))
        pages = np.full((2, size), NULL_PAGE, np.int32)
        pages[:, : len(copies)] = np.transpose(copies)
        self._pages = self._copy_pages(self._pages, *pages)

    @property
    def _pages(self) -> tuple[tuple[Pages, ...], tuple[Pages, ...]]:
        """Pages of keys and of values, of all layers."""
        return self.state.cache.k_pages, self.state.cache.v_pages

    @_pages.setter
    def _pages(self, pages: tuple[tuple[Pages, ...], tuple[Pages, ...]]) -> None:
        cache = dataclasses.replace(self.state.cache, k_pages=pages[0], v_pages=pages[1])
        self.state = dataclasses.replace(self.state, cache=cache)

    def _compile(self, shape: BatchShape) -> Any:
        if shape in self._compiled:
            return self._compiled[shape]
        start = time.perf_counter()
        arguments = (self.params, self.state, *shape.abstract_inputs(self.decoder.config.vocab_size))
        steps, found = self.config.decode_steps, False

        def compile_step() -> Any:
            return self._jitted().lower(shape, steps, *arguments).compile()

        if self._programs is None:
            compiled = compile_step()
        else:
            [device] = self.state.last_tokens.devices()
            compiled, found = self._programs.get((self.decoder, shape, steps), arguments, device, compile_step)
        self._compiled[shape] = compiled
        seconds = time.perf_counter() - start
        self.stats.num_compiled += not found
        self.stats.num_loaded += found
        self.stats.seconds += seconds
        if self._warm:
            self.stats.num_after_warmup += 1
            log.warning("compiled %s after warm-up in %.1f s: this shape was not foreseen", shape, seconds)
        return compiled

    def _jitted(self) -> Any:
        from jaxinfer.engine import step  # with the decoder's modules, which need a third of a second

        with self._lock:  # two shapes are compiled at a time, of one function
            if self._step is None:
                self._step = step.jit_step(self.decoder.build())
            return self._step

    def _token_mask(self, scheduled: ScheduledStep, num_rows: int) -> jax.Array | np.ndarray:
        """Returns which tokens each row may sample; almost always all of them, from one array kept on the device."""
        banned: dict[int, Sequence[int]] = {
            s: tokens
            for s, row in enumerate(scheduled.rows)
            if row.request.needs_host_mask and (tokens := row.request.banned_next_tokens())
        }
        words = -(-self.decoder.config.vocab_size // 32)
        if not banned:
            if num_rows not in self._masks:
                self._masks[num_rows] = to_device(np.full((num_rows, words), 0xFFFFFFFF, np.uint32))
            return self._masks[num_rows]
        return _mask_without(banned, num_rows, words)


def _mask_without(banned: dict[int, Sequence[int]], num_rows: int, words: int) -> np.ndarray:
    mask = np.full((num_rows, words), 0xFFFFFFFF, np.uint32)
    for row, tokens in banned.items():
        for token in tokens:
            mask[row, token // 32] &= ~np.uint32(1 << (token % 32))
    return mask


def _min_decode_rows(decoder: DecoderSpec) -> int:
    """XLA's CPU dot with one row first converts a bfloat16 matrix to float32; from two rows on it does not."""
    return 2 if jax.default_backend() == "cpu" and decoder.dtype == jnp.bfloat16 else 1
