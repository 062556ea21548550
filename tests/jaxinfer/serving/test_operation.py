"""Life in operation: clients that leave, crowds, limits, keys, draining, hangs and failures."""

import asyncio
import contextlib
import json
import random
import socket
import threading
import time

import httpx2
import pytest

from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.serving.live import serving

LONG = {"prompt": "hello", "max_tokens": 80, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 4}
PATH = "/v1/completions"


@pytest.fixture
def slow(engine, monkeypatch):
    """Makes every step take a while, so that requests last."""
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.03), step())[1])


@pytest.fixture
def failing(engine, monkeypatch):
    """What is set in the place of the engine's step; afterwards the engine is as good as new."""
    yield lambda step: monkeypatch.setattr(engine, "step", step)
    for request_id in list(engine._groups):
        engine.abort(request_id)
        engine.pop_output(request_id)
    engine._pending = None


@contextlib.contextmanager
def begun(http, body=LONG):
    """A stream of which the first event has come."""
    with http.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        yield lines


def code_of(response):
    return response.json()["error"]["code"]


def test_a_client_that_leaves_frees_what_its_request_holds(engine, slow):
    with serving(engine) as live:
        with live.client() as http, begun(http):
            assert engine.scheduler.pool.num_used
        live.wait_idle()
        with live.client(headers={"Connection": "close"}) as http, pytest.raises(httpx2.ReadTimeout):
            http.post(PATH, json=LONG | {"n": 6}, timeout=0.3)  # not streamed; some of them still wait
        live.wait_idle()
        with live.client() as http:
            assert http.post(PATH, json=SHORT).status_code == 200


def test_a_crowd_is_told_to_come_back(engine, slow):
    with serving(engine, max_queue=1) as live, live.client() as http, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(live.client()) for _ in range(4)]
        streams = [stack.enter_context(begun(client)) for client in clients]
        waiting = threading.Thread(target=lambda: http.post(PATH, json=SHORT))
        waiting.start()
        while live.frontend.num_open < 5:
            time.sleep(0.01)
        with live.client() as another:
            refused = another.post(PATH, json=SHORT)
            assert (refused.status_code, code_of(refused)) == (429, "queue_full")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            never = another.post(PATH, json=SHORT | {"n": 6})
            assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert all(list(lines)[-2] == "data: [DONE]" for lines in streams)
        waiting.join()


def test_bodies_have_limits(engine):
    with serving(engine, max_body_bytes=1000, body_timeout=0.3) as live, live.client() as http:
        big = http.post(PATH, json={"prompt": "x" * 1000})
        chunked = http.post(PATH, content=(b"x" * 100 for _ in range(20)))
        assert (big.status_code, code_of(big)) == (chunked.status_code, code_of(chunked)) == (413, "body_too_large")
        for sent, answer in (
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{", b"HTTP/1.1 408 "),
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b""),  # the headers never end: it is hung up on
            (b"", b""),
            (b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /version HTTP/1.1\r\n", b"HTTP/1.1 200 "),
        ):
            with socket.create_connection(live.listener.getsockname(), timeout=10) as slowloris:
                slowloris.sendall(sent)
                received = b"".join(iter(lambda: slowloris.recv(4096), b""))
            assert received.startswith(answer)
            assert bool(received) == bool(answer)
        assert http.post(PATH, json=SHORT).status_code == 200


def test_the_api_key_is_wanted_everywhere_but_for_health(engine):
    with serving(engine, api_key="secret", cors_origins=("https://page.example",)) as live, live.client() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            for path in ("/v1/models", "/metrics", "/nothing"):
                refused = http.get(path, headers=headers)
                assert (refused.status_code, code_of(refused)) == (401, "invalid_api_key")
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in (("https://page.example", "https://page.example"), ("https://evil.example", None)):
            answer = http.options(PATH, headers=preflight | {"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed


def test_web_pages_are_kept_out_by_default(engine):
    with serving(engine) as live, live.client() as http:
        answer = http.get("/v1/models", headers={"Origin": "https://page.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_an_answer_that_takes_too_long_is_ended(engine, slow):
    with serving(engine, request_timeout=0.4) as live, live.client() as http:
        late = http.post(PATH, json=LONG)
        assert (late.status_code, code_of(late)) == (504, "request_timeout")
        with begun(http) as lines:
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        live.wait_idle()


def test_draining_finishes_what_runs_and_refuses_what_comes(engine, slow):
    with serving(engine) as live, live.client() as http, live.client() as other:
        other.get("/health")
        with begun(http) as lines:
            live.server.handle_exit(15, None)
            while not live.frontend.draining:
                time.sleep(0.01)
            refused = other.post(PATH, json=SHORT)
            assert (refused.status_code, code_of(refused)) == (503, "draining")
            assert refused.headers["retry-after"]
            assert other.get("/health").status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        live.thread.join(10)
        assert not live.thread.is_alive()
        assert live.is_idle()


def test_draining_has_a_limit(engine, slow):
    with serving(engine, drain_timeout=0.3) as live, live.client() as http:
        with begun(http) as lines:
            live.server.handle_exit(15, None)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        live.thread.join(10)
        assert not live.thread.is_alive()
        assert live.is_idle()


def test_a_step_that_hangs_fails_requests_instead_of_hanging_them(engine, failing):
    hang = threading.Event()
    failing(lambda: (hang.wait(30), [])[1])
    with serving(engine, step_timeout=0.3, drain_timeout=0.3) as live, live.client() as http:
        failed = http.post(PATH, json=LONG)
        assert (failed.status_code, code_of(failed)) == (500, "engine_failed")
        assert (http.get("/health").status_code, code_of(http.get("/health"))) == (503, "engine_failed")
        assert http.post(PATH, json=LONG).status_code == 503
        assert http.get("/metrics").status_code == 200
        assert isinstance(live.frontend.engine.failure, TimeoutError)  # the watchdog's, not the step's own
        hang.set()


def test_an_engine_that_fails_takes_its_requests_with_it_and_says_so(engine, failing, caplog):
    step, calls = engine.step, iter(range(100))
    failing(lambda: step() if next(calls) < 4 else 1 / 0)
    with serving(engine) as live, live.client() as http:
        with begun(http) as lines:
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert http.get("/health").status_code == 503
        assert "ZeroDivisionError" in caplog.text
        assert "hello" not in caplog.text


def test_many_clients_with_aborts_and_bad_requests_leave_nothing_behind(engine, llm):
    """16 at once for 4 places, some of which leave or talk nonsense; full answers equal the offline ones."""
    prompts = [f"prompt {i}" for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    wanted = [output.outputs[0].text for output in llm.generate(prompts, params)]
    counts = {"full": 0, "left": 0, "bad": 0}

    async def one(http, chance):
        i, kind = chance.randrange(12), chance.random()
        body = {"prompt": prompts[i], "max_tokens": 24, "ignore_eos": True, "temperature": 0, "stream": True}
        if kind < 0.15:
            bad = chance.choice([{"temperature": -1}, {"prompt": "x " * 300}, {"tools": [1]}, {"model": "other"}])
            assert (await http.post(PATH, json=body | bad)).status_code in (400, 404)
            counts["bad"] += 1
        elif kind < 0.5:
            with contextlib.suppress(httpx2.TimeoutException):
                async with http.stream("POST", PATH, json=body | {"n": 2}, timeout=0.2) as response:
                    async for _ in response.aiter_lines():
                        if chance.random() < 0.1:
                            break
            counts["left"] += 1
        elif kind < 0.75:
            answer = await http.post(PATH, json=body | {"stream": False})
            assert answer.json()["choices"][0]["text"] == wanted[i]
            counts["full"] += 1
        else:
            async with http.stream("POST", PATH, json=body) as response:
                data = [line[6:] async for line in response.aiter_lines() if line]
            assert data.pop() == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in data) == wanted[i]
            counts["full"] += 1

    async def main(live):
        async with httpx2.AsyncClient(base_url=live.url, timeout=60) as http, asyncio.TaskGroup() as group:

            async def client(number):
                chance = random.Random(number)
                for _ in range(8):
                    await one(http, chance)

            for number in range(16):
                group.create_task(client(number))

    with serving(engine) as live:
        asyncio.run(main(live))
        live.wait_idle()
        with live.client() as http:
            assert 'num_requests_running{model_name="tiny"} 0.0' in http.get("/metrics").text
    assert sum(counts.values()) == 128
    assert min(counts.values()) > 5
