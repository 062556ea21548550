"""Which pages go to the host tier and which come back. Touches only integers; imports no jax.

A request is admitted with all its pages, some of which are still on their way. It runs when they have arrived; the
steps of others go on meanwhile.
"""

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.host_tier import MAX_STAGED, HostTier
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.request import Request
from jaxinfer.engine.swap_cost import SwapCost

Load = tuple[Any, int]  # a page on the device, outside the pool, and the page of the pool where it goes
Save = tuple[int, bytes]  # a page that the pool has evicted, and its key


class PageMoves:
    """What comes back, as `Request.num_pages_to_load` counts it, and what goes."""

    def __init__(self, tier: HostTier, pool: PagePool, prefix_cache: PrefixCache, preemption: str, cost: SwapCost):
        """Moves pages between `pool` and `tier` under the keys of `prefix_cache`; for the rest see `EngineConfig`."""
        self._tier = tier
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._preemption = preemption
        self._cost = cost

    def num_to_load(self, request: Request) -> int:
        """Returns how many pages after those found on the device come from the tier."""
        count = self._prefix_cache.num_in_tier(request, request.num_published_pages)
        if not count or not request.metrics.num_preemptions or self._preemption == "swap":
            return count
        num_bytes, num_tokens = count * self._tier.page_bytes, count * self._pool.page_size
        return count if self._preemption == "auto" and self._cost.is_swap_cheaper(num_bytes, num_tokens) else 0

    def loads(self, running: Sequence[Request]) -> list[Load]:
        """Returns the pages that have arrived, and lets the next ones start.

        A request's pages come in order, so that its computed tokens are always its first. Where one is lost (its file
        was damaged), the request computes the rest.
        """
        waiting = [request for request in running if request.num_pages_to_load]
        self._tier.stage([key for request in waiting for key in self._keys(request)])
        return [load for request in waiting for load in self._arrived(request)]

    def saves(self, evicted: Sequence[Save]) -> list[Save]:
        """Returns those of the evicted pages that the tier does not have."""
        return [(page, key) for page, key in evicted if key not in self._tier]

    def _keys(self, request: Request) -> list[bytes]:
        first = request.num_published_pages
        return request.page_keys[first : first + min(request.num_pages_to_load, MAX_STAGED)]

    def _arrived(self, request: Request) -> list[Load]:
        loads = []
        for key in self._keys(request):
            if key not in self._tier:
                request.num_pages_to_load = 0
                break
            page = self._tier.take(key)
            if page is None:
                break
            loads.append((page, request.pages[request.num_published_pages]))
            request.num_pages_to_load -= 1
            request.num_computed_tokens += self._pool.page_size
            self._prefix_cache.publish(request, request.num_computed_tokens)
            self._prefix_cache.stats.num_hit_tokens += self._pool.page_size
            if not request.metrics.num_preemptions:
                request.metrics.num_cached_tokens += self._pool.page_size
        return loads
