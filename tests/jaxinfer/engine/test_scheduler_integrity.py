"""Whatever ends where and when, nothing is left behind; and `check_integrity` sees what is wrong."""

import pytest

from jaxinfer.engine.request import FinishReason, Status
from tests.jaxinfer.engine.host import add, assert_all_free, make_request, make_scheduler, run, run_until


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "in flight", "preempted", "preempted in flight"])
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_finish_frees_everything_in_every_state(state, reason):
    scheduler = make_scheduler(num_pages=1 + 12, max_num_batched_tokens=6, max_num_seqs=2)
    other, request = make_request("other", 4, 8), make_request("a", 4, 8)
    add(scheduler, other)
    run(scheduler)
    add(scheduler, request)
    pending = []
    if state == "prefilling":
        request.prompt_token_ids = list(range(7))
        run(scheduler)
        assert 0 < request.num_computed_tokens < 7
    elif state in ("running", "in flight"):
        run(scheduler)
        pending = [scheduler.schedule()] if state == "in flight" else []
        assert request.num_in_flight == len(pending)
    elif state == "preempted":
        run_until(scheduler, lambda: request.metrics.num_preemptions)
    elif state == "preempted in flight":
        pending = [scheduler.schedule() for _ in range(5)]
        assert request.metrics.num_preemptions
        assert request.num_in_flight
    scheduler.finish(request, reason)
    assert (request.pages, request.slot, request.finish_reason) == ([], None, reason)
    assert request not in scheduler.waiting + scheduler.running
    scheduler.check_integrity()
    scheduler.finish(request, FinishReason.LENGTH)  # a second time changes nothing
    assert request.finish_reason is reason
    output = list(request.output_token_ids)
    for step in pending:
        assert request not in scheduler.update(step, [[7] * row.num_samples for row in step.rows])
    run_until(scheduler, lambda: other.is_finished)
    assert request.output_token_ids == output
    assert other.output_token_ids == [7] * 8
    assert_all_free(scheduler)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.running[0].pages.pop(), "page pool is inconsistent"),
        (lambda s: s.running[0].pages.append(s.running[1].pages[0]), "page pool is inconsistent"),
        (lambda s: s._free_slots.pop(), "slots"),
        (lambda s: s._free_slots.append(s.running[0].slot), "slots"),
        (lambda s: setattr(s.running[0], "slot", s.running[1].slot), "slots"),
        (lambda s: s.running.reverse(), "out of order"),
        (lambda s: s.waiting.reverse(), "out of order"),
        (lambda s: setattr(s.running[0], "num_computed_tokens", 6), "computed"),
        (lambda s: setattr(s.running[0], "num_in_flight", -1), "in flight"),
        (lambda s: setattr(s.running[0], "num_dead_pages", 1), "has given back pages that its next token sees"),
        (lambda s: setattr(s.waiting[0], "num_computed_tokens", 1), "waits and holds"),
        (lambda s: setattr(s.waiting[0], "slot", 0), "waits and holds"),
        (lambda s: setattr(s.running[0], "status", Status.WAITING), "status"),
        (lambda s: setattr(s.waiting[0], "status", Status.FINISHED), "status"),
    ],
    ids=[
        "page lost", "page of two", "slot lost", "slot free and held", "slot of two", "running order", "waiting order",
        "more computed than there is", "negative in flight", "a page given back too early", "waiting with keys",
        "waiting with a slot", "running status", "waiting status",
    ],
)  # fmt: skip
def test_integrity_sees_every_damage(damage, message):
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=8)
    add(scheduler, *(make_request(i, 4, 9) for i in range(5)))
    run(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 3)
    damage(scheduler)
    with pytest.raises(RuntimeError, match=message):
        scheduler.check_integrity()
