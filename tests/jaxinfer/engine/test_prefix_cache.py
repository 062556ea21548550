"""Which pages a request finds, and what it computes itself."""

import pytest

from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.engine.host import add, assert_all_free, make_scheduler, names, rows_of, run, run_until


@pytest.fixture
def scheduler():
    return make_scheduler(page_size=4, prefix_cache=True, max_num_batched_tokens=64)


def request(name, prompt, max_tokens=1, *, salt=None, params=None):
    return Request(name, list(prompt), params or SamplingParams(), max_tokens, 0, cache_salt=salt)


def serve(scheduler, *requests, token=7):
    """Runs requests to their ends; returns the tokens that each had not to compute."""
    add(scheduler, *requests)
    run_until(scheduler, lambda: all(r.is_finished for r in requests), token)
    return [r.metrics.num_cached_tokens for r in requests]


def test_full_pages_of_an_equal_beginning_are_found(scheduler):
    assert serve(scheduler, request("a", range(10))) == [0]
    found = [request("b", [*range(10), 90]), request("c", [*range(7), 90, 91]), request("d", range(1, 11))]
    assert serve(scheduler, *found) == [8, 4, 0]
    stats = scheduler.prefix_cache.stats
    assert (stats.num_queries, stats.num_query_tokens, stats.num_hit_tokens) == (4, 10 + 11 + 9 + 10, 12)
    assert stats.hit_rate == 12 / 40
    assert scheduler.num_prefill_tokens == 10 + 3 + 5 + 10


def test_equal_pages_after_another_beginning_are_not_found(scheduler):
    serve(scheduler, request("a", range(12)))
    assert serve(scheduler, request("b", [99, *range(1, 12)]), request("c", range(4, 12))) == [0, 0]


@pytest.mark.parametrize("length", [8, 9])
def test_one_token_is_computed_although_all_are_there(scheduler, length):
    serve(scheduler, request("a", range(length)))
    add(scheduler, again := request("b", range(length)))
    assert rows_of(run(scheduler)) == [("b", start := 4 * ((length - 1) // 4), length - start, 1)]
    assert again.is_finished


def test_the_next_turn_finds_the_answer_but_for_a_last_token_that_was_never_computed(scheduler):
    first = request("a", range(6), 10)
    serve(scheduler, first)
    turn = [*first.prompt_token_ids, *first.output_token_ids]  # 16 tokens, of which 15 were computed
    assert serve(scheduler, request("b", [*turn, 1, 2])) == [12]
    assert serve(scheduler, request("c", [*turn, 1, 2])) == [16]


def test_surplus_of_a_stop_token_is_not_found(scheduler):
    """The device stops at the stop token; what the step had been given places for was not written."""
    first = request("a", range(3), 9)
    first.stop_token_ids = frozenset({42})
    add(scheduler, first)
    run(scheduler)
    scheduler.config = make_scheduler(page_size=4, prefix_cache=True, decode_steps=8).config
    step = scheduler.schedule()
    assert rows_of(step) == [("a", 3, 1, 8)]
    scheduler.update(step, [[5, 6, 7, 42, -1, -1, -1, -1]])
    assert first.output_token_ids == [7, 5, 6, 7, 42]
    assert serve(scheduler, request("b", [*range(3), 7, 5, 6, 7, 42, 1])) == [4]


def test_salts_keep_tenants_apart(scheduler):
    serve(scheduler, request("a", range(9), salt="x"), request("b", range(9)))
    others = [request(str(salt), range(9), salt=salt) for salt in ("x", "y", None, "None")]
    assert serve(scheduler, *others) == [8, 0, 8, 0]


def test_a_prompt_with_logprobs_is_computed_and_found_by_others(scheduler):
    params = SamplingParams(prompt_logprobs=0)
    assert serve(scheduler, request("a", range(9), params=params), request("b", range(9), params=params)) == [0, 0]
    assert serve(scheduler, request("c", range(9))) == [8]


def test_requests_of_one_step_share(scheduler):
    """Rows of a step write before they read, layer by layer."""
    a, b = request("a", range(9), 2), request("b", [*range(8), 90], 2)
    add(scheduler, a, b)
    assert rows_of(run(scheduler)) == [("b", 8, 1, 1), ("a", 0, 9, 1)]
    assert a.pages[:2] == b.pages[:2]
    assert scheduler.pool.num_shared == 2


def test_what_no_step_has_been_given_is_not_found():
    scheduler = make_scheduler(page_size=4, prefix_cache=True, max_num_batched_tokens=10)
    a, b = request("a", range(16), 2), request("b", range(16), 2)
    add(scheduler, a)
    scheduler.schedule()
    add(scheduler, b)
    assert rows_of(scheduler.schedule()) == [("a", 10, 6, 1), ("b", 12, 4, 1)]
    assert a.pages[:3] == b.pages[:3]


def test_a_preempted_request_finds_its_pages():
    scheduler = make_scheduler(page_size=4, prefix_cache=True, max_num_batched_tokens=64, num_pages=1 + 8)
    a, b = request("a", range(10, 20), 8), request("b", range(30, 40), 12)
    add(scheduler, a, b)
    run_until(scheduler, lambda: b.metrics.num_preemptions)
    run_until(scheduler, lambda: a.is_finished)
    known = b.num_known_tokens
    assert rows_of(run(scheduler))[-1] == ("b", 12, known - 12, 1)
    assert b.metrics.num_cached_tokens == 0
    run_until(scheduler, lambda: b.is_finished)
    assert_all_free(scheduler)


def test_pages_are_evicted_only_when_they_are_needed():
    scheduler = make_scheduler(page_size=4, prefix_cache=True, max_num_batched_tokens=64, num_pages=1 + 6)
    serve(scheduler, request("a", range(8)), request("b", range(20, 28)))
    assert (scheduler.pool.num_cached, scheduler.pool.num_evictions) == (4, 0)
    assert serve(scheduler, request("c", range(9))) == [8]
    serve(scheduler, request("d", range(40, 54)))  # 4 pages: of two empty ones and two of b
    assert scheduler.pool.num_evictions == 2
    assert serve(scheduler, request("e", [*range(8), 1])) == [8]
    assert serve(scheduler, request("f", [*range(20, 28), 1])) == [0]


def test_shared_pages_do_not_make_room(scheduler):
    """What a request finds is not free for its other tokens."""
    scheduler = make_scheduler(page_size=4, prefix_cache=True, max_num_batched_tokens=64, num_pages=1 + 4)
    serve(scheduler, request("a", range(12)))
    add(scheduler, other := request("other", range(50, 53), 2))
    run(scheduler)
    add(scheduler, request("b", range(16)))  # finds 3 of its 4 pages, and the fourth is taken
    assert names(run(scheduler).admitted) == []
    assert other.is_finished
    assert names(run(scheduler).admitted) == ["b"]


def test_without_prefix_cache_nothing_is_kept():
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=64)
    assert serve(scheduler, request("a", range(9)), request("b", range(9))) == [0, 0]
    assert scheduler.pool.num_cached == 0


class TestForks:
    def start(self, num_prompt=6, count=2, **config):
        scheduler = make_scheduler(**{"page_size": 4, "max_num_batched_tokens": 64} | config)
        source = request("a", range(num_prompt), 9)
        forks = [request(f"fork {i}", range(num_prompt), 9) for i in range(count)]
        for fork in forks:
            fork.source = source
        add(scheduler, source, *forks)
        return scheduler, source, forks

    @pytest.mark.parametrize("cache", [False, True])
    def test_wait_for_the_prompt_then_share_it(self, cache):
        scheduler, source, forks = self.start(prefix_cache=cache)
        assert rows_of(run(scheduler)) == [("a", 0, 6, 1)]
        step = run(scheduler)
        assert rows_of(step) == [("a", 6, 1, 1), ("fork 0", 5, 1, 1), ("fork 1", 5, 1, 1)]
        assert step.copies == [(source.pages[1], fork.pages[1]) for fork in forks]
        assert [fork.pages[0] for fork in forks] == source.pages[:1] * 2
        assert len({source.pages[1], *(fork.pages[1] for fork in forks)}) == 3
        assert scheduler.pool.num_shared == 1
        assert (scheduler.num_page_copies, scheduler.num_prefill_tokens) == (2, 6 + 2)
        run_until(scheduler, lambda: not scheduler.has_unfinished)
        assert_all_free(scheduler)

    @pytest.mark.parametrize(
        ("num_prompt", "shared", "copied"), [(1, 0, 0), (4, 0, 1), (5, 1, 0), (9, 2, 0), (8, 1, 1)]
    )
    def test_only_a_page_that_is_written_is_copied(self, num_prompt, shared, copied):
        """All tokens but the last are shared; the last is computed by the fork, on a page of its own."""
        scheduler, source, [fork] = self.start(num_prompt, 1)
        run(scheduler)
        step = scheduler.schedule()
        assert len(step.copies) == copied
        assert len(set(source.pages) & set(fork.pages)) == shared

    def test_do_not_hold_up_those_behind_them(self):
        scheduler, _, _ = self.start()
        add(scheduler, request("b", range(50, 56), 9))
        assert names(run(scheduler).admitted) == ["a", "b"]
        assert names(run(scheduler).admitted) == ["fork 0", "fork 1"]

    def test_of_a_source_in_chunks(self):
        scheduler, _, _ = self.start(20, 1, max_num_batched_tokens=8, prefix_cache=True)
        assert [rows_of(run(scheduler)) for _ in range(3)] == [[("a", 0, 8, 0)], [("a", 8, 8, 0)], [("a", 16, 4, 1)]]
        assert rows_of(run(scheduler))[1] == ("fork 0", 19, 1, 1)

    def test_of_a_source_that_has_gone_on(self):
        """What the source has written after the fork's tokens is copied and overwritten."""
        scheduler, source, [fork] = self.start(6, 1, max_num_seqs=1)
        run(scheduler)
        scheduler.config = make_scheduler().config  # room for the fork
        scheduler._free_slots = [3, 2, 1]
        step = run(scheduler)
        assert step.copies == [(source.pages[1], fork.pages[1])]

    @pytest.mark.parametrize("cache", [False, True])
    def test_of_a_source_that_ends_first_compute_or_find_their_tokens(self, cache):
        scheduler, source, [fork] = self.start(6, 1, prefix_cache=cache)
        run(scheduler)
        scheduler.finish(source, FinishReason.ABORT)
        assert rows_of(run(scheduler)) == [("fork 0", 4 * cache, 6 - 4 * cache, 1)]
        assert fork.source is None

    def test_of_a_source_that_is_admitted_again_in_the_same_step_wait(self):
        """Its pages are written by this step, and copies come before it."""
        scheduler, source, _ = self.start(6, 1)
        run(scheduler)
        scheduler._queue_forks()
        scheduler._preempt(source)
        assert names(scheduler.schedule().admitted) == ["a"]
        step = scheduler.schedule()
        assert names(step.admitted) == ["fork 0"]
        assert len(step.copies) == 1

    def test_aborted_before_they_start(self):
        scheduler, source, forks = self.start()
        scheduler.finish(forks[0], FinishReason.ABORT)
        scheduler.check_integrity()
        run(scheduler)
        run(scheduler)
        assert names(scheduler.running) == ["a", "fork 1"]
        assert source.num_known_tokens == 8
