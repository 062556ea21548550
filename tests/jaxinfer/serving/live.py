"""A server on a thread of the test process, so that tests see both what clients get and what the engine holds."""

import contextlib
import threading
import time

import httpx2

from jaxinfer import __version__
from jaxinfer.engine.async_engine import AsyncEngine
from jaxinfer.serving.app import create_app
from jaxinfer.serving.config import ServerConfig
from jaxinfer.serving.frontend import Frontend
from jaxinfer.serving.listener import bind, url_of
from jaxinfer.serving.server import Server


class Live:
    def __init__(self, engine, **options):
        self.engine = engine
        config = ServerConfig(**{"model_name": "tiny", "drain_timeout": 5} | options)
        self.frontend = Frontend(AsyncEngine(engine), engine.model, engine.config, engine.max_model_len, config)
        self.server = Server(create_app(self.frontend, __version__), self.frontend)
        self.listener = bind("127.0.0.1", 0)
        self.url = url_of(self.listener)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    def client(self, **options):
        return httpx2.Client(base_url=self.url, timeout=60, **options)

    def is_idle(self):
        scheduler = self.engine.scheduler
        return not (
            self.frontend.num_open or self.frontend._streams or scheduler.has_unfinished or scheduler.pool.num_used
            or self.engine._groups or self.engine._sequences or self.frontend.engine._streams
        )  # fmt: skip

    def wait_idle(self, seconds=10):
        deadline = time.monotonic() + seconds
        while not self.is_idle():
            assert time.monotonic() < deadline, "requests, pages or streams are left behind"
            time.sleep(0.01)
        self.engine.scheduler.check_integrity()


@contextlib.contextmanager
def serving(engine, **options):
    live = Live(engine, **options)
    live.thread.start()
    try:
        deadline = time.monotonic() + 20
        while not live.server.started:
            assert live.thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield live
    finally:
        live.server.should_exit = True
        live.thread.join(20)
        assert not live.thread.is_alive(), "the server did not stop"
