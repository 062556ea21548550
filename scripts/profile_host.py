"""Times each part of `Engine.step` on the host, in microseconds, while rows decode.

    python scripts/profile_host.py --model tests/golden/models/tiny-chat --rows 1 32

`wait` is the time for which the host waits for the device; all else is host work, of which asynchronous scheduling
hides as much behind the device as the device takes. A tiny model makes the host's part visible, but XLA runs a step
that it holds for cheap (one row of a tiny model) inside `call`. Parts named "- x" lie inside the part above them.
`--clock cpu` counts the host thread's processor time, which other programs on the machine disturb less.
"""

import argparse
import collections
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxinfer import LLM, SamplingParams, load
from jaxinfer.engine import batch, runner

PARTS = (
    "step", "schedule", "dispatch", "- build_batch", "-- make_rows", "- token_mask", "- call", "wait", "read",
    "process", "- update", "rest", "host",
)  # fmt: skip


class Clock:
    """Adds up the seconds of each part of the step that runs."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.seconds = seconds
        self.now: collections.Counter[str] = collections.Counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with its time added to the part."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = self.seconds()
            result = function(*args, **kwargs)
            self.now[name] += self.seconds() - start
            return result

        return call


def watch(llm: LLM, clock: Clock) -> None:
    """Puts the clock around the parts of the engine's step."""
    engine = llm.engine
    read = engine.runner.read

    def wait_and_read(pending: Any) -> Any:
        clock.timed("wait", jax.block_until_ready)(pending.output.token_ids)
        return clock.timed("read", read)(pending)

    compile_step = engine.runner._compile

    @functools.cache
    def compiled(shape: Any) -> Any:
        return clock.timed("- call", compile_step(shape).__call__)

    scheduler: Any = engine.scheduler
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)
    scheduler.update = clock.timed("- update", scheduler.update)
    patched: Any = engine
    patched._process = clock.timed("process", engine._process)
    patched.runner.read = wait_and_read
    patched.runner._compile = compiled
    patched.runner._token_mask = clock.timed("- token_mask", engine.runner._token_mask)
    patched.runner.dispatch = clock.timed("dispatch", engine.runner.dispatch)
    runner.build_batch = clock.timed("- build_batch", runner.build_batch)
    batch.make_rows = clock.timed("-- make_rows", batch.make_rows)
    patched.step = clock.timed("step", engine.step)


def profile(llm: LLM, clock: Clock, rows: int, num_tokens: int) -> list[dict[str, float]]:
    """Returns the parts of the steps in which all rows decode."""
    engine, seen = llm.engine, []
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(rows):
        engine.add_request(str(i), [5 + i % 50] * 8, params)
    while engine.has_work:
        clock.now.clear()
        chunks = engine.step()
        if len(chunks) == rows and clock.now["schedule"] and clock.now["dispatch"]:
            seen.append(with_sums(clock.now))
    for i in range(rows):
        engine.pop_output(str(i))
    return seen[2:-2]  # the first dispatches and the last differ


def with_sums(parts: Mapping[str, float]) -> dict[str, float]:
    named = ("schedule", "dispatch", "wait", "read", "process")
    rest = parts["step"] - sum(parts[part] for part in named)
    return {**parts, "rest": rest, "host": parts["step"] - parts["wait"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each row")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--decode-steps", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, help="longest request; by default the model's limit")
    args = parser.parse_args()
    llm = LLM(
        load(args.model), max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens,
        decode_steps=args.decode_steps, max_model_len=args.max_model_len,
    )  # fmt: skip
    clock = Clock(time.thread_time if args.clock == "cpu" else time.perf_counter)
    watch(llm, clock)
    columns = {}
    for rows in args.rows:
        profile(llm, clock, rows, args.tokens)  # compiles
        steps = profile(llm, clock, rows, args.tokens)
        columns[f"S={rows}"] = {part: statistics.median(step[part] for step in steps) * 1e6 for part in PARTS}
    print(f"median microseconds of a step of {args.decode_steps} tokens a row")
    print(f"{'':16}" + "".join(f"{name:>10}" for name in columns))
    for part in PARTS:
        print(f"{part:16}" + "".join(f"{column[part]:10.0f}" for column in columns.values()))
    print(f"{'host share %':16}" + "".join(f"{100 * c['host'] / c['step']:10.1f}" for c in columns.values()))


if __name__ == "__main__":
    main()
