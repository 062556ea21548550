"""AsyncEngine: concurrent streams, cancellation, bad requests, shutdown."""

import asyncio
import dataclasses

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.async_engine import AsyncEngine
from jaxinfer.engine.engine import Engine
from jaxinfer.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=80)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96))


async def text_of(engine, prompt, params=GREEDY):
    return "".join([chunk.text async for chunk in engine.generate(prompt, params)])


def test_concurrent_streams_equal_the_naive_loop(engine, naive):
    async def main():
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*(text_of(served, f"hello {i}") for i in range(9)))

    assert asyncio.run(main()) == [naive.run(f"hello {i}", GREEDY)[1] for i in range(9)]


def test_leaving_a_stream_aborts_its_request_and_no_other(engine, naive):
    async def main():
        async with AsyncEngine(engine) as served:
            others = [asyncio.create_task(text_of(served, f"hello {i}")) for i in range(3)]
            async for _ in served.generate("left", LONG):
                break
            cancelled = asyncio.create_task(text_of(served, "cancelled", LONG))
            waiting = [asyncio.create_task(text_of(served, "never begun", LONG)) for _ in range(8)]
            await asyncio.sleep(0.02)
            for task in (cancelled, *waiting):
                task.cancel()
            texts = await asyncio.gather(*others)
            while (await served.stats()).num_used_pages:  # the aborts arrive by the engine's queue
                await asyncio.sleep(0.01)
            return texts, await served.stats()

    texts, stats = asyncio.run(main())
    assert texts == [naive.run(f"hello {i}", GREEDY)[1] for i in range(3)]
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    engine.scheduler.check_integrity()


def test_a_fork_has_a_stream_of_its_own(engine, naive):
    async def main():
        async with AsyncEngine(engine) as served:
            source = served.generate("hello", LONG, request_id="source")
            await anext(source)
            texts = [chunk.text async for chunk in served.fork("source", longer)]
            await source.aclose()
            with pytest.raises(ValueError, match="no completion 0 of a request 'source' to fork"):
                await anext(served.fork("source"))
            return "".join(texts)

    longer = dataclasses.replace(LONG, max_tokens=LONG.max_tokens - 1)  # than what the source may have said by then
    assert asyncio.run(main()) == naive.run("hello", longer)[1]


def test_a_bad_request_fails_alone(engine):
    async def main():
        async with AsyncEngine(engine) as served:
            good = asyncio.create_task(text_of(served, "hello"))
            with pytest.raises(ValueError, match="the prompt is empty"):
                await text_of(served, "")
            return await good

    assert asyncio.run(main())


def test_stopping_fails_open_requests_instead_of_hanging(engine):
    async def main():
        served = AsyncEngine(engine)
        served.start()
        stream = served.generate("hello", LONG)
        await anext(stream)
        await asyncio.to_thread(served.stop)
        with pytest.raises(RuntimeError, match="the engine stopped before this request was finished"):
            async for _ in stream:
                pass
        with pytest.raises(RuntimeError, match="the engine is not running"):
            await text_of(served, "hello")

    asyncio.run(main())


def test_a_failing_step_reaches_every_caller(model, monkeypatch):
    engine = Engine(model, EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96))
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    async def main():
        served = AsyncEngine(engine)
        served.start()
        results = await asyncio.gather(*(text_of(served, "hello") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(result, RuntimeError) for result in results)
        assert any(isinstance(result.__cause__, ZeroDivisionError) for result in results)
        await asyncio.to_thread(served.stop)  # the thread has ended before its excepthook is put back

    asyncio.run(main())
