"""hypothesis drives Scheduler and PagePool with a fake device; everything is checked after every move.

The fake device keeps what is written to each place of each page: a function of what the row sees before it and of its
token, as keys and values are. It samples a function of (request, position), so every request's output is known in
advance, however it was chunked, preempted, run ahead, forked or aborted, and whatever pages it found. Requests with H2O
forget what a function of (request, position) says, so that what they hold is known as well. Pages go to a host tier
and a disk and come back, and the process starts anew over that disk, now and then with another model.
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
from tests.jaxinfer.engine.fake_tiers import FakeDisk, FakeTransfer, Thread

MAX_LEN = 24
VOCAB = 40
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


def seen_by(position, live):
    """The positions before `position` that its token sees."""
    first = 0 if live.window is None else max(0, position - live.window + 1)
    return [*range(min(live.sinks, first)), *range(first, position)]


def values_of(tokens, live, model):
    """What a device writes for each token, given what it has written for those that the token sees."""
    values = []
    for position, token in enumerate(tokens):
        values.append(hash((model, token, *(values[i] for i in seen_by(position, live)))))
    return values


def mass(seed, position):
    """Attention that a token receives, as good as any."""
    return hash((seed, position, -1))


def kept(request, count):
    """Positions that a request with H2O holds after `count` tokens."""
    h2o, exact = request.params.h2o, request.num_exact_tokens
    held = list(range(min(count, exact)))
    if count > exact and request.num_prompt_tokens > h2o.budget:
        older = sorted(held[: exact - h2o.recent], key=lambda position: -mass(request.seed, position))
        held = older[: h2o.heavy] + held[exact - h2o.recent :]
    for t in range(exact, count):
        held.remove(min((p for p in held if p <= t - h2o.recent), key=lambda position: mass(request.seed, position)))
        held.append(t)
    return sorted(held)


class FakeDevice:
    """Runs steps at once and in order, as the device does."""

    def __init__(self, live, model):
        self.live = live
        self.page_size = live.page_size
        self.model = model  # goes into all that is written
        self.cache = {}  # place in a page: what was written there last
        self.log = {}  # place in a page: position and seed of the request whose token was written there last
        self.last_tokens = {}  # by slot
        self.texts = {}  # what is written for each token of a request's prompt and expected output

    def move(self, step, tier):
        """What `Engine._move_pages` does."""
        for page, key in step.saves:
            tier.put(key, self.page(page))
        for done in step.compactions:
            self.compact(done)
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
        if request.params.h2o:
            assert self.held(request, position) == [(before, text[before]) for before in kept(request, position)]
        else:
            before = [*seen_by(position - 1, self.live), position - 1]
            assert [self.cache[self.place(request, i)] for i in before] == [text[i] for i in before]
        banned = request.banned_next_tokens() if request.needs_host_mask else ()
        self.last_tokens[request.slot] = token = sampled(request, position, banned)
        return token

    def write(self, request, position, token):
        if position >= request.num_exact_tokens:
            self.replace(request, position, token)
            return
        # Nothing was written there if the row has ended, which the host does not know yet.
        seen = (self.cache.get(self.place(request, i)) for i in seen_by(position, self.live))
        self.cache[self.place(request, position)] = hash((self.model, token, *seen))
        self.log[self.place(request, position)] = (position, request.seed)

    def replace(self, request, position, token):
        """Forgets a token of a request with H2O for another one."""
        h2o, text = request.params.h2o, self.texts[request]
        if position >= len(text):
            return  # it has ended, which the host does not know yet
        places = [self.place(request, i) for i in range(h2o.budget)]
        victim = min(
            (place for place in places if self.log[place][0] <= position - h2o.recent),
            key=lambda place: mass(request.seed, self.log[place][0]),
        )
        self.cache[victim] = hash((self.model, token, *text[:position]))
        self.log[victim] = (position, request.seed)

    def held(self, request, count):
        """Positions that a request with H2O holds after `count` tokens, with what was written for each."""
        places = [self.place(request, i) for i in range(request.num_places(count))]
        return sorted((self.log[place][0], self.cache[place]) for place in places)

    def compact(self, done):
        size, h2o = self.page_size, done.h2o
        places = [page * size + i for page in done.pages for i in range(size)][: done.num_tokens]
        content = [(self.cache[place], self.log[place]) for place in places]
        recent = content[done.num_tokens - h2o.recent :]
        older = sorted(content[: done.num_tokens - h2o.recent], key=lambda one: -mass(one[1][1], one[1][0]))
        for place, (value, entry) in zip(places, older[: h2o.heavy] + recent, strict=False):
            self.cache[place], self.log[place] = value, entry

    def place(self, request, position):
        index, num_sinks = position // self.page_size, self.live.num_sink_pages
        if index >= num_sinks:
            assert index >= num_sinks + request.num_dead_pages, "a page was given back that is still seen"
            index -= request.num_dead_pages
        page = request.pages[index]
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
