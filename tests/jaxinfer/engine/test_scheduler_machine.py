"""hypothesis drives Scheduler and PagePool with a fake device; everything is checked after every move.

Every request's output is known in advance, however it was chunked, preempted, run ahead, forked or aborted, and
whatever pages it found. Pages go to a host tier and a disk and come back, and the process starts anew over that disk,
now and then with another model.
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
from jaxinfer.engine.host_tier import HostTier
from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import FinishReason, Request, Status
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.swap_cost import SwapCost
from jaxinfer.sampling.h2o import H2O
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.engine.fake_device import FakeDevice, expected, seen_by, values_of
from tests.jaxinfer.engine.fake_tiers import FakeDisk, FakeTransfer, Thread

MAX_LEN = 24
STOP = 0
BAD_WORDS = (*((a, b) for a in range(8) for b in range(1, 8)), (8, 9, 10), (20, 20, 20, 20))
PROMPTS = st.integers(1, 6) | st.integers(1, MAX_LEN - 1)  # short ones grow far, until pages run out
SALTS = st.sampled_from([None, None, None, "tenant"])
PLAIN = SamplingParams()
FORGETFUL = [
    SamplingParams(h2o=H2O(*budget)) for budget in ((0, 1), (0, 4), (2, 1), (3, 2), (2, 9), (9, 8), (MAX_LEN, 1))
]
PARAMS = st.sampled_from([PLAIN, PLAIN, SamplingParams(prompt_logprobs=0)]) | st.sampled_from(FORGETFUL)
OUTPUTS = st.just(MAX_LEN) | st.integers(1, MAX_LEN)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data):
        seqs = data.draw(st.integers(1, 8))
        page_size = data.draw(st.sampled_from([1, 2, 5, 16]))
        window = data.draw(st.sampled_from([None, None, 1, 2, 3, 5, 8, MAX_LEN]))
        sinks = data.draw(st.sampled_from([0, 1, 2, 6])) if window else 0
        batched, steps = seqs + data.draw(st.integers(0, 24)), data.draw(st.integers(1, 8))
        self.live = LivePages(page_size, window, sinks, max(batched, steps))
        pages_each = self.live.most(MAX_LEN)
        spare = data.draw(st.sampled_from([0, 1, pages_each // 2, pages_each, pages_each * seqs]))
        self.config = EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            page_size=page_size,
            num_pages=1 + pages_each + spare,  # from one full request upwards
            policy=data.draw(st.sampled_from(["fcfs", "priority"])),
            decode_steps=steps,
            async_scheduling=data.draw(st.booleans()),
            prefix_cache=data.draw(st.sampled_from([True, True, True, False])),
            preemption=data.draw(st.sampled_from(["auto", "recompute"])),
        )
        self.host_pages = data.draw(st.sampled_from([0, 1, 4, 20])) * self.config.prefix_cache
        self.disk = FakeDisk(data.draw(st.integers(1, 40))) if data.draw(st.booleans()) else None
        self.rates = data.draw(st.sampled_from([(None, None), (1e9, 1.0), (1.0, 1e9)]))
        self.model = 0
        self.start_process()
        self.requests = []
        self.next_position = {}  # of each request since its last admission: what is to be computed next
        self.forks = set()
        self.outputs = {}  # what each request is to say
        self.meanings = {}  # of every key: salt, tokens, and what is written for the page's tokens
        self.num_keys_seen = {}  # of each request

    def start_process(self):
        pool, self.threads = PagePool(self.config.num_pages, self.config.page_size), [Thread(), Thread()]
        self.tier = None
        if self.host_pages:
            threads = iter(self.threads)
            self.tier = HostTier(self.host_pages, FakeTransfer(), self.disk, make_executor=lambda: next(threads))
        self.scheduler = Scheduler(
            self.config, pool, self.live, tier=self.tier, cost=SwapCost(*self.rates), namespace=bytes([self.model])
        )
        self.device = FakeDevice(self.live, self.model)
        self.unread = []

    @precondition(lambda self: self.tier is not None and self.disk is not None)
    @rule(orderly=st.booleans(), model=st.sampled_from([0, 0, 1]))
    def restart(self, orderly, model):
        """The process ends, in order or not, and another one begins over the same disk."""
        for request in self.requests:
            self.scheduler.finish(request, FinishReason.ABORT)
        if orderly:  # what `Engine.close` does
            for page, key in self.scheduler.pool.cached():
                if key not in self.tier:
                    self.tier.put(key, self.device.page(page))
            self.tier.flush()
        self.model = model
        self.start_process()

    @precondition(lambda self: self.tier is not None and self.disk is not None)
    @rule(thread=st.integers(0, 1), count=st.integers(1, 4), damaged=st.none() | st.integers(0, 40))
    def threads_go_on(self, thread, count, damaged):
        if damaged is not None:
            self.disk.damage(damaged)
        for _ in range(count):
            self.threads[thread].run()

    @rule(
        lengths=st.lists(st.tuples(PROMPTS, OUTPUTS), min_size=1, max_size=3), common=st.integers(0, MAX_LEN),
        text=st.integers(1, 2), n=st.sampled_from([1, 1, 1, 3]), salt=SALTS, params=PARAMS, priority=st.integers(-2, 2),
        mask=st.sampled_from([False, False, False, True]), stop=st.booleans(),
    )  # fmt: skip
    def add(self, lengths, common, text, n, **options):
        """Requests for `n` completions each, whose first `common` tokens are those of one of two texts."""
        for prompt, output in lengths:
            own = [1000 + len(self.requests)] * max(0, prompt - common)
            first = self.add_request([*range(100 * text, 100 * text + min(prompt, common)), *own], output, **options)
            for _ in range(n - 1):
                source = first if options["params"].h2o is None else None
                self.add_request(first.prompt_token_ids, output, source=source, **options)

    @precondition(lambda self: any(r.is_finished for r in self.requests))
    @rule(data=st.data(), more=st.integers(1, 4), output=OUTPUTS, salt=SALTS, params=PARAMS)
    def follow_up(self, data, more, output, salt, params):
        """The next turn of a conversation: a prompt that begins with a request's prompt and output."""
        before = data.draw(st.sampled_from([r for r in self.requests if r.is_finished]))
        prompt = [*before.prompt_token_ids, *before.output_token_ids, *range(50, 50 + more)]
        self.add_request(prompt[: MAX_LEN - 1], output, salt, params)

    @precondition(lambda self: any(self.is_forkable(r) for r in self.requests))
    @rule(data=st.data(), count=st.integers(1, 3), priority=st.integers(-2, 2))
    def fork(self, data, count, priority):
        source = data.draw(st.sampled_from([r for r in self.requests if self.is_forkable(r)]))
        for _ in range(count):
            self.add_request(
                source.prompt_token_ids, source.max_tokens, source.cache_salt, priority=priority,
                mask=bool(source.bad_words), stop=bool(source.stop_token_ids), source=source,
                inherited=source.output_token_ids,
            )  # fmt: skip

    def is_forkable(self, request):
        return not request.is_finished and request.params.h2o is None and len(self.requests) < 40

    def add_request(
        self, prompt, output, salt, params=PLAIN, priority=0, mask=False, stop=False, source=None, inherited=()
    ):
        if self.live.window is not None and params.h2o:
            params = PLAIN  # the engine refuses the two together
        request = Request(
            str(len(self.requests)), list(prompt), params, min(output, MAX_LEN - len(prompt)), len(self.requests),
            stop_token_ids=frozenset({STOP}) if stop else frozenset(), bad_words=BAD_WORDS if mask else (),
            priority=priority, cache_salt=salt, source=source, output_token_ids=list(inherited),
        )  # fmt: skip
        self.outputs[request] = expected(request, inherited)
        self.device.texts[request] = values_of([*prompt, *self.outputs[request]], self.live, self.model)
        self.requests.append(request)
        self.forks |= {request} if source else set()
        self.scheduler.add(request)
        return request

    @rule(count=st.integers(1, 20))
    def engine_steps(self, count):
        for _ in range(count):
            self.engine_step()
            self.integrity()

    def engine_step(self):
        """What `Engine.step` does."""
        limit = int(self.config.async_scheduling)
        while len(self.unread) > limit:
            self.read()
        enqueued = self.dispatch()
        if self.unread and (len(self.unread) > limit or not enqueued):
            self.read()
        elif not enqueued and self.scheduler.is_loading:
            self.tier.wait()
        elif not enqueued:
            assert not self.scheduler.has_unfinished, "no request can go on"

    @precondition(lambda self: len(self.unread) < 1 + self.config.async_scheduling)
    @rule()
    def enqueue(self):
        self.dispatch()

    def dispatch(self):
        """Schedules a step and runs it; returns whether there was anything to run."""
        goes_on = [
            r for r in self.scheduler.running
            if r.num_tokens_to_compute == 1 and r.num_tokens_to_sample and not (r.needs_host_mask and r.num_in_flight)
        ]  # fmt: skip
        step = self.scheduler.schedule()
        self.check_step(step, goes_on)
        self.device.move(step, self.tier)
        if step.rows:
            self.unread.append((step, self.device.run(step)))
        return bool(step.rows)

    def check_step(self, step, goes_on):
        rows, config = step.rows, self.config
        assert step.num_tokens <= config.max_num_batched_tokens
        assert len(rows) <= config.max_num_seqs
        decodes = step.num_decode_rows
        assert [row.num_tokens == 1 for row in rows] == [True] * decodes + [False] * (len(rows) - decodes)
        assert len({id(row.request) for row in rows}) == len(rows)
        assert {row.request.status for row in rows} <= {Status.RUNNING}
        scheduled = [row.request for row in rows]
        for request in goes_on:  # no decode waits for a prompt
            assert request in scheduled or request.status is Status.WAITING
        for request in step.admitted:
            came = any(page in request.pages for _, page in step.loads)  # perhaps too late for this step
            assert request in scheduled or request.num_pages_to_load or came
            assert all(request.sort_key < other.sort_key for other in self.scheduler.waiting)
            self.next_position[request] = None
            if request.metrics.num_preemptions and config.preemption == "recompute":
                assert not request.num_pages_to_load
                alone = [page for page in request.pages if self.scheduler.pool._num_owners[page] == 1]
                assert not any(page in alone for _, page in step.loads)
        for done in step.compactions:
            assert len(done.pages) * config.page_size >= done.num_tokens > done.h2o.budget
        for source, destination in step.copies:
            assert source not in [other for _, other in step.copies]
            [fork, *others] = [row.request for row in rows if destination in row.request.pages]
            if others:  # the fork's token fills the page, which others of this step have found by its key
                key = fork.page_keys[fork.pages.index(destination)]
                assert self.scheduler.pool.find(key) == destination
        for row in rows:
            request, start = row.request, row.start
            assert not request.num_pages_to_load
            if self.next_position[request] is None:  # its first row since its admission
                self.check_start(request, start)
            else:
                assert start == self.next_position[request]  # nothing is skipped, nothing computed twice
            self.next_position[request] = request.num_computed_tokens
            assert row.num_tokens >= 1
            exact, end = request.num_exact_tokens, request.num_computed_tokens
            assert row.num_tokens == 1 or start + row.num_tokens <= exact  # whoever forgets goes one by one
            if end > exact == request.num_prompt_tokens and request.params.h2o:
                assert start >= exact  # what it forgets of the prompt, it forgets between two steps
            assert request.num_computed_tokens == start + row.num_tokens + max(0, row.num_samples - 1)
            assert row.num_samples <= (config.decode_steps if step.is_decode and not self.scheduler.waiting else 1)
            if request.needs_host_mask and row.num_samples:
                assert request.num_in_flight == row.num_samples == 1

    def check_start(self, request, start):
        known = request.num_known_tokens  # of which the last at least is computed
        assert start < known
        assert start % self.config.page_size == 0 or start == known - 1
        assert not start or request.params.prompt_logprobs is None or request in self.forks
        assert not start or request.params.h2o is None

    @precondition(lambda self: self.unread)
    @rule()
    def read(self):
        step, tokens = self.unread.pop(0)
        for request in self.scheduler.update(step, tokens):
            assert request.output_token_ids == self.outputs[request][: len(request.output_token_ids)]

    @rule()
    def forget(self):
        self.scheduler.pool.forget()
        if self.tier is not None:
            self.tier.clear()

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
        queued = self.scheduler.waiting + self.scheduler.running + self.scheduler.forks
        assert sorted(queued, key=id) == sorted((r for r in self.requests if not r.is_finished), key=id)
        for request in queued:
            unread = sum(row.num_samples for step, _ in self.unread for row in step.rows if row.request is request)
            assert request.num_in_flight == unread
        self.check_sharing()
        self.check_keys()
        self.check_live_pages()

    def check_sharing(self):
        """Requests that share a page have the same salt and the same text up to its end."""
        owners = {}
        for request in self.scheduler.running:
            num_sinks = self.live.num_sink_pages
            for index, page in enumerate(request.pages):
                i = index if index < num_sinks else index + request.num_dead_pages
                other, place = owners.setdefault(page, (request, i))
                end = (i + 1) * self.config.page_size
                assert (place, other.cache_salt) == (i, request.cache_salt)
                assert other is request or request.params.h2o is other.params.h2o is None
                assert other is request or other.token_ids(0, end) == request.token_ids(0, end)
                assert other is request or len(request.token_ids(0, end)) == end  # full: nobody writes there

    def check_keys(self):
        """A key means one salt and text, and every page that has it holds just that."""
        size, pool = self.config.page_size, self.scheduler.pool
        for request in self.requests:
            seen = self.num_keys_seen.get(request, 0)
            for i, key in enumerate(request.page_keys[seen:], seen):
                tokens = request.token_ids(0, (i + 1) * size)
                content = values_of(tokens, self.live, self.model)[-size:]
                meaning = (self.model, request.cache_salt, tokens, content)
                assert self.meanings.setdefault(key, meaning) == meaning
            self.num_keys_seen[request] = len(request.page_keys)
        for page, key in pool._keys.items():
            assert (self.model, self.device.page(page)) == (self.meanings[key][0], self.meanings[key][3])
        if self.tier is not None:
            self.tier.check_integrity()
            stored = {**self.tier._pages, **{key: page for key, (page, _) in self.tier._writes.items()}}
            stored |= {key: page["content"] for key, (page, _) in self.tier._staged.items()}
            assert all((self.model, page) == self.meanings[key][::3] for key, page in stored.items())
        for key, data in self.disk.files.items() if self.disk else ():
            assert data is None or FakeTransfer().unpack(data) == self.meanings[key][3]

    def check_live_pages(self):
        """A request holds what it may need and nothing that nobody sees any more."""
        for request in self.scheduler.running:
            assert len(request.pages) <= self.live.most(MAX_LEN)
            # A page is given back when the next step is scheduled; until then those of one step are held too.
            assert request.num_dead_pages <= self.live.num_dead(request.num_computed_tokens)
            held_from = request.num_dead_pages and self.live.num_sink_pages + request.num_dead_pages
            positions = seen_by(request.num_computed_tokens, self.live)
            needed = {i // self.config.page_size for i in positions} - set(range(self.live.num_sink_pages))
            assert min(needed, default=held_from) >= held_from

    def teardown(self):
        """Everything ends, in a bounded number of steps, with the right output and nothing left behind."""
        if not hasattr(self, "scheduler"):
            return
        bound = 6 * sum(r.num_prompt_tokens + r.max_tokens + 1 for r in self.requests) + 2
        for _ in range(bound):
            if not self.scheduler.has_unfinished and not self.unread:
                break
            self.engine_step()
            self.integrity()
        else:
            raise AssertionError(f"requests have not finished after {bound} steps")
        assert self.scheduler.pool.num_used == 0
        assert self.scheduler.schedule().rows == []
        for request in self.requests:
            wanted = self.outputs[request]
            if request.finish_reason is FinishReason.ABORT:
                wanted = wanted[: len(request.output_token_ids)]
            assert request.output_token_ids == wanted


def test_any_sequence_of_events():
    run_state_machine_as_test(SchedulerMachine)


@pytest.mark.slow
def test_many_more_examples():
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=150))
