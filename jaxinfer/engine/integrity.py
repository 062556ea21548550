"""What must hold of the scheduler's requests after every move. Imports no jax."""

from collections.abc import Sequence

from jaxinfer.engine.compaction import check_compaction
from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import Request, Status


def check_queues(waiting: Sequence[Request], running: Sequence[Request], forks: Sequence[Request]) -> None:
    """Checks the order of queues, and that who waits holds nothing.

    Raises:
        RuntimeError: something is wrong.
    """
    for queue, status in ((waiting, Status.WAITING), (running, Status.RUNNING)):
        if [r.sort_key for r in queue] != sorted(r.sort_key for r in queue):
            raise RuntimeError("a queue is out of order")
        for request in queue:
            if request.status is not status:
                raise RuntimeError(f"{request.request_id} has status {request.status} in the queue of {status}")
            if request.num_in_flight < 0:
                raise RuntimeError(f"{request.request_id}: {request.num_in_flight} tokens are in flight")
    for request in (*waiting, *forks):
        counts = request.num_pages, request.num_computed_tokens, request.num_published_pages
        if any(counts) or request.num_pages_to_load or request.slot is not None:
            raise RuntimeError(f"{request.request_id} waits and holds pages, a slot or computed tokens")


def check_counters(request: Request, pool: PagePool, live: LivePages) -> None:
    """Checks what a running request holds against what it has computed.

    Raises:
        RuntimeError: something is wrong.
    """
    name, computed, size = request.request_id, request.num_computed_tokens, pool.page_size
    published = request.num_published_pages * size
    if published > computed:
        raise RuntimeError(f"{name}: {request.num_published_pages} pages published, {computed} tokens computed")
    if request.num_pages_to_load and published != computed:
        raise RuntimeError(f"{name} waits for pages and has computed beyond them")
    held = request.num_pages * size
    if computed > request.num_tokens or request.num_places(computed) > held:
        raise RuntimeError(f"{name}: {computed} tokens computed, room for {held}")
    check_compaction(request, pool)
    if request.num_dead_pages > live.num_dead(computed):
        raise RuntimeError(f"{name} has given back pages that its next token sees")
