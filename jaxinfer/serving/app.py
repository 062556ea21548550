"""The routes."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Body, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from jaxinfer.serving.errors import ApiError, install_handlers
from jaxinfer.serving.frontend import Frontend
from jaxinfer.serving.middleware import ApiKey, BodyLimits, RequestLog
from jaxinfer.serving.prompts import encode, render
from jaxinfer.serving.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jaxinfer.serving.stream import GenerationResponse

UNSERVED = ("/v1/responses", "/v1/embeddings")  # of OpenAI's API


def create_app(frontend: Frontend, version: str) -> FastAPI:
    """Returns the ASGI application, which calls itself this version; its lifespan runs the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with frontend.running():
            yield

    app = FastAPI(title="jaxinfer", version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    install_handlers(app)
    app.add_middleware(BodyLimits, config=frontend.config)  # the last one added is the first one to see a request
    if frontend.config.api_key is not None:
        app.add_middleware(ApiKey, key=frontend.config.api_key)
    if frontend.config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=frontend.config.cors_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )  # fmt: skip
    app.add_middleware(RequestLog, metrics=frontend.metrics)
    _add_generation(app, frontend)
    _add_models(app, frontend)
    _add_tokenizer(app, frontend)
    _add_operation(app, frontend, version)
    return app


def _add_generation(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody) -> Response:
        """Continues prompts."""
        return GenerationResponse(frontend, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody) -> Response:
        """Answers a conversation."""
        return GenerationResponse(frontend, body)

    for path in UNSERVED:

        @app.post(path, response_model=None)
        async def unserved(_: Any = Body(default=None), path: str = path) -> Response:  # noqa: B008 - FastAPI's way
            """Not offered."""
            raise ApiError(404, f"{path} is not offered by this server", code="not_implemented")


def _add_models(app: FastAPI, frontend: Frontend) -> None:
    def model() -> dict[str, Any]:
        return {
            "id": frontend.config.model_name,
            "object": "model",
            "created": frontend.created,
            "owned_by": "jaxinfer",
            "max_model_len": frontend.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Lists the one model."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def retrieve(name: str) -> dict[str, Any]:
        """Describes the model."""
        frontend.check_model(name)
        return model()


def _add_tokenizer(app: FastAPI, frontend: Frontend) -> None:
    tokenizer = frontend.model.tokenizer

    @app.post("/tokenize")
    def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Returns the token ids of a prompt, or of messages as the model's template writes them."""
        frontend.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            tokens = render(body.messages, tokenizer, {}).token_ids
        else:
            tokens = encode(body.prompt or "", tokenizer, add_special_tokens=body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": frontend.max_model_len}

    @app.post("/detokenize")
    def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """Returns the text of token ids, special tokens included."""
        frontend.check_model(body.model)
        try:
            return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens") from error


def _add_operation(app: FastAPI, frontend: Frontend, version: str) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answers 200 while requests are welcome, else 503."""
        frontend.check_health()
        return {"status": "ok"}

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        """Returns the version of jaxinfer."""
        return {"version": version}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Returns metrics in Prometheus's text format."""
        return Response(await frontend.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})
