"""A device for tests of the scheduler: what it writes and samples is known in advance, and it checks what it reads.

It keeps what is written to each place of each page: a function of what the row sees before it and of its token, as keys
and values are. It samples a function of (request, position). Requests with H2O forget what such a function says.
"""

VOCAB = 40


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
