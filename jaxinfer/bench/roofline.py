"""What this machine can do at most: a matrix product and a read of memory, measured."""

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Measured peaks (Williams et al., 2009): no step takes less than max(flops / flop_s, bytes / byte_s)."""

    flop_s: float
    byte_s: float

    def best(self, other: "Roofline") -> "Roofline":
        """Returns the higher of two measurements of each limit."""
        return Roofline(max(self.flop_s, other.flop_s), max(self.byte_s, other.byte_s))

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Returns the least time for so much work."""
        return max(flops / self.flop_s, num_bytes / self.byte_s)


def measure_roofline(*, size: int = 1024, read_mib: int = 256, repeats: int = 5) -> Roofline:
    """Returns the best of several runs on the default device, which take about a second.

    On CPU the product is in float32, elsewhere in bfloat16; arithmetic in 8 bits can go beyond it.

    Args:
        size: the product is [size, size] by [size, size].
        read_mib: memory that is read, in MiB; about what a step reads of weights, several times the last cache.
        repeats: runs of each.
    """
    on_cpu = jax.default_backend() == "cpu"
    a = jnp.ones((size, size), jnp.float32 if on_cpu else jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    product = _best(lambda: multiply(a, a).block_until_ready(), repeats)
    if on_cpu:  # XLA may sum on one core
        x = np.ones(read_mib * 2**20 // 4, np.float32)
        read = _read_by_threads(x, repeats)
    else:
        x = jnp.ones(read_mib * 2**20 // 4, jnp.float32)
        add = jax.jit(jnp.sum)
        read = _best(lambda: add(x).block_until_ready(), repeats)
    return Roofline(2 * size**3 / product, x.nbytes / read)


def _read_by_threads(x: np.ndarray, repeats: int) -> float:
    parts = np.array_split(x, os.cpu_count() or 1)
    with ThreadPoolExecutor(len(parts)) as pool:  # NumPy reduces outside Python's lock
        return _best(lambda: list(pool.map(np.max, parts)), repeats)


def _best(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
