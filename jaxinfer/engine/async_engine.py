"""AsyncEngine: the engine on a thread of its own, for asyncio programs."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxinfer.engine.engine import Engine, EngineStats
from jaxinfer.engine.outputs import CompletionChunk
from jaxinfer.sampling.params import SamplingParams


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
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue]] = {}  # engine thread only
        self._ids = itertools.count()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.stop)

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in; requests still open fail with RuntimeError."""
        self._stopping.set()
        self._calls.put(lambda: None)
        self._thread.join()

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

        def add(new_id: str) -> None:
            self._engine.add_request(new_id, prompt, params, priority=priority, cache_salt=cache_salt)

        return self._stream(add, request_id)

    def fork(
        self, source_id: str, params: SamplingParams | None = None, *, request_id: str | None = None, index: int = 0
    ) -> AsyncGenerator[CompletionChunk]:
        """Yields what a fork of the request `source_id` generates; arguments and errors as for `Engine.fork`.

        The fork is made when its first chunk is asked for.
        """

        def add(new_id: str) -> None:
            self._engine.fork(source_id, new_id, params, index=index)

        return self._stream(add, request_id)

    async def _stream(self, add: Callable[[str], None], request_id: str | None) -> AsyncGenerator[CompletionChunk]:
        """Yields the chunks of a request that `add` queues under the id that it is given."""
        request_id = request_id if request_id is not None else f"async-{next(self._ids)}"
        stream = (asyncio.get_running_loop(), asyncio.Queue())
        await self._call(lambda: self._add(request_id, stream, add))
        try:
            while True:
                item = await stream[1].get()
                if isinstance(item, BaseException):
                    raise RuntimeError("the engine stopped before this request was finished") from item
                if item is None:
                    return
                yield item
        finally:
            self._calls.put(lambda: self._end(request_id, stream))

    async def stats(self) -> EngineStats:
        """Returns counters of queues, pages and compilation."""
        return await self._call(self._engine.stats)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the engine's thread and returns its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.cancelled():
                future.set_exception(error) if error else future.set_result(result)

        def run() -> None:
            try:
                result, error = function(), None
            except Exception as failure:  # belongs to the caller, not to the engine
                result, error = None, failure
            loop.call_soon_threadsafe(settle, result, error)

        if not self._thread.is_alive():
            raise RuntimeError("the engine is not running") from self._failure
        self._calls.put(run)
        return await future

    def _add(self, request_id: str, stream: tuple, add: Callable[[str], None]) -> None:
        add(request_id)
        self._streams[request_id] = stream

    def _end(self, request_id: str, stream: tuple) -> None:
        if self._streams.get(request_id) is stream:
            self._engine.abort(request_id)
            self._engine.pop_output(request_id)
            del self._streams[request_id]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._do_calls(wait=not self._engine.has_work)
                if self._engine.has_work and not self._stopping.is_set():
                    self._deliver(self._engine.step())
        except BaseException as failure:  # nobody may wait for ever on a dead engine
            self._failure = failure
            raise
        finally:
            error = self._failure or RuntimeError("stopped")
            for stream in self._streams.values():
                _send(stream, error)
            while not self._calls.empty():
                self._calls.get()()

    def _do_calls(self, wait: bool) -> None:
        if wait:
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()

    def _deliver(self, chunks: Sequence[CompletionChunk]) -> None:
        for chunk in chunks:
            if chunk.request_id in self._streams:
                _send(self._streams[chunk.request_id], chunk)
        for request_id in dict.fromkeys(chunk.request_id for chunk in chunks if chunk.finish_reason is not None):
            if request_id in self._streams and self._engine.is_finished(request_id):
                self._engine.pop_output(request_id)
                _send(self._streams.pop(request_id), None)


def _send(stream: tuple[asyncio.AbstractEventLoop, asyncio.Queue], item: Any) -> None:
    loop, items = stream
    if not loop.is_closed():
        loop.call_soon_threadsafe(items.put_nowait, item)
