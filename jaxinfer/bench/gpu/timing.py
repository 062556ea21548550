"""Times of device programs: what one call costs the device when calls follow each other."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

REPEATS = 7
INNER = 16  # calls of one program; it has no host in between


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: median over runs, and the spread (max - min) / median."""

    seconds: float
    spread: float
    runs: int

    def as_data(self, **rates: float) -> dict[str, float]:
        """Returns plain data; `rates` are amounts a call, given as amounts a second."""
        data = {"us": self.seconds * 1e6, "spread": self.spread, "runs": self.runs}
        return data | {name: amount / self.seconds for name, amount in rates.items()}


def time_device(function: Callable[..., Any], *arguments: Any, inner: int = INNER, repeats: int = REPEATS) -> Timing:
    """Returns the time of one call of a pure function, taken from a program that makes `inner` calls in a row.

    Each call waits for the one before by a scalar that the compiler cannot see through, so that none is left out or
    moved out of the loop; the scalar costs a kernel launch, a few microseconds.
    """

    @jax.jit
    def chain(arguments: tuple) -> jax.Array:
        def body(_: int, token: jax.Array) -> jax.Array:
            held, _ = lax.optimization_barrier((arguments, token))
            out = lax.optimization_barrier(function(*held))  # whole: else only the element below would be computed
            leaf = jax.tree.leaves(out)[0]
            return lax.slice(leaf.ravel(), (0,), (1,)).astype(jnp.float32)[0]

        return lax.fori_loop(0, inner, body, jnp.float32(0))

    return time_host(lambda: chain(arguments), calls=inner, repeats=repeats)


def time_host(run: Callable[[], Any], *, calls: int = 1, repeats: int = REPEATS) -> Timing:
    """Returns the time of one of the `calls` that `run` makes, after two runs to compile and warm up."""
    for _ in range(2):
        jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append((time.perf_counter() - start) / calls)
    median = statistics.median(times)
    return Timing(median, (max(times) - min(times)) / median, repeats)
