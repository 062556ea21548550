"""hypothesis drives Scheduler and PagePool with a fake device; everything is checked after every move.

The fake device keeps what is written to each place of each page: a function of what the row reads before it and of its
token, as keys and values are. It samples a function of (request, position), so every request's output is known in
advance, however it was chunked, preempted, run ahead, forked or aborted, and whatever pages it found. Pages go to a
host tier and a disk and come back, and the process starts anew over that disk, now and then with another model.
"""

import itertools

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
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.request import FinishReason, Request, Status
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.swap_cost import SwapCost
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.engine.fake_tiers import FakeDisk, FakeTransfer, Thread

MAX_LEN = 24
VOCAB = 40
STOP = 0
BAD_WORDS = (*((a, b) for a in range(8) for b in range(1, 8)), (8, 9, 10), (20, 20, 20, 20))
PROMPTS = st.integers(1, 6) | st.integers(1, MAX_LEN - 1)  # short ones grow far, until pages run out
SALTS = st.sampled_from([None, None, None, "tenant"])
PLAIN = SamplingParams()
PARAMS = st.sampled_from([PLAIN, PLAIN, SamplingParams(prompt_logprobs=0)])
OUTPUTS = st.just(MAX_LEN) | st.integers(1, MAX_LEN)


def sampled(request, position, banned=()):
    """Token at `position`: now and then the stop token, rarely nothing at all (-1)."""
    value = hash((request.seed, position)) % (VOCAB + 1)
    if value == VOCAB:
        return -1
    return next(token for i in range(VOCAB) if (token := (value + i) % VOCAB) not in banned)


def expected(request, inherited=()):
    output = list(inherited)
    while len(output) < request.max_tokens:
        banned = {
            word[-1] for word in request.bad_words if output[max(0, len(output) - len(word) + 1) :] == [*word[:-1]]
        }
        token = sampled(request, request.num_prompt_tokens + len(output), banned)
        if token < 0:
            break
        output.append(token)
        if token in request.stop_token_ids:
            break
    return output


def written(before, token):
    """What a device writes for a token, given what it has written for the one before it."""
    return hash((before, token))


class FakeDevice:
    """Runs steps at once and in order, as the device does."""

    def __init__(self, page_size, model):
        self.page_size = page_size
        self.model = model  # what is written before the first token
        self.cache = {}  # place in a page: what was written there last
        self.last_tokens = {}  # by slot
        self.texts = {}  # what is written for each token of a request's prompt and expected output

    def move(self, step, tier):
        """What `Engine._move_pages` does."""
        for page, key in step.saves:
            tier.put(key, self.page(page))
        for staged, page in step.loads:
            assert staged["delay"] < 0  # it has arrived
            self.put(page, staged["content"])

    def run(self, step):
        """Returns the sampled tokens of each row."""
        staged = {copy: self.page(copy[0]) for copy in step.copies}
        for (_, destination), places in staged.items():
            self.put(destination, places)
        writes = []
        for row in step.rows:
            tokens = row.request.token_ids(row.start, row.start + row.num_tokens)
            if not tokens:  # not read yet: the step takes the slot's last token
                assert row.num_tokens == 1
                tokens = [self.last_tokens[row.request.slot]]
            assert len(tokens) == row.num_tokens
            writes += [(row.start + i, row.request, token) for i, token in enumerate(tokens)]
        # In each layer all rows write before any row reads: what a row reads at lower positions is there.
        for position, request, token in sorted(writes, key=lambda write: write[0]):
            self.write(request, position, token)
        sampled_tokens = [[] for _ in step.rows]
        for i in range(max(row.num_samples for row in step.rows)):
            for row, tokens in zip(step.rows, sampled_tokens, strict=True):
                if i < row.num_samples and not (tokens and self.ends(row.request, tokens[-1])):
                    tokens.append(self.sample(row.request, row.start + row.num_tokens + i, write_last=i > 0))
        return [tokens + [-1] * (row.num_samples - len(tokens)) for row, tokens in zip(step.rows, sampled_tokens)]

    def ends(self, request, token):
        return token < 0 or token in request.stop_token_ids

    def sample(self, request, position, write_last):
        if write_last:
            self.write(request, position - 1, self.last_tokens[request.slot])
        text = self.texts[request]
        if position > len(text):
            return -1  # it has ended, which the host does not know yet
        assert [self.cache[self.place(request, before)] for before in range(position)] == text[:position]
        banned = request.banned_next_tokens() if request.needs_host_mask else ()
        self.last_tokens[request.slot] = token = sampled(request, position, banned)
        return token

    def write(self, request, position, token):
        # Nothing was written there if the row has ended, which the host does not know yet.
        before = self.cache.get(self.place(request, position - 1)) if position else self.model
        self.cache[self.place(request, position)] = written(before, token)

    def place(self, request, position):
        page = request.pages[position // self.page_size]
        assert page != 0
        return page * self.page_size + position % self.page_size

    def put(self, page, places):
        for i, value in enumerate(places):
            self.cache[page * self.page_size + i] = value

    def page(self, page):
        return [self.cache.get(page * self.page_size + i) for i in range(self.page_size)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data):
        seqs = data.draw(st.integers(1, 8))
        page_size = data.draw(st.sampled_from([1, 2, 5, 16]))
        pages_each = -(-MAX_LEN // page_size)
        spare = data.draw(st.sampled_from([0, 1, pages_each // 2, pages_each, pages_each * seqs]))
        self.config = EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + data.draw(st.integers(0, 24)),
            page_size=page_size,
            num_pages=1 + pages_each + spare,  # from one full request upwards
            policy=data.draw(st.sampled_from(["fcfs", "priority"])),
            decode_steps=data.draw(st.integers(1, 8)),
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
        self.scheduler = Scheduler(self.config, pool, self.tier, SwapCost(*self.rates), bytes([self.model]))
        self.device = FakeDevice(self.config.page_size, self.model)
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
                self.add_request(first.prompt_token_ids, output, source=first, **options)

    @precondition(lambda self: any(r.is_finished for r in self.requests))
    @rule(data=st.data(), more=st.integers(1, 4), output=OUTPUTS, salt=SALTS)
    def follow_up(self, data, more, output, salt):
        """The next turn of a conversation: a prompt that begins with a request's prompt and output."""
        before = data.draw(st.sampled_from([r for r in self.requests if r.is_finished]))
        prompt = [*before.prompt_token_ids, *before.output_token_ids, *range(50, 50 + more)]
        self.add_request(prompt[: MAX_LEN - 1], output, salt)

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
        return not request.is_finished and len(self.requests) < 40

    def add_request(
        self, prompt, output, salt, params=PLAIN, priority=0, mask=False, stop=False, source=None, inherited=()
    ):
        request = Request(
            str(len(self.requests)), list(prompt), params, min(output, MAX_LEN - len(prompt)), len(self.requests),
            stop_token_ids=frozenset({STOP}) if stop else frozenset(), bad_words=BAD_WORDS if mask else (),
            priority=priority, cache_salt=salt, source=source, output_token_ids=list(inherited),
        )  # fmt: skip
        self.outputs[request] = expected(request, inherited)
        text = list(itertools.accumulate([*prompt, *self.outputs[request]], written, initial=self.model))[1:]
        self.device.texts[request] = text
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
        for source, destination in step.copies:
            assert source not in [other for _, other in step.copies]
            assert sum(request.pages.count(destination) for request in self.scheduler.running) == 1
        for row in rows:
            request, start = row.request, row.start
            assert not request.num_pages_to_load
            if self.next_position[request] is None:  # its first row since its admission
                self.check_start(request, start)
            else:
                assert start == self.next_position[request]  # nothing is skipped, nothing computed twice
            self.next_position[request] = request.num_computed_tokens
            assert row.num_tokens >= 1
            assert request.num_computed_tokens == start + row.num_tokens + max(0, row.num_samples - 1)
            assert row.num_samples <= (config.decode_steps if step.is_decode and not self.scheduler.waiting else 1)
            if request.needs_host_mask and row.num_samples:
                assert request.num_in_flight == row.num_samples == 1

    def check_start(self, request, start):
        known = request.num_known_tokens  # of which the last at least is computed
        assert start < known
        assert start % self.config.page_size == 0 or start == known - 1
        assert not start or request.params.prompt_logprobs is None or request in self.forks

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

    def check_sharing(self):
        """Requests that share a page have the same salt and the same text up to its end."""
        owners = {}
        for request in self.scheduler.running:
            for i, page in enumerate(request.pages):
                other, place = owners.setdefault(page, (request, i))
                end = (i + 1) * self.config.page_size
                assert (place, other.cache_salt) == (i, request.cache_salt)
                assert other is request or other.token_ids(0, end) == request.token_ids(0, end)
                assert other is request or len(request.token_ids(0, end)) == end  # full: nobody writes there

    def check_keys(self):
        """A key means one salt and text, and every page that has it holds just that."""
        size, pool = self.config.page_size, self.scheduler.pool
        for request in self.requests:
            seen = self.num_keys_seen.get(request, 0)
            for i, key in enumerate(request.page_keys[seen:], seen):
                tokens = request.token_ids(0, (i + 1) * size)
                content = list(itertools.accumulate(tokens, written, initial=self.model))[-size:]
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
