"""Stand-ins for what the host tier stands on: transfers that take their time, threads that run when told, a disk."""

import ast
import collections
import itertools


class FakeTransfer:
    """Pages are lists of integers; an upload arrives when it has been asked for now and then."""

    page_bytes = 1

    def __init__(self):
        self._delays = itertools.cycle([0, 2, 0, 1, 3])

    def upload(self, page):
        return {"content": list(page), "delay": next(self._delays)}

    def is_ready(self, page):
        page["delay"] -= 1
        return page["delay"] < 0

    def wait(self, page):
        page["delay"] = 0

    def pack(self, page):
        return repr(page).encode()

    def unpack(self, data):
        return ast.literal_eval(data.decode())


class Thread:
    """An executor of one thread, which runs only when `run` is called or somebody waits for it."""

    def __init__(self):
        self._jobs = collections.deque()

    def submit(self, function, *arguments):
        future = FakeFuture(self, function, arguments)
        self._jobs.append(future)
        return future

    def run(self):
        if self._jobs:
            self._jobs.popleft().call()

    def shutdown(self):
        while self._jobs:
            self.run()


class FakeFuture:
    def __init__(self, thread, function, arguments):
        self._thread, self._function, self._arguments, self._result = thread, function, arguments, []

    def call(self):
        self._result.append(self._function(*self._arguments))

    def done(self):
        return bool(self._result)

    def result(self):
        while not self._result:
            self._thread.run()
        return self._result[0]

    def exception(self):
        self.result()


class FakeDisk:
    """A bounded store that outlives everything else; a damaged page shows itself when it is read."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.files = collections.OrderedDict()
        self.num_evictions = self.num_skipped = 0

    @property
    def num_pages(self):
        return len(self.files)

    def __contains__(self, key):
        return key in self.files

    def read(self, key):
        data = self.files.get(key)
        if data is None:
            self.files.pop(key, None)
            self.num_skipped += 1
        return data

    def write(self, key, data):
        self.files[key] = data
        while len(self.files) > self.capacity:
            self.files.popitem(last=False)
            self.num_evictions += 1

    def damage(self, number):
        if self.files:
            self.files[list(self.files)[number % len(self.files)]] = None

    def clear(self):
        self.files.clear()
