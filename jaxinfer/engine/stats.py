"""`EngineStats`: a snapshot of the engine for its users."""

import dataclasses

from jaxinfer.engine.host_tier import TierStats
from jaxinfer.engine.prefix_cache import PrefixStats
from jaxinfer.engine.runner import CompileStats


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine.

    Attributes:
        num_waiting: requests that have no slot yet.
        num_running: requests that have one.
        num_free_pages: KV pages that can be allocated.
        num_cached_pages: those of them that hold tokens which a new request may begin with.
        num_used_pages: pages that requests hold.
        num_shared_pages: those of them that several requests hold.
        kv_bytes_per_token: as allocated, all layers.
        kv_waste: share of the places in used pages for which their requests have no token.
        prefix_cache: what it was asked and has found.
        tiers: what pages are in host memory and on disk, and how many were moved.
        num_evictions: cached pages whose memory was needed.
        num_page_copies: pages copied for forks.
        num_dead_pages: pages that running requests have given back, since no later token sees them.
        num_prefill_tokens: tokens computed, but for those that were just sampled.
        num_preemptions: requests that lost their pages, counted each time.
        num_steps: dispatches.
        compile: what compilation has cost.
    """

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_used_pages: int
    num_shared_pages: int
    kv_bytes_per_token: float
    kv_waste: float
    prefix_cache: PrefixStats
    tiers: TierStats
    num_evictions: int
    num_page_copies: int
    num_dead_pages: int
    num_prefill_tokens: int
    num_preemptions: int
    num_steps: int
    compile: CompileStats
