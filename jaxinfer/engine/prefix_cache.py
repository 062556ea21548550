"""Finds pages that already hold a request's first tokens (automatic prefix caching, as in vLLM). Imports no jax.

The key of a full page is a hash of the key of the page before it and of its own tokens, so that it names the whole
text up to its end. The first follows a root, a hash of everything else that keys and values depend on. The hash is
cryptographic: equal keys are equal texts, even where somebody would like them not to be, and no tokens are compared.
A dictionary of token tuples would do for one process; hashes keep their meaning in other tiers and after a restart.
"""

import dataclasses
import hashlib
import itertools
from array import array

from jaxinfer.engine.host_tier import HostTier
from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import Request


@dataclasses.dataclass
class PrefixStats:
    """What was asked of the prefix cache and found."""

    num_queries: int = 0  # admissions of requests, those after a preemption included
    num_query_tokens: int = 0  # that they had to compute
    num_hit_tokens: int = 0  # of which so many were found

    @property
    def hit_rate(self) -> float:
        """Found tokens of those asked for."""
        return self.num_hit_tokens / max(1, self.num_query_tokens)


class PrefixCache:
    """Keys of requests' pages; the pool knows which page has which key.

    A page is published when a step that writes its last token has been enqueued and the host knows its tokens. The
    device runs steps in order, and in a layer it writes the keys and values of all rows before any row reads, so that
    even a request admitted to the same step may read it.
    """

    def __init__(self, pool: PagePool, live: LivePages, tier: HostTier | None = None, namespace: bytes = b""):
        """Makes a cache over `pool` and, for what that has evicted, `tier`.

        `live` says which pages a request needs. `namespace` goes into every key: pages that outlive the process mean
        something with the same model alone.
        """
        self._pool = pool
        self._live = live
        self._tier = tier
        self._namespace = namespace
        self.stats = PrefixStats()

    def match(self, request: Request) -> tuple[list[int], int]:
        """Returns the pages of as many first tokens of the request as can be found, and how many of theirs are dead.

        One token at least is left to be computed, since the next is sampled from it; of a request that wants
        log-probabilities of its prompt, or must know what attention its tokens receive (H2O), all are. Pages that
        nobody will look at need not be there.
        """
        if request.params.prompt_logprobs is not None or request.params.h2o is not None:
            return [], 0
        count = (request.num_known_tokens - 1) // self._pool.page_size
        self._make_keys(request, count)
        pages, num_sinks = [self._pool.find(key) for key in request.page_keys[:count]], self._live.num_sink_pages
        best, num_dead, run = 0, 0, 0  # run: where the pages begin that are there without a gap
        for i, page in enumerate(pages):
            if page is None:
                run = i + 1
                if i < num_sinks or self._live.window is None:
                    break  # no request can do without it
            else:
                dead = self._live.num_dead((i + 1) * self._pool.page_size)
                if run <= (num_sinks + dead if dead else 0):
                    best, num_dead = i + 1, dead
        found = pages[: min(num_sinks, best)] + pages[min(num_sinks, best) + num_dead : best]
        return [page for page in found if page is not None], num_dead

    def num_in_tier(self, request: Request, num_pages: int) -> int:
        """Returns how many of the pages that follow the first `num_pages`, which `match` has found, the tier has."""
        if self._tier is None or request.params.prompt_logprobs is not None or request.params.h2o is not None:
            return 0
        if self._live.num_dead(request.num_known_tokens):
            return 0  # it does not hold all pages up to its last token at once
        keys = request.page_keys[num_pages : (request.num_known_tokens - 1) // self._pool.page_size]
        return sum(1 for _ in itertools.takewhile(self._tier.__contains__, keys))

    def read_ahead(self, request: Request) -> None:
        """Lets the tier read from disk what a request will want."""
        if self._tier is not None:
            pages, num_dead = self.match(request)
            found = len(pages) + num_dead
            self._tier.read_ahead(request.page_keys[found : found + self.num_in_tier(request, found)])

    def count(self, request: Request, num_hit_tokens: int) -> None:
        """Counts an admission."""
        self.stats.num_queries += 1
        self.stats.num_query_tokens += request.num_tokens
        self.stats.num_hit_tokens += num_hit_tokens

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publishes the full pages among the first `num_tokens` tokens, which enqueued steps write.

        None of a request with H2O, which writes anew where it has forgotten.
        """
        if request.params.h2o is not None:
            return
        count = num_tokens // self._pool.page_size
        if count <= request.num_published_pages:
            return
        self._make_keys(request, count)
        num_sinks, num_dead = self._live.num_sink_pages, request.num_dead_pages
        for i in range(request.num_published_pages, count):
            if i < num_sinks or i >= num_sinks + num_dead:  # a small window may have left a page before it was read
                self._pool.publish(request.pages[i if i < num_sinks else i - num_dead], request.page_keys[i])
        request.num_published_pages = count

    def _make_keys(self, request: Request, count: int) -> None:
        keys, size = request.page_keys, self._pool.page_size
        for i in range(len(keys), count):
            parent = keys[-1] if keys else self._root(request)
            tokens = array("i", request.token_ids(i * size, (i + 1) * size)).tobytes()
            keys.append(hashlib.blake2b(parent + tokens, digest_size=32).digest())

    def _root(self, request: Request) -> bytes:
        """Returns the key before the first page."""
        return hashlib.blake2b(self._namespace + repr(request.cache_salt).encode(), digest_size=32).digest()
