"""What happens to every HTTP request before and after the routes: log, API key, limits of the body."""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.serving.config import ServerConfig
from jaxinfer.serving.errors import ApiError
from jaxinfer.serving.metrics import Metrics

PUBLIC = ("/health",)  # for probes, which have no key

log = logging.getLogger("jaxinfer.requests")


class RequestLog:
    """One line a request: what was asked for, how it ended and how long it took; never what it said.

    Routes add to `scope["log"]`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, number = time.monotonic(), uuid.uuid4().hex
        fields = scope["log"] = {"method": scope["method"], "path": scope["path"], "request_id": number}

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields.setdefault("status", message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            fields["seconds"] = round(time.monotonic() - began, 4)
            route = getattr(scope.get("route"), "path", "other")  # not the path: it has as many values as clients like
            self._metrics.http_requests.labels(route, str(fields.get("status", 500))).inc()
            log.info("request", extra={"fields": {name: value for name, value in fields.items() if value is not None}})


class ApiKey:
    """Lets in those who know the key."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request, or answers 401."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC:
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                error = ApiError(401, "send the API key as: Authorization: Bearer KEY", code="invalid_api_key")
                error.headers["WWW-Authenticate"] = "Bearer"
                return await error.response()(scope, receive, send)
        return await self._app(scope, receive, send)


class BodyLimits:
    """Reads the body, which must not be too large or too slow, before the route is called."""

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request, or answers 408 or 413."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        try:
            async with asyncio.timeout(self._config.body_timeout):
                body = await self._read(scope, receive)
        except (TimeoutError, ApiError) as failure:
            slow = ApiError(408, f"the body did not arrive within {self._config.body_timeout:g} s", code="timeout")
            error = failure if isinstance(failure, ApiError) else slow
            error.headers["Connection"] = "close"  # the rest of the body is of no use
            return await error.response()(scope, receive, send)
        if body is None:  # the client has gone
            return None
        return await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        limit = self._config.max_body_bytes
        error = ApiError(413, f"the body must not have more than {limit:,} bytes", code="body_too_large")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            raise error
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                raise error
            if not message.get("more_body", False):
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
