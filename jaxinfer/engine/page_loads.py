"""Brings back the pages of admitted requests from the host tier. Touches only integers; imports no jax.

A request is admitted with all its pages, some of which are still on their way. It runs when they have arrived; the
steps of others go on meanwhile.
"""

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.host_tier import MAX_STAGED, HostTier
from jaxinfer.engine.prefix_cache import PrefixCache
from jaxinfer.engine.request import Request

Load = tuple[Any, int]  # a page on the device, outside the pool, and the page of the pool where it goes


class PageLoads:
    """What `Request.num_pages_to_load` counts."""

    def __init__(self, tier: HostTier, prefix_cache: PrefixCache, page_size: int):
        """Takes keys from `prefix_cache` and pages from `tier`."""
        self._tier = tier
        self._prefix_cache = prefix_cache
        self._page_size = page_size

    def schedule(self, running: Sequence[Request]) -> list[Load]:
        """Returns the pages that have arrived, and lets the next ones start.

        A request's pages come in order, so that its computed tokens are always its first. Where one is lost (its file
        was damaged), the request computes the rest.
        """
        waiting = [request for request in running if request.num_pages_to_load]
        if not waiting:
            return []
        self._tier.stage([key for request in waiting for key in self._keys(request)])
        return [load for request in waiting for load in self._arrived(request)]

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
            request.num_computed_tokens += self._page_size
            self._prefix_cache.publish(request, request.num_computed_tokens)
            self._prefix_cache.stats.num_hit_tokens += self._page_size
            if not request.metrics.num_preemptions:
                request.metrics.num_cached_tokens += self._page_size
        return loads
