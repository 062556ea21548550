"""hypothesis drives Scheduler and PagePool with a fake device; integrity is checked after every move.

The fake device samples a function of (request, position), so every request's output is known in advance, however
it was chunked, preempted, run ahead or aborted.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxinfer.config import EngineConfig
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import FinishReason, Request
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.sampling.params import SamplingParams

MAX_LEN = 24
STOP = 0


def sampled(request, position):
    """Token at `position`: now and then the stop token, rarely nothing at all."""
    value = hash((request.seed, position)) % 29
    return -1 if value == 28 else value


def expected(request):
    output = []
    while len(output) < request.max_tokens:
        token = sampled(request, request.num_prompt_tokens + len(output))
        if token < 0:
            break
        output.append(token)
        if token in request.stop_token_ids:
            break
    return output


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data):
        seqs = data.draw(st.integers(1, 5))
        page_size = data.draw(st.sampled_from([1, 2, 5, 16]))
        least = 1 + -(-MAX_LEN // page_size)  # the null page and one full request
        self.config = EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + data.draw(st.integers(0, 12)),
            page_size=page_size,
            num_pages=least + data.draw(st.integers(0, 12)),
            policy=data.draw(st.sampled_from(["fcfs", "priority"])),
            decode_steps=data.draw(st.integers(1, 4)),
        )
        self.scheduler = Scheduler(self.config, PagePool(self.config.num_pages, page_size))
        self.steps_in_flight = []
        self.requests = []
        self.cache = {}  # slot in a page: (request, position) whose key was written there last

    @rule(
        prompt=st.integers(1, MAX_LEN - 1),
        output=st.integers(1, MAX_LEN),
        priority=st.integers(-2, 2),
        mask=st.booleans(),
    )
    def add(self, prompt, output, priority, mask):
        number = len(self.requests)
        request = Request(
            str(number), [1] * prompt, SamplingParams(), min(output, MAX_LEN - prompt), number,
            stop_token_ids=frozenset({STOP}), bad_words=((50, 51),) if mask else (), priority=priority,
        )  # fmt: skip
        self.requests.append(request)
        self.scheduler.add(request)

    @rule()
    def enqueue(self):
        if len(self.steps_in_flight) >= 2:
            self.read()
        step = self.scheduler.schedule()
        if not step.rows:
            if self.steps_in_flight:
                self.read()
            else:
                assert not self.scheduler.has_unfinished, "no request can go on"
            return
        self.check_step(step)
        self.steps_in_flight.append((step, [self.compute(row) for row in step.rows]))

    def check_step(self, step):
        rows = step.rows
        assert step.num_tokens <= self.config.max_num_batched_tokens
        assert len(rows) <= self.config.max_num_seqs
        assert [row.num_tokens == 1 for row in rows] == [True] * step.num_decode_rows + [False] * (
            len(rows) - step.num_decode_rows
        )
        assert len({id(row.request) for row in rows}) == len(rows)
        for row in rows:
            assert row.num_samples <= 1 or step.is_decode
            assert not (row.request.needs_host_mask and row.num_samples > 1)

    def compute(self, row):
        """What the device does: writes new keys, checks that all are there, samples."""
        request, tokens = row.request, []
        if row.start + row.num_tokens > request.num_prompt_tokens + len(expected(request)):
            return [-1] * row.num_samples  # run ahead past an end that the host has not seen: its tokens are dropped
        for step in range(max(1, row.num_samples)):
            new = range(row.start, row.start + row.num_tokens) if step == 0 else [row.start + row.num_tokens - 1 + step]
            for position in new:
                self.cache[self.slot(request, position)] = (request, position)
            last = row.start + row.num_tokens - 1 + step
            for position in range(last + 1):
                assert self.cache[self.slot(request, position)] == (request, position)
            if step < row.num_samples:
                tokens.append(sampled(request, last + 1))
                if tokens[-1] in (STOP, -1):
                    break
        return tokens + [-1] * (row.num_samples - len(tokens))

    def slot(self, request, position):
        page = request.pages[position // self.config.page_size]
        assert page != 0
        return page * self.config.page_size + position % self.config.page_size

    @precondition(lambda self: self.steps_in_flight)
    @rule()
    def read(self):
        step, tokens = self.steps_in_flight.pop(0)
        for request in self.scheduler.update(step, tokens):
            assert request.output_token_ids == expected(request)[: len(request.output_token_ids)]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.scheduler.finish(request, FinishReason.ABORT)
        assert request.is_finished
        assert not request.pages
        assert request.slot is None

    @invariant()
    def integrity(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        for request in self.requests:
            rows = [row for step, _ in self.steps_in_flight for row in step.rows if row.request is request]
            assert request.is_finished or request.num_in_flight == sum(row.num_samples for row in rows)

    def teardown(self):
        """Everything ends, in a bounded number of steps, with the right output and nothing left behind."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_unfinished and not self.steps_in_flight:
                break
            self.enqueue()
            self.scheduler.check_integrity()
        else:
            raise AssertionError("requests never finish")
        assert self.scheduler.pool.num_used == 0
        for request in self.requests:
            wanted = expected(request)
            if request.finish_reason is FinishReason.ABORT:
                wanted = wanted[: len(request.output_token_ids)]
            assert request.output_token_ids == wanted


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150)


@pytest.mark.slow
def test_many_more_examples():
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=2000, derandomize=True, deadline=None))
