"""The whole engine, without text: scheduler, runner and step, on a Llama-3-8B-shaped model with random weights."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.memory import free_memory, plan_pages
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import Request
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.model.decoder import Decoder
from jaxinfer.model.params import Params, abstract_params
from jaxinfer.sampling.params import SamplingParams

type Items = Iterator[tuple[str, Callable[[], dict[str, Any]]]]

_TINY = ModelConfig("llama", 256, 64, 128, 2, 4, 2, 16, 1024, 1e-5, 1e4)


def items(dry_run: bool) -> Items:
    """Yields decode at several numbers of rows and prefill; the model is made by the first and kept."""
    from jaxinfer.compile_check.model_shapes import MODEL_SHAPES

    config = _TINY if dry_run else MODEL_SHAPES["llama-3-8b"]
    make = functools.cache(functools.partial(_random_params, config))
    prompt, answer = (8, 8) if dry_run else (512, 128)
    yield "prefill", functools.partial(_prefill, config, make, 64 if dry_run else 8192, 32 if dry_run else 2048)
    for rows in (1, 4) if dry_run else (1, 32, 128):
        yield f"decode, {rows} rows", functools.partial(_decode, config, make, rows, prompt, answer)


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


def _start(config: ModelConfig, params: Params, **limits: Any) -> tuple[Scheduler, ModelRunner]:
    [device] = jax.tree.leaves(params)[0].devices()
    engine = EngineConfig(seed=0, **limits)
    pages, length = plan_pages(config, engine, 2, free_memory(device), device.platform == "cpu")
    runner = ModelRunner(
        Decoder(config, jnp.dtype(jnp.bfloat16)), params, engine, num_pages=pages, max_model_len=length,
        stop_token_ids=frozenset(),
    )  # fmt: skip
    return Scheduler(engine, PagePool(pages, engine.page_size)), runner


def _run(scheduler: Scheduler, runner: ModelRunner, prompts: list[list[int]], answer: int) -> dict[str, float]:
    """Returns seconds to the last first token and in all; the loop is that of `Engine.step`, one step ahead."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    requests = [Request(str(i), prompt, params, answer, i) for i, prompt in enumerate(prompts)]
    start, first, pending = time.perf_counter(), 0.0, None
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished or pending is not None:
        scheduled = scheduler.schedule()
        for request in scheduled.admitted:
            runner.install(request)
        enqueued = runner.dispatch(scheduled) if scheduled.rows else None
        if pending is not None:
            scheduler.update(pending.scheduled, runner.read(pending).token_ids)
        if not first and all(request.output_token_ids for request in requests):
            first = time.perf_counter() - start
        pending = enqueued
    return {"first_s": first, "total_s": time.perf_counter() - start}


def _decode(config: ModelConfig, make: Callable[[], Params], rows: int, prompt: int, answer: int) -> dict[str, Any]:
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": max(2 * prompt, rows), "max_model_len": prompt + answer}
    scheduler, runner = _start(config, make(), **limits)
    prompts = _prompts(config, rows, prompt)
    _run(scheduler, runner, prompts, answer)  # compiles
    runs = [_run(scheduler, runner, prompts, answer) for _ in range(3)]
    times = sorted(run["total_s"] - run["first_s"] for run in runs)
    tokens = rows * (answer - 1)
    return {
        "tok_per_s": tokens / times[1],
        "spread": (times[2] - times[0]) / times[1],
        "ms_per_step": times[1] / (answer - 1) * 1e3,
        "compile_s": runner.stats.seconds,
        "h200_bound_tok_per_s": _bound(config, rows, prompt + answer // 2),
    }


def _prefill(config: ModelConfig, make: Callable[[], Params], length: int, chunk: int) -> dict[str, Any]:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": chunk, "max_model_len": length + 16}
    scheduler, runner = _start(config, make(), **limits)
    prompts = _prompts(config, 1, length)
    _run(scheduler, runner, prompts, 1)
    times = sorted(_run(scheduler, runner, prompts, 1)["total_s"] for _ in range(3))
    return {"tok_per_s": length / times[1], "spread": (times[2] - times[0]) / times[1], "chunk": chunk,
            "compile_s": runner.stats.seconds}  # fmt: skip


def _prompts(config: ModelConfig, rows: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, config.vocab_size, (rows, length)).tolist()


def _bound(config: ModelConfig, rows: int, context: int) -> float:
    """Tokens a second that an H200 could reach at most."""
    from jaxinfer.compile_check.plan import make_plan
    from jaxinfer.compile_check.roofline import decode_roofline

    plan = make_plan(config, "h200", context=context, max_num_seqs=rows, max_num_batched_tokens=max(rows, 16))
    return rows / decode_roofline(plan).seconds
