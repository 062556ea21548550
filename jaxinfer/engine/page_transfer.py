"""Copies KV pages between the device and host memory, without waiting.

A page on its way is one array for each kind of cache leaf (one for all layers' keys and values; with scales, two or
three), so that a transfer is few and long. On the host it lies in pinned memory where the device has that; the memory
of a CPU device is host memory already.
"""

import functools
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.page_copy import gather_pages, scatter_pages

log = logging.getLogger(__name__)

SIZES = (1, 8)  # pages of one operation, each compiled once

Page = tuple[jax.Array, ...]  # one array [G, K, ...] for each kind of leaf, of which there are G


class PageTransfer:
    """The device's side of the host tier."""

    def __init__(self, pages: Any, memory_kind: str | None = None):
        """Learns the shapes.

        Args:
            pages: tree of cache leaves [K, P, ...] on one device.
            memory_kind: of host memory; None takes the best that the device has.

        Raises:
            ValueError: the device reaches no host memory.
        """
        leaves, self._tree = jax.tree.flatten(pages)
        [device] = leaves[0].devices()
        self._device = jax.sharding.SingleDeviceSharding(device)
        self._host = jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind or _host_memory(device))
        kinds: dict[tuple, list[int]] = {}
        for i, leaf in enumerate(leaves):
            kinds.setdefault((leaf.shape[0], *leaf.shape[2:], leaf.dtype), []).append(i)
        self._groups = tuple(tuple(members) for members in kinds.values())
        self._shapes = [((len(members), *kind[:-1]), np.dtype(kind[-1])) for kind, members in kinds.items()]
        self.page_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes)

    def save(self, pages: Any, numbers: Sequence[int]) -> list[Page]:
        """Enqueues copies of pages to the host and returns them at once."""
        saved: list[Page] = []
        for part in _parts(numbers):
            gathered = _gather(self._groups, pages, _padded(part))[: len(part)]
            saved += gathered if self._host == self._device else jax.device_put(gathered, self._host)
        return saved

    def upload(self, page: Page) -> Page:
        """Starts to copy a page to the device."""
        return page if self._host == self._device else jax.device_put(page, self._device)

    def is_ready(self, page: Page) -> bool:
        """Returns whether the copy is done."""
        arrays: tuple[Any, ...] = page
        return all(array.is_ready() for array in arrays)

    def wait(self, page: Page) -> None:
        """Blocks until it is."""
        jax.block_until_ready(page)

    def load(self, pages: Any, staged: Sequence[Page], numbers: Sequence[int]) -> Any:
        """Returns `pages`, donated, with the staged ones put in their places."""
        leaves, at = jax.tree.leaves(pages), 0
        for part in _parts(numbers):
            destination = _padded(part)
            new = list(staged[at : at + len(part)])
            new += [new[0]] * (len(destination) - len(part))  # onto the null page
            at += len(part)
            for members, arrays in zip(self._groups, zip(*new)):
                stacked = _stack(arrays)
                for i, leaf in enumerate(members):
                    leaves[leaf] = _put(leaves[leaf], stacked, np.int32(i), destination)
        return jax.tree.unflatten(self._tree, leaves)

    def pack(self, page: Page) -> bytes:
        """Returns the content of a page."""
        return b"".join(np.asarray(array).tobytes() for array in page)

    def unpack(self, data: bytes) -> Page:
        """Returns the page of this content.

        Raises:
            ValueError: the content is not of this length.
        """
        if len(data) != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes, got {len(data)}")
        arrays, offset = [], 0
        for shape, dtype in self._shapes:
            count = math.prod(shape)
            arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
            offset += count * dtype.itemsize
        return tuple(jax.device_put(arrays, self._host))

    def warmup(self, pages: Any) -> tuple[Any, float]:
        """Compiles every operation on the null page; returns `pages`, donated, and bytes a second to the device."""
        rate = 0.0
        for size in SIZES:
            for _ in range(2):  # the first compiles
                saved = jax.block_until_ready(self.save(pages, [0] * size))
                start = time.perf_counter()
                pages = jax.block_until_ready(self.load(pages, [self.upload(page) for page in saved], [0] * size))
                rate = size * self.page_bytes / (time.perf_counter() - start)
        return pages, rate


def _host_memory(device: Any) -> str | None:
    if device.platform == "cpu":
        return None
    kinds = [memory.kind for memory in device.addressable_memories()]
    for kind in ("pinned_host", "unpinned_host"):
        if kind in kinds:
            if kind == "unpinned_host":
                log.warning("%s has no pinned host memory: pages move through unpinned memory", device)
            return kind
    raise ValueError(f"host_cache_bytes: {device} reaches no host memory, only {kinds}; set it to 0")


def _parts(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[i : i + SIZES[-1]] for i in range(0, len(numbers), SIZES[-1])]


def _padded(numbers: Sequence[int]) -> np.ndarray:
    """Returns page numbers padded with the null page to one of `SIZES`."""
    padded = np.zeros(next(size for size in SIZES if size >= len(numbers)), np.int32)
    padded[: len(numbers)] = numbers
    return padded


@functools.partial(jax.jit, static_argnums=0)
def _gather(groups: tuple[tuple[int, ...], ...], pages: Any, numbers: jax.Array) -> list[Page]:
    gathered = jax.tree.leaves(gather_pages(pages, numbers))
    stacked = [jnp.stack([gathered[i] for i in members]) for members in groups]  # [G, K, C, ...]
    return [tuple(array[:, :, c] for array in stacked) for c in range(numbers.shape[0])]


@jax.jit
def _stack(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack(arrays, axis=2)  # [G, K, C, ...]


# One leaf a call: a program that takes 60 slices of one array compiles for seconds on a CPU.
@functools.partial(jax.jit, donate_argnums=0)
def _put(leaf: jax.Array, stacked: jax.Array, i: Any, destination: Any) -> jax.Array:
    return scatter_pages(leaf, lax.dynamic_index_in_dim(stacked, i, keepdims=False), destination)
