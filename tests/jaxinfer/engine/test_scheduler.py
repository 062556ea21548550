import pytest

from jaxinfer.engine.request import FinishReason, Status
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.engine.host import (
    add,
    assert_all_free,
    make_request,
    make_scheduler,
    names,
    rows_of,
    run,
    run_until,
)


def test_prefill_then_decode_until_max_tokens():
    scheduler, request = make_scheduler(), make_request("a", 3, 3)
    add(scheduler, request)
    assert [rows_of(run(scheduler)) for _ in range(3)] == [[("a", 0, 3, 1)], [("a", 3, 1, 1)], [("a", 4, 1, 1)]]
    assert request.output_token_ids == [7, 7, 7]
    assert request.finish_reason is FinishReason.LENGTH
    assert_all_free(scheduler)
    assert run(scheduler).rows == []


def test_fcfs_order_is_never_overtaken():
    """The first in the queue does not fit yet; those behind it would, and wait."""
    scheduler = make_scheduler(num_pages=1 + 20, max_num_batched_tokens=64)
    running, long, short = make_request("running", 8, 8), make_request("long", 16, 2), make_request("short", 1, 2)
    add(scheduler, running)
    run(scheduler)
    add(scheduler, long, short)
    for _ in range(7):
        assert names(r.request for r in run(scheduler).rows) == ["running"]
    assert running.is_finished
    assert names(run(scheduler).admitted) == ["long", "short"]


def test_policy_fcfs_takes_no_notice_of_priorities():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", priority=5), make_request("b", priority=-5))
    assert names(run(scheduler).admitted) == ["a", "b"]


def test_priority_then_arrival():
    scheduler = make_scheduler(policy="priority")
    add(scheduler, *(make_request(name, priority=p) for name, p in [("a", 1), ("b", 0), ("c", 1), ("d", -1)]))
    assert names(run(scheduler).admitted) == ["d", "b", "a", "c"]


def test_a_low_priority_is_passed_a_bounded_number_of_times():
    """One request runs at a time and urgent ones arrive without end."""
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    low = make_request("low", 1, 1, priority=1)
    add(scheduler, low)
    for _ in range(255):
        add(scheduler, make_request("urgent", 1, 1), make_request("urgent", 1, 1))
        run(scheduler)
        assert not low.is_finished
    run(scheduler)
    assert low.is_finished


def test_preempts_the_youngest():
    scheduler = make_scheduler(num_pages=1 + 12)
    a, b, c = requests = [make_request(name, 3, 9) for name in "abc"]
    add(scheduler, *requests)
    run(scheduler)
    run(scheduler)  # 12 of 12 pages are used
    assert scheduler.pool.num_free == 0
    assert names(r.request for r in run(scheduler).rows) == ["a", "b"]
    assert (a.status, b.status, c.status) == (Status.RUNNING, Status.RUNNING, Status.WAITING)
    assert (c.pages, c.slot, c.num_computed_tokens, c.metrics.num_preemptions) == ([], None, 0, 1)
    assert scheduler.num_preemptions == 1


def test_priority_decides_who_is_preempted():
    scheduler = make_scheduler(num_pages=1 + 8, policy="priority")
    old, urgent = make_request("old", 3, 5, priority=1), make_request("urgent", 3, 5)
    add(scheduler, old, urgent)
    run(scheduler)
    run(scheduler)
    run(scheduler)
    assert (old.status, urgent.status) == (Status.WAITING, Status.RUNNING)


def test_a_preempted_request_resumes_with_all_its_tokens_before_later_ones():
    scheduler = make_scheduler(num_pages=1 + 8, max_num_seqs=2)
    a, b, c = requests = [make_request(name, 3, 5) for name in "abc"]
    add(scheduler, *requests)
    run_until(scheduler, lambda: b.metrics.num_preemptions, token=8)
    written = list(b.output_token_ids)
    assert names(scheduler.waiting) == ["b", "c"]
    run_until(scheduler, lambda: a.is_finished)
    step = run(scheduler, token=9)
    assert names(step.admitted) == ["b", "c"]
    assert rows_of(step)[0] == ("b", 0, 3 + len(written), 1)  # prompt and output, computed again
    assert b.token_ids(0, 3 + len(written)) == [100, 101, 102, *written]
    run_until(scheduler, lambda: b.is_finished)
    assert len(b.output_token_ids) == 5
    assert b.output_token_ids[: len(written)] == written
    run_until(scheduler, lambda: c.is_finished)
    assert_all_free(scheduler)


def test_a_request_preempted_with_tokens_in_flight_waits_for_them():
    scheduler = make_scheduler(num_pages=1 + 6)
    a, b = make_request("a", 2, 4), make_request("b", 2, 4)
    add(scheduler, a, b)
    first = scheduler.schedule()
    second = scheduler.schedule()  # decodes: 6 pages of 6
    third = scheduler.schedule()  # no page left: b goes
    assert names(r.request for r in third.rows) == ["a"]
    assert (b.status, b.num_in_flight) == (Status.WAITING, 2)
    scheduler.update(first, [[1], [2]])
    scheduler.finish(a, FinishReason.ABORT)
    assert scheduler.schedule().rows == []  # room, but a token of b is not known yet
    scheduler.update(second, [[3], [4]])
    scheduler.update(third, [[5]])
    assert rows_of(scheduler.schedule()) == [("b", 0, 4, 1)]
    assert b.output_token_ids == [2, 4]


def test_admission_waits_for_all_pages_of_a_prompt():
    scheduler = make_scheduler(num_pages=1 + 10, page_size=4, max_num_batched_tokens=64)
    add(scheduler, make_request("a", 29, 1), make_request("b", 9, 1))  # 8 pages and 3
    assert names(run(scheduler).admitted) == ["a"]
    assert names(run(scheduler).admitted) == ["b"]


def test_admission_waits_for_a_slot():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make_request(i, 2, 2) for i in range(3)))
    assert names(run(scheduler).admitted) == ["0", "1"]
    assert names(run(scheduler).admitted) == []
    assert names(run(scheduler).admitted) == ["2"]


class TestMultiStepDecode:
    def start(self, *requests, **config):
        scheduler = make_scheduler(decode_steps=4, **config)
        add(scheduler, *requests)
        run(scheduler)
        return scheduler

    def test_several_tokens_a_dispatch_up_to_max_tokens(self):
        scheduler = self.start(make_request("a", 3, 7), make_request("b", 2, 3))
        step = run(scheduler)
        assert rows_of(step) == [("a", 3, 1, 4), ("b", 2, 1, 2)]
        assert step.is_decode
        assert rows_of(run(scheduler)) == [("a", 7, 1, 2)]
        assert_all_free(scheduler)

    def test_one_when_a_request_waits(self):
        scheduler = self.start(make_request("a", 3, 9), make_request("b", 3, 9), max_num_seqs=1)
        assert rows_of(run(scheduler)) == [("a", 3, 1, 1)]

    def test_one_while_a_prompt_is_prefilled(self):
        scheduler = self.start(make_request("a", 3, 9), make_request("b", 30, 9))
        assert rows_of(run(scheduler)) == [("a", 3, 1, 1), ("b", 13, 15, 0)]
        assert rows_of(run(scheduler)) == [("a", 4, 1, 1), ("b", 28, 2, 1)]
        assert rows_of(run(scheduler)) == [("a", 5, 1, 4), ("b", 30, 1, 4)]

    def test_one_when_the_host_must_see_every_token(self):
        scheduler = self.start(make_request("a", 3, 9), make_request("b", 3, 9, bad_words=((1, 2),)))
        assert rows_of(run(scheduler)) == [("a", 3, 1, 1), ("b", 3, 1, 1)]

    def test_one_when_pages_would_not_suffice(self):
        scheduler = self.start(make_request("a", 3, 5), make_request("b", 3, 5), num_pages=1 + 13)
        assert rows_of(run(scheduler)) == [("a", 3, 1, 1), ("b", 3, 1, 1)]
        assert scheduler.num_preemptions == 0

    def test_runs_ahead_of_tokens_in_flight(self):
        scheduler = self.start(make_request("a", 3, 8))
        steps = [scheduler.schedule() for _ in range(3)]
        assert [rows_of(step) for step in steps] == [[("a", 3, 1, 4)], [("a", 7, 1, 3)], []]

    def test_tokens_after_a_stop_are_dropped(self):
        request = make_request("a", 3, 9, stop=[42])
        scheduler = self.start(request)
        step, ahead = scheduler.schedule(), scheduler.schedule()
        assert scheduler.update(step, [[1, 42, 5, 6]]) == [request]
        assert request.output_token_ids == [7, 1, 42]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 42)
        assert scheduler.update(ahead, [[1] * 4]) == []
        assert request.output_token_ids == [7, 1, 42]
        assert_all_free(scheduler)

    def test_minus_one_ends_a_request_that_may_say_nothing(self):
        request = make_request("a", 3, 9)
        scheduler = self.start(request)
        scheduler.update(scheduler.schedule(), [[5, -1, -1, -1]])
        assert request.output_token_ids == [7, 5]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)
        assert_all_free(scheduler)


def test_decode_rows_come_first_and_never_wait_for_a_long_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    a, long, short = make_request("a", 2, 12), make_request("long", 40, 1), make_request("short", 1, 12)
    add(scheduler, a, short, long)
    run(scheduler)
    for _ in range(6):
        step = run(scheduler)
        assert rows_of(step)[0][0] == "a"
        assert rows_of(step)[1][0] == "short"
        assert step.num_tokens <= 8
        assert step.num_decode_rows == 2
    assert long.is_finished
    assert len(a.output_token_ids) == len(short.output_token_ids) == 1 + 6  # of the prompt 5 tokens, then 6 a step


def test_a_full_step_of_decodes_leaves_no_room_for_chunks():
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    add(scheduler, *(make_request(i, 1, 9) for i in range(4)), make_request("later", 9, 1))
    run(scheduler)
    assert [row[2:] for row in rows_of(run(scheduler))] == [(1, 1)] * 4


def test_a_chunk_of_one_token_stands_with_the_decode_rows_and_samples_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_request("a", 3, 9), make_request("b", 9, 9))
    step = run(scheduler)
    assert rows_of(step) == [("b", 0, 1, 0), ("a", 0, 3, 1)]
    assert step.num_decode_rows == 1


def test_a_step_with_a_chunk_of_one_token_is_no_decode_step():
    """A decode step writes nothing for a row that does not sample."""
    scheduler = make_scheduler(max_num_seqs=1, max_num_batched_tokens=1)
    add(scheduler, make_request("a", 3, 2))
    assert [run(scheduler).is_decode for _ in range(4)] == [False, False, True, True]


def test_a_request_of_the_host_mask_is_not_run_ahead():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 3, 9, bad_words=((1, 2),)))
    first = scheduler.schedule()
    assert scheduler.schedule().rows == []
    scheduler.update(first, [[1]])
    assert rows_of(scheduler.schedule()) == [("a", 3, 1, 1)]


def test_prompt_logprobs_rows_are_never_decode_rows():
    params = SamplingParams(prompt_logprobs=1)
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_request("a", 5, 2, params=params))
    first, second = run(scheduler), run(scheduler)
    assert [row.wants_prompt_logprobs for row in first.rows + second.rows] == [True, False]
    assert (first.is_decode, second.is_decode) == (False, True)


def test_times_of_a_request_are_in_order():
    scheduler, request = make_scheduler(), make_request("a", 2, 2)
    add(scheduler, request)
    assert request.metrics.first_scheduled is None
    run(scheduler)
    run(scheduler)
    m = request.metrics
    assert m.arrival <= m.first_scheduled <= m.first_token <= m.finished


def test_update_wants_the_tokens_of_every_row():
    scheduler = make_scheduler()
    add(scheduler, make_request("a"), make_request("b"))
    with pytest.raises(ValueError, match="zip"):
        scheduler.update(scheduler.schedule(), [[1]])
