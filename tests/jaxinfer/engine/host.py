"""What the tests of the host side share: requests without a model, and a device that samples what it is told to."""

from jaxinfer.config import EngineConfig
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.sampling.params import SamplingParams


def make_request(name, num_prompt=4, max_tokens=8, *, priority=0, stop=(), bad_words=(), params=None, seed=0):
    """A request whose prompt is 100, 101, ..."""
    return Request(
        str(name), list(range(100, 100 + num_prompt)), params or SamplingParams(), max_tokens, seed,
        stop_token_ids=frozenset(stop), bad_words=bad_words, priority=priority,
    )  # fmt: skip


def make_scheduler(num_pages=1000, **config):
    """A scheduler over pages of one token, one step a dispatch, no prefix cache, unless options say otherwise."""
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "page_size": 1,
        "decode_steps": 1,
        "prefix_cache": False,
    }
    config = EngineConfig(**defaults | config)
    return Scheduler(config, PagePool(num_pages, config.page_size))


def add(scheduler, *requests):
    for request in requests:
        scheduler.add(request)


def run(scheduler, token=7):
    """One synchronous step in which every sample is `token`; returns the step."""
    step = scheduler.schedule()
    scheduler.update(step, [[token] * row.num_samples for row in step.rows])
    scheduler.check_integrity()
    return step


def run_until(scheduler, condition, token=7, limit=50):
    for _ in range(limit):
        if condition():
            return
        run(scheduler, token)
    raise AssertionError(f"not reached in {limit} steps")


def rows_of(step):
    """The rows as (name, start, num_tokens, num_samples)."""
    return [(row.request.request_id, row.start, row.num_tokens, row.num_samples) for row in step.rows]


def names(requests):
    return [request.request_id for request in requests]


def assert_all_free(scheduler):
    assert not scheduler.has_unfinished
    assert scheduler.pool.num_used == 0
    assert len(scheduler._free_slots) == scheduler.config.max_num_seqs
    scheduler.check_integrity()
