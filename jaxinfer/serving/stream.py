"""Generation as an HTTP response: whole, or as server-sent events; it ends when the client leaves."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.serving.answers import Answer, ChatAnswer, CompletionAnswer
from jaxinfer.serving.errors import ApiError
from jaxinfer.serving.frontend import Frontend, Usage
from jaxinfer.serving.params import sampling_params
from jaxinfer.serving.prompts import Prompt, chat_prompt, completion_prompts, num_prompts
from jaxinfer.serving.protocol import ChatBody, CompletionBody

CLIENT_GONE = 499  # for the log: nobody receives it
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationResponse(Response):
    """Answers a completion or a chat."""

    def __init__(self, frontend: Frontend, body: CompletionBody | ChatBody):
        """Nothing happens before the response is sent.

        Raises:
            ApiError: 400 or 404, as far as the body alone says.
        """
        super().__init__()
        self.frontend = frontend
        self.body = body
        frontend.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        self.params = sampling_params(body, frontend.model.default_sampling_params)
        self.request_id = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid.uuid4().hex}"
        self._tokenizer = frontend.model.tokenizer
        about = self.request_id, frontend.config.model_name, self._tokenizer, self.params.logprobs
        self.answer: Answer
        if isinstance(body, ChatBody):
            self.answer = ChatAnswer(*about)
        else:
            self.answer = CompletionAnswer(*about, bool(body.echo), self.params.n)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generates and sends until all is sent, the time is over or the client has gone."""
        work = asyncio.create_task(self._respond(scope, send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            else:
                scope["log"]["status"] = CLIENT_GONE
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _respond(self, scope: Scope, send: Send) -> None:
        limit = self.frontend.config.request_timeout
        started = False
        try:
            async with asyncio.timeout(limit), contextlib.aclosing(self._parts(scope["log"])) as parts:
                async for data in parts:
                    if not started:
                        started = True
                        await self._start(send)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            error = ApiError(504, f"the answer took longer than {limit:g} s", code="request_timeout")
            await self._fail(error, started, scope, send)
        except ApiError as error:
            await self._fail(error, started, scope, send)
        else:
            await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send) -> None:
        headers = EVENT_STREAM if self.body.stream else [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: ApiError, started: bool, scope: Scope, send: Send) -> None:
        if not started:
            raise error
        scope["log"]["error"] = error.code
        with contextlib.suppress(TimeoutError):  # a client that does not read does not get it
            async with asyncio.timeout(1):
                await send({"type": "http.response.body", "body": _event(error.body())})

    async def _parts(self, log: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Yields the body: events, or all of it at once."""
        arrival = time.monotonic()
        frontend, body, answer = self.frontend, self.body, self.answer
        n = self.params.num_completions
        log |= {"id": self.request_id, "stream": bool(body.stream), "user": _user(body)}
        with frontend.admitted(n * num_prompts(body)):
            prompts = await asyncio.to_thread(self._prompts)  # long texts take their time
            usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
            log["prompt_tokens"] = usage.prompt_tokens
            tokens = [prompt.token_ids for prompt in prompts]
            async with frontend.generation(self.request_id, tokens, self.params, body) as stream:
                frontend.metrics.prompt_tokens.inc(usage.prompt_tokens)
                for prompt in prompts:
                    frontend.metrics.request_prompt_tokens.observe(len(prompt.token_ids))
                events = answer.begin(prompts, n)
                try:
                    for event in events if body.stream else ():
                        yield self._chunk(event)
                    recorded = frontend.recorded(stream, n * len(prompts), arrival, usage)
                    async with contextlib.aclosing(recorded):
                        async for delivery in recorded:
                            events = answer.add(delivery.prompt * n + delivery.chunk.index, delivery.chunk)
                            for event in events if body.stream else ():
                                yield self._chunk(event)
                finally:
                    log["completion_tokens"] = usage.completion_tokens
                    log["finish_reasons"] = [choice["finish_reason"] for choice in answer.choices]
        if not body.stream:
            yield _json(answer.whole(usage.json()))
            return
        if self._includes_usage:
            yield _event(answer.usage_event(usage.json()))
        yield b"data: [DONE]\n\n"

    @property
    def _includes_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _chunk(self, event: dict[str, Any]) -> bytes:
        return _event(event | {"usage": None} if self._includes_usage else event)

    def _prompts(self) -> list[Prompt]:
        if isinstance(self.body, ChatBody):
            return [chat_prompt(self.body, self._tokenizer)]
        return completion_prompts(self.body, self._tokenizer)


def _user(body: CompletionBody | ChatBody) -> str | None:
    return body.user or (body.safety_identifier if isinstance(body, ChatBody) else None)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
