"""Finds pages that already hold a request's first tokens (automatic prefix caching, as in vLLM). Imports no jax.

The key of a full page is a hash of the key of the page before it and of its own tokens, so that it names the whole
text up to its end. The first follows a root, a hash of everything else that keys and values depend on. The hash is
cryptographic: equal keys are equal texts, even where somebody would like them not to be, and no tokens are compared.
A dictionary of token tuples would do for one process; hashes keep their meaning in other tiers and after a restart.
"""

import dataclasses
import hashlib
from array import array

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

    def __init__(self, pool: PagePool, live: LivePages):
        """Makes an empty cache over `pool`; `live` says which pages a request needs."""
        self._pool = pool
        self._live = live
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
            parent = keys[-1] if keys else _root(request)
            tokens = array("i", request.token_ids(i * size, (i + 1) * size)).tobytes()
            keys.append(hashlib.blake2b(parent + tokens, digest_size=32).digest())


def _root(request: Request) -> bytes:
    """Returns the key before the first page."""
    return hashlib.blake2b(repr(request.cache_salt).encode(), digest_size=32).digest()
