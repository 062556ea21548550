"""The host's side of H2O: a request whose prompt has been computed lets go of the pages beyond its budget.

Imports no jax. The device moves what is kept into the first pages (`model/heavy_hitters.py`), in the order of steps:
whoever gets one of the other pages writes it later.
"""

import dataclasses

from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import Request
from jaxinfer.sampling.h2o import H2O


@dataclasses.dataclass(frozen=True)
class Compaction:
    """What one request forgets: of the `num_tokens` tokens in `pages`, `h2o` are kept, in the first of these pages."""

    pages: tuple[int, ...]
    num_tokens: int
    h2o: H2O


def compact(request: Request, pool: PagePool) -> list[Compaction]:
    """Frees the pages that a request needs no more, if its prompt has been computed and exceeds its budget.

    Returns what the device must do before the step of which the request's next token is a part.
    """
    h2o, count = request.params.h2o, request.num_prompt_tokens
    if h2o is None or not request.needs_compaction or request.num_computed_tokens < count:
        return []
    done = Compaction(tuple(request.pages), count, h2o)
    kept = pool.pages_for(h2o.budget)
    pool.free(request.pages[kept:])
    del request.pages[kept:]
    request.is_compacted = True
    return [done]


def check_compaction(request: Request, pool: PagePool) -> None:
    """Checks the pages of a running request with H2O.

    Raises:
        RuntimeError: they are published, or more than the budget needs.
    """
    h2o = request.params.h2o
    if h2o is None:
        if request.is_compacted:
            raise RuntimeError(f"{request.request_id} has no H2O budget and is compacted")
        return
    if request.num_published_pages:
        raise RuntimeError(
            f"{request.request_id} writes its pages anew and has published {request.num_published_pages}"
        )
    begun = request.num_computed_tokens > request.num_exact_tokens
    if begun and request.needs_compaction:
        raise RuntimeError(f"{request.request_id} goes on after its prompt and has not been compacted")
    if (request.is_compacted or begun) and len(request.pages) > pool.pages_for(h2o.budget):
        raise RuntimeError(f"{request.request_id} holds {len(request.pages)} pages for {h2o.budget} tokens")
