"""AsyncEngine: the engine on a thread of its own, for asyncio programs."""

import asyncio
import collections
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import CompletionChunk
from jaxinfer.engine.stats import EngineStats
from jaxinfer.sampling.params import SamplingParams

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """A chunk of one of the prompts of a stream.

    Attributes:
        prompt: index of the prompt.
        chunk: what a step added to one of its completions.
        time: when the step was read, in seconds of `time.monotonic`.
    """

    prompt: int
    chunk: CompletionChunk
    time: float


class RequestStream:
    """The chunks of prompts that run together; iterate once, and await `aclose` if you leave early."""

    def __init__(self, engine: "AsyncEngine", request_ids: Sequence[str]):
        """Belongs to the running event loop."""
        self.request_ids = tuple(request_ids)
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Delivery | BaseException | None] = asyncio.Queue()
        self.num_unfinished = len(self.request_ids)  # engine thread only
        self._engine = engine

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Delivery:
        item = await self.items.get()
        if isinstance(item, BaseException):
            raise RuntimeError("the engine stopped before this request was finished") from item
        if item is None:
            raise StopAsyncIteration
        return item

    def close(self) -> None:
        """Aborts what has not finished, between the next two steps; harmless when all has."""
        self._engine.discard(self)


class AsyncEngine:
    """Serves any number of concurrent `generate` calls from one engine.

    The engine runs on one thread, which alone touches it; calls reach it through a queue that is emptied between
    steps. Leaving a `generate` loop early, by `break`, an exception or cancellation, aborts its request.

    Example:
        >>> async with AsyncEngine(Engine(load("smollm2-135m"))) as engine:
        ...     async for chunk in engine.generate("Hello"):
        ...         print(chunk.text, end="")
    """

    def __init__(self, engine: Engine):
        """Takes over `engine`; nobody else may use it from now on. The thread starts with `start` or `async with`."""
        self._engine = engine
        self._ids = itertools.count()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._busy_since: float | None = None
        self._lock = threading.Lock()  # over what follows
        self._failure: BaseException | None = None
        self._closed = False
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._open_calls: set[_Call] = set()
        self._streams: dict[str, tuple[RequestStream, int]] = {}

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.stop)

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after the step it is in; requests still open fail with RuntimeError.

        Args:
            timeout: seconds to wait for a step that may hang; None waits for ever.
        """
        self._stopping.set()
        self._calls.put(_Call(lambda: None))
        self._thread.join(timeout)

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if it was not `stop`."""
        return self._failure

    @property
    def seconds_busy(self) -> float:
        """How long the thread has been at its present step; 0 while it waits for requests."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def fail(self, error: BaseException) -> None:
        """Gives the engine up: every open request and call fails with `error` at once, even while a step hangs."""
        self._failure = self._failure or error
        self._stopping.set()
        self._close(self._failure)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[CompletionChunk]:
        """Yields the completions of a prompt, chunk by chunk; arguments as for `Engine.add_request`.

        Raises:
            ValueError: the prompt or a parameter is not valid.
            RuntimeError: the engine has failed or was stopped.
        """
        return self._chunks(lambda: self.submit(
            [prompt], params, request_id=request_id, priority=priority, cache_salt=cache_salt
        ))  # fmt: skip

    def fork(
        self, source_id: str, params: SamplingParams | None = None, *, request_id: str | None = None, index: int = 0
    ) -> AsyncGenerator[CompletionChunk]:
        """Yields what a fork of the request `source_id` generates; arguments and errors as for `Engine.fork`.

        The fork is made when its first chunk is asked for.
        """

        def add(new_id: str, _: int) -> None:
            self._engine.fork(source_id, new_id, params, index=index)

        return self._chunks(lambda: self._open(1, request_id, add))

    async def _chunks(self, begin: Callable[[], Awaitable[RequestStream]]) -> AsyncGenerator[CompletionChunk]:
        stream = await begin()
        try:
            async for delivery in stream:
                yield delivery.chunk
        finally:
            stream.close()

    async def submit(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Queues several prompts, all or none, and returns the stream of their chunks, which the caller closes.

        Raises:
            ValueError: a prompt or a parameter is not valid.
            RuntimeError: the engine has failed or was stopped.
        """

        def add(new_id: str, index: int) -> None:
            self._engine.add_request(new_id, prompts[index], params, priority=priority, cache_salt=cache_salt)

        return await self._open(len(prompts), request_id, add)

    async def _open(self, count: int, request_id: str | None, add: Callable[[str, int], None]) -> RequestStream:
        """Returns the stream of so many requests, which `add` queues by id and index."""
        request_id = request_id if request_id is not None else f"async-{next(self._ids)}"
        stream = RequestStream(self, [f"{request_id}-{i}" if count > 1 else request_id for i in range(count)])
        try:
            await self._call(lambda: self._add(stream, add))
        except BaseException:  # cancelled: the request may be added all the same, and goes right after
            stream.close()
            raise
        return stream

    def discard(self, stream: RequestStream) -> None:
        """Aborts what a stream has not finished; see `RequestStream.close`."""
        self._calls.put(_Call(lambda: self._end(stream)))

    async def stats(self) -> EngineStats:
        """Returns counters of queues, pages and compilation."""
        return await self._call(self._engine.stats)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the engine's thread and returns its result."""
        call = _Call(function, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._closed or not self._thread.is_alive():
                raise RuntimeError("the engine is not running") from self._failure
            self._open_calls.add(call)
            self._calls.put(call)
        return await call.future

    def _add(self, stream: RequestStream, add: Callable[[str, int], None]) -> None:
        try:
            for index, request_id in enumerate(stream.request_ids):
                add(request_id, index)
                with self._lock:
                    self._streams[request_id] = stream, index
        except ValueError:
            self._end(stream)
            raise

    def _end(self, stream: RequestStream) -> None:
        for request_id in stream.request_ids:
            if self._streams.get(request_id, (None, 0))[0] is stream:
                self._forget(request_id)
                self._engine.abort(request_id)
                self._engine.pop_output(request_id)

    def _forget(self, request_id: str) -> RequestStream:
        with self._lock:
            return self._streams.pop(request_id)[0]

    def _close(self, error: BaseException) -> set[RequestStream]:
        """Takes no more calls, tells all who wait, and returns the streams that were open."""
        with self._lock:
            self._closed = True
            streams, calls = {stream for stream, _ in self._streams.values()}, self._open_calls
            self._open_calls = set()
        for stream in streams:
            _schedule(stream.loop, stream.items.put_nowait, error)
        for call in calls:
            call.settle(None, RuntimeError("the engine is not running"))
        return streams

    def _run(self) -> None:
        error: BaseException = RuntimeError("stopped")
        try:
            while not self._stopping.is_set():
                self._do_calls(wait=not self._engine.has_work)
                if self._engine.has_work and not self._stopping.is_set():
                    self._busy_since = time.monotonic()
                    self._deliver(self._engine.step())
        except BaseException as failure:  # nobody may wait for ever on a dead engine
            if self._failure is None:  # given up before, while the step hung, it is no news
                log.exception("the engine has failed")
            error = self._failure = self._failure or failure
        finally:
            self._busy_since = None
            for stream in self._close(error):
                if self._failure is None:  # stopped in good order: nothing is left behind in the engine
                    self._end(stream)
            if self._failure is None:
                self._engine.close()

    def _do_calls(self, wait: bool) -> None:
        if wait:
            self._busy_since = None
            self._do(self._calls.get())
        while not self._calls.empty():
            self._do(self._calls.get())

    def _do(self, call: "_Call") -> None:
        self._busy_since = time.monotonic()
        try:
            result, error = call.function(), None
        except Exception as failure:  # belongs to the caller, not to the engine
            result, error = None, failure
        with self._lock:
            self._open_calls.discard(call)
        call.settle(result, error)

    def _deliver(self, chunks: Sequence[CompletionChunk]) -> None:
        """Wakes every event loop at most once a step, whatever the number of its streams."""
        now = time.monotonic()
        outbox: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, Delivery | None]]]
        outbox = collections.defaultdict(list)
        for chunk in chunks:
            if place := self._streams.get(chunk.request_id):
                stream, index = place
                outbox[stream.loop].append((stream.items, Delivery(index, chunk, now)))
        for request_id in dict.fromkeys(chunk.request_id for chunk in chunks if chunk.finish_reason is not None):
            if request_id in self._streams and self._engine.is_finished(request_id):
                self._engine.pop_output(request_id)
                stream = self._forget(request_id)
                stream.num_unfinished -= 1
                if not stream.num_unfinished:
                    outbox[stream.loop].append((stream.items, None))
        for loop, items in outbox.items():
            _schedule(loop, _put_all, items)


class _Call:
    """A function for the engine's thread, and the future that waits for its result, if one does."""

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any] | None = None):
        self.function = function
        self.future: Any = future

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Gives the future its result, from any thread; only the first counts."""
        if self.future is not None:
            _schedule(self.future.get_loop(), self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_exception(error) if error else self.future.set_result(result)


def _put_all(items: Sequence[tuple[asyncio.Queue, Any]]) -> None:
    for target, item in items:
        target.put_nowait(item)


def _schedule(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # the loop has closed, and nobody waits there any more
        log.debug("an event loop closed before its requests had ended")
