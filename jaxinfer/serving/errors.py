"""Errors in the shape that OpenAI's clients expect."""

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

RETRY_AFTER = 5  # seconds; where nothing better is known


class ApiError(Exception):
    """A request that is refused or failed.

    Args:
        status: HTTP status.
        message: what was wanted, what was got, how to mend it.
        param: the field of the request that is to blame.
        code: a short name of the error for programs.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """Returns the JSON object that tells the client."""
        kind = "rate_limit_error" if self.status == 429 else "server_error" if self.status >= 500 else None
        return {
            "error": {
                "message": str(self),
                "type": kind or "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Returns the whole response; what cannot be UTF-8 (a lone surrogate in an unknown name) stays escaped."""
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def engine_failed() -> ApiError:
    """Returns the error of requests that the engine took down with it; the log says why."""
    return ApiError(
        500, "the engine has failed, see the server's log; the server must be restarted", code="engine_failed"
    )


def install_handlers(app: FastAPI) -> None:
    """Gives every error of the framework the same shape."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return _malformed(error).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        details = {
            404: f"there is no {request.url.path} here; /openapi.json lists what there is",
            405: f"{request.url.path} does not take {request.method}",
        }
        response = ApiError(error.status_code, details.get(error.status_code, str(error.detail))).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return ApiError(500, f"the server has a defect ({type(error).__name__}), see its log").response()


def _malformed(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason} at character {place[-1]}", code="invalid_json")
    if not place:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    return ApiError(400, f"{'.'.join(place)}: {first['msg']}", param=place[0])
