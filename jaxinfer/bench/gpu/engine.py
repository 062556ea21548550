"""The whole engine, without text: scheduler, runner and step, on a Llama-3-8B-shaped model with random weights."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.batch import Buckets
from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.memory import free_memory, plan_pages
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.engine.runner import ModelRunner, PendingStep
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.model.params import Params, abstract_params
from jaxinfer.model.spec import DecoderSpec
from jaxinfer.sampling.params import SamplingParams

type Items = Iterator[tuple[str, Callable[[], dict[str, Any]]]]

_TINY = ModelConfig("llama", 256, 64, 128, 2, 4, 2, 16, 1024, 1e-5, 1e4)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    rows: tuple[int, ...]  # of the decode steps
    chunk: int  # tokens of the ragged step
    prompt: int  # tokens of every row before it decodes
    window: int  # tokens a row over which decoding is timed
    prefill: int  # tokens of the long prompt


_FULL = _Sizes((1, 32, 128), 2048, 512, 64, 8192)
_DRY = _Sizes((1, 4), 32, 8, 8, 64)


def items(dry_run: bool) -> Items:
    """Yields compilation, prefill, and decode at several numbers of rows, on one model made by the first."""
    from jaxinfer.compile_check.model_shapes import MODEL_SHAPES

    config, sizes = (_TINY, _DRY) if dry_run else (MODEL_SHAPES["llama-3-8b"], _FULL)
    start = functools.cache(functools.partial(_start, config, sizes))
    yield "compile", functools.partial(_compile, start)
    yield "prefill", functools.partial(_prefill, start, sizes)
    for rows in sizes.rows:
        yield f"decode, {rows} rows", functools.partial(_decode, start, sizes, rows)


def _random_params(config: ModelConfig) -> Params:
    """Normal weights made leaf by leaf on the device: quicker to compile than the model's own initialisation."""
    abstract, _ = abstract_params(config, jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def make(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        scale = jnp.bfloat16(shape[-1] ** -0.5)
        return jax.random.normal(key, shape, jnp.bfloat16) * scale if len(shape) > 1 else jnp.ones(shape, jnp.bfloat16)

    leaves, structure = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(structure, [make(leaf.shape, key) for leaf, key in zip(leaves, keys)])


type _Start = Callable[[], tuple[Scheduler, ModelRunner]]


def _start(config: ModelConfig, sizes: _Sizes) -> tuple[Scheduler, ModelRunner]:
    params = _random_params(config)
    [device] = jax.tree.leaves(params)[0].devices()
    rows = max(sizes.rows)
    engine = EngineConfig(
        seed=0,
        max_num_seqs=rows,
        max_num_batched_tokens=sizes.chunk,
        max_model_len=2 * max(sizes.prefill, 64),
        prefix_cache=False,  # a prompt measured twice is computed twice
    )
    pages, length = plan_pages(
        config, engine, engine.kv_spec("bfloat16"), free_memory(device), device.platform == "cpu"
    )
    runner = ModelRunner(
        DecoderSpec(config, jnp.dtype(jnp.bfloat16)), params, engine, num_pages=pages, max_model_len=length,
        stop_token_ids=frozenset(),
    )  # fmt: skip
    # Few shapes, since each takes long to compile: everything that is not pure decoding is padded to one.
    runner.buckets = Buckets(sizes.rows, (sizes.chunk,), (rows,), runner.buckets.pages_per_row)
    return Scheduler(engine, PagePool(pages, engine.page_size), LivePages.of(config, engine)), runner


def _compile(start: _Start) -> dict[str, Any]:
    begin = time.perf_counter()
    scheduler, runner = start()
    made = time.perf_counter() - begin
    runner.compile(runner.buckets.all())
    shapes, pages = runner.stats.num_compiled, scheduler.pool.num_free
    return {"weights_s": made, "compile_s": time.perf_counter() - begin - made, "shapes": shapes, "pages": pages}


class _Loop:
    """The loop of `Engine.step` without text: the step enqueued now is read after the next one is enqueued."""

    def __init__(self, start: _Start):
        self.scheduler, self.runner = start()
        self.pending: PendingStep | None = None

    def add(self, prompts: list[list[int]], answer: int) -> list[Request]:
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        requests = [Request(str(i), prompt, params, answer, i) for i, prompt in enumerate(prompts)]
        for request in requests:
            self.scheduler.add(request)
        return requests

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            scheduled = self.scheduler.schedule()
            for request in scheduled.admitted:
                self.runner.install(request)
            enqueued = self.runner.dispatch(scheduled) if scheduled.rows else None
            self._read()
            self.pending = enqueued

    def stop(self, requests: list[Request]) -> None:
        self._read()
        self.pending = None
        for request in requests:
            self.scheduler.finish(request, FinishReason.ABORT)

    def _read(self) -> None:
        if self.pending is not None:
            self.scheduler.update(self.pending.scheduled, self.runner.read(self.pending).token_ids)


def _decode(start: _Start, sizes: _Sizes, rows: int) -> dict[str, Any]:
    """Times the tokens of all rows together, once every row has its first."""
    loop, times, tokens = _Loop(start), [], []
    config = loop.runner.decoder.config
    chunks = -(-rows * sizes.prompt // sizes.chunk)  # steps in which the first rows decode while others are prefilled
    for _ in range(3):
        requests = loop.add(_prompts(config, rows, sizes.prompt), 2 * chunks + 2 * sizes.window + 16)

        def count(requests: list[Request] = requests) -> int:
            return sum(len(request.output_token_ids) for request in requests)

        loop.run_until(lambda requests=requests: all(request.output_token_ids for request in requests))
        begin, before = time.perf_counter(), count()
        loop.run_until(lambda count=count, goal=before + rows * sizes.window: count() >= goal)
        times.append(time.perf_counter() - begin)
        tokens.append(count() - before)
        loop.stop(requests)
    rates = sorted(n / seconds for n, seconds in zip(tokens, times))
    bound = _bound(config, rows, sizes.prompt)
    return {"tok_per_s": rates[1], "spread": (rates[2] - rates[0]) / rates[1], "ms_per_step": rows / rates[1] * 1e3,
            "h200_bound_tok_per_s": bound}  # fmt: skip


def _prefill(start: _Start, sizes: _Sizes) -> dict[str, Any]:
    """Times a long prompt, in chunks, up to its first token."""
    loop, times = _Loop(start), []
    for _ in range(3):
        begin = time.perf_counter()
        requests = loop.add(_prompts(loop.runner.decoder.config, 1, sizes.prefill), 1)
        loop.run_until(lambda requests=requests: bool(requests[0].output_token_ids))
        times.append(time.perf_counter() - begin)
    times.sort()
    return {"tok_per_s": sizes.prefill / times[1], "spread": (times[2] - times[0]) / times[1], "chunk": sizes.chunk}


def _prompts(config: ModelConfig, rows: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, config.vocab_size, (rows, length)).tolist()


def _bound(config: ModelConfig, rows: int, context: int) -> float:
    """Tokens a second that an H200 could reach at most."""
    from jaxinfer.compile_check.plan import make_plan
    from jaxinfer.compile_check.roofline import decode_roofline

    plan = make_plan(config, "h200", context=context, max_num_seqs=rows, max_num_batched_tokens=max(rows, 16))
    return rows / decode_roofline(plan).seconds
