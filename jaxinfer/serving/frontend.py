"""Between HTTP and the engine: who may come in, what is asked of the engine, and when it has to stop."""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.engine.async_engine import AsyncEngine, Delivery, RequestStream
from jaxinfer.engine.request import FinishReason
from jaxinfer.loading import Model
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.structured import StructuredOutputs
from jaxinfer.serving.config import ServerConfig
from jaxinfer.serving.errors import RETRY_AFTER, ApiError, engine_failed
from jaxinfer.serving.metrics import CompletionTimer, Metrics
from jaxinfer.serving.params import naming_the_field
from jaxinfer.serving.protocol import GenerationBody

WATCH_INTERVAL = 1.0  # seconds between two looks of the watchdog, at most
MAX_RETRY_AFTER = 60
STATS_TIMEOUT = 2.0  # seconds; a scrape must not hang because a step does

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Usage:
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in the prefix cache

    def json(self) -> dict[str, Any]:
        """Returns what clients get."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Frontend:
    """What all requests of a server share. Belongs to one event loop."""

    def __init__(
        self, engine: AsyncEngine, model: Model, engine_config: EngineConfig, max_model_len: int, config: ServerConfig
    ):
        """Serves `model` from `engine`.

        Args:
            engine: runs from `start` to `stop`.
            model: what the engine runs.
            engine_config: of the engine.
            max_model_len: of the engine.
            config: the server's own limits.
        """
        self.engine = engine
        self.model = model
        self.engine_config = engine_config
        self.max_model_len = max_model_len
        self.config = config
        self.metrics = Metrics(config)
        self.created = int(time.time())
        self.draining = False
        self.num_open = 0  # completions between `admit` and their end
        self._capacity = engine_config.max_num_seqs + config.max_queue
        self._streams: set[RequestStream] = set()
        self._latency = float(RETRY_AFTER)  # of recent completions, in seconds

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts the engine and its watchdog, and stops both."""
        self.engine.start()
        watchdog = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watchdog.cancel()
            await asyncio.to_thread(self.engine.stop, self.config.drain_timeout)

    async def drain(self) -> None:
        """Lets no request in any more, and returns when all have ended or had their time."""
        self.draining = True
        deadline = time.monotonic() + self.config.drain_timeout
        while self.num_open and time.monotonic() < deadline and self.engine.failure is None:
            await asyncio.sleep(0.02)
        self.abort_all()
        while self.num_open and time.monotonic() < deadline + 1:  # they tell their clients
            await asyncio.sleep(0.02)

    def abort_all(self) -> None:
        """Ends every stream with an error."""
        for stream in self._streams:
            stream.items.put_nowait(RuntimeError("the server stops"))

    def check_health(self) -> None:
        """Raises ApiError 503 when requests should go elsewhere."""
        if self.engine.failure is not None:
            raise ApiError(503, "the engine has failed; the server must be restarted", code="engine_failed")
        if self.draining:
            raise ApiError(503, "the server is about to stop", code="draining", retry_after=RETRY_AFTER)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if name is not None and name != self.config.model_name:
            raise ApiError(
                404, f"the model {name!r:.200} is not served here; {self.config.model_name!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip

    @contextlib.contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Holds places for so many completions while a request runs.

        Raises:
            ApiError: 503, the server stops; 400, there will never be so many places; 429, there are not now.
        """
        self.check_health()
        if count > self._capacity:
            raise ApiError(
                400,
                f"the request asks for {count} completions, and the server holds {self._capacity} in all",
                param="n",
            )
        if self.num_open + count > self._capacity:
            after = min(max(1, math.ceil(self._latency)), MAX_RETRY_AFTER)
            raise ApiError(
                429, f"{self.num_open} completions run or wait, and the limit is {self._capacity}: try again later",
                code="queue_full", retry_after=after,
            )  # fmt: skip
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count

    def priority_of(self, body: GenerationBody) -> int:
        """Returns the request's priority; ApiError 400 if the engine does not know priorities."""
        if body.priority is not None and self.engine_config.policy != "priority":
            raise ApiError(400, "priority needs a server that runs with --policy priority", param="priority")
        if body.priority is not None and not -(2**31) <= body.priority < 2**31:
            raise ApiError(400, f"priority must fit into 32 bits, got {body.priority}", param="priority")
        return body.priority or 0

    @contextlib.asynccontextmanager
    async def generation(
        self, request_id: str, prompts: Sequence[list[int]], params: SamplingParams, body: GenerationBody
    ) -> AsyncIterator[RequestStream]:
        """Queues prompts and yields their stream; whatever has not finished at the end of the block is aborted.

        Raises:
            ApiError: 400, a prompt or a parameter does not fit the model; 500, the engine has failed.
        """
        priority = self.priority_of(body)
        try:
            with naming_the_field(body):
                if params.structured_outputs is not None:  # it is kept: the engine's thread must not wait for it
                    form = StructuredOutputs.of(params.structured_outputs)
                    await asyncio.to_thread(self.model.grammars.compile, form)
                stream = await self.engine.submit(
                    prompts, params, request_id=request_id, priority=priority, cache_salt=body.cache_salt
                )
        except RuntimeError as error:
            raise engine_failed() from error
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.remove(stream)
            stream.close()

    async def recorded(
        self, stream: RequestStream, num_choices: int, arrival: float, usage: Usage
    ) -> AsyncGenerator[Delivery]:
        """Yields the deliveries of a stream, and puts their times and tokens into metrics and `usage`.

        Raises:
            ApiError: 500, the engine has failed; 503, the server stops; 400, a grammar proved too complex.
        """
        timers = [CompletionTimer(arrival) for _ in range(num_choices)]
        n = num_choices // len(stream.request_ids)
        num_unfinished = num_choices
        try:
            async for delivery in stream:
                chunk, timer = delivery.chunk, timers[delivery.prompt * n + delivery.chunk.index]
                usage.completion_tokens += len(chunk.token_ids)
                timer.tokens(self.metrics, len(chunk.token_ids), delivery.time)
                if chunk.finish_reason is not None and chunk.metrics is not None:
                    started = chunk.metrics.first_scheduled
                    queued = None if started is None else started - chunk.metrics.arrival
                    timer.finish(self.metrics, chunk.finish_reason, queued)
                    self._latency += 0.1 * (time.monotonic() - arrival - self._latency)
                    num_unfinished -= 1
                    if chunk.finish_reason is FinishReason.ERROR:
                        raise ApiError(400, str(chunk.stop_reason), code="grammar_error")
                    if chunk.index == 0:  # the other completions of the prompt share its pages
                        usage.cached_tokens += chunk.metrics.num_cached_tokens
                yield delivery
        except RuntimeError as error:
            if self.draining and self.engine.failure is None:
                raise ApiError(503, "the server stopped before the answer was finished", code="draining") from error
            raise engine_failed() from error
        finally:
            self.metrics.aborted.inc(num_unfinished)

    async def exposition(self) -> bytes:
        """Returns the metrics, with the engine's latest state if it answers."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            async with asyncio.timeout(STATS_TIMEOUT):
                self.metrics.observe_engine(await self.engine.stats())
        return self.metrics.exposition()

    async def _watch(self) -> None:
        """Gives the engine up when a step takes too long, so that nobody waits for it for ever."""
        limit = self.config.step_timeout
        while self.engine.failure is None:
            await asyncio.sleep(min(WATCH_INTERVAL, limit / 4))
            if (seconds := self.engine.seconds_busy) > limit:
                log.error("a step has taken %.1f s, the limit is %.1f s: the engine is given up", seconds, limit)
                self.engine.fail(TimeoutError(f"a step of the engine hangs for {seconds:.1f} s"))
