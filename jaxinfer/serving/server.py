"""uvicorn with our signals, sockets and patience."""

import asyncio
import functools
import logging
import signal
import socket
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxinfer.serving.frontend import Frontend

log = logging.getLogger(__name__)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that does not wait for ever for the headers of a request (slowloris)."""

    def __init__(self, *arguments: object, header_timeout: float, **options: object):
        super().__init__(*arguments, **options)  # pyright: ignore[reportArgumentType]
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Starts the clock."""
        super().connection_made(transport)
        self._watch_headers(waiting=True)

    def data_received(self, data: bytes) -> None:
        """Stops the clock when the headers are complete, and starts it when the next ones have begun to come."""
        super().data_received(data)
        idle = self.conn.their_state is h11.IDLE
        self._watch_headers(waiting=idle and bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the clock."""
        self._watch_headers(waiting=False)
        super().connection_lost(exc)

    def _watch_headers(self, waiting: bool) -> None:
        if waiting and self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout, self.transport.close)
        elif not waiting and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class Server(uvicorn.Server):
    """Drains on the first SIGTERM or Ctrl-C, and leaves at once on the second. Exits with 0 either way."""

    def __init__(self, app: FastAPI, frontend: Frontend):
        """Serves `app`, whose state is `frontend`."""
        protocol = functools.partial(PatientProtocol, header_timeout=frontend.config.body_timeout)
        super().__init__(
            uvicorn.Config(
                app, loop="asyncio", http=protocol, ws="none", lifespan="on", log_config=None, access_log=False,  # pyright: ignore[reportArgumentType]
                server_header=False, proxy_headers=False, timeout_graceful_shutdown=5,
            )
        )  # fmt: skip
        self._frontend = frontend
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remembers the loop for the signals, which arrive outside it."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal; Python calls this between two instructions of the main thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._exit, signal.Signals(sig).name)

    def _exit(self, name: str) -> None:
        if self._drain is None:
            log.info("%s: no new requests; %d completions may finish", name, self._frontend.num_open)
            self._drain = asyncio.ensure_future(self._drain_and_exit())
        else:
            log.info("%s again: leaving at once", name)
            self._frontend.abort_all()
            self.should_exit = True

    async def _drain_and_exit(self) -> None:
        await self._frontend.drain()
        self.should_exit = True
