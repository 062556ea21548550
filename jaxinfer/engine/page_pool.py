"""The pool of KV pages: who owns which, and what the free ones still hold. Imports no jax."""

import collections
from collections.abc import Sequence

NULL_PAGE = 0  # padding is written there and nobody reads it


class PagePool:
    """Hands out page numbers 1 .. num_pages - 1 and takes them back; page 0 is the null page.

    A page is in one of three states:

        used    one owner or several; several only read it
        cached  no owner, but its content has a key by which it can be found again
        empty   no owner, no content that anybody could ask for

    Empty pages are handed out first, last in, first out, while they are warm in the caches; then cached ones, of which
    the least recently used goes first (it is evicted).
    """

    def __init__(self, num_pages: int, page_size: int):
        """Makes a pool with every page empty.

        Raises:
            ValueError: there is no page besides the null page.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (one is the null page), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evictions = 0
        self._evicted: list[tuple[int, bytes]] = []  # pages and their former keys, until somebody takes them
        self._empty = list(range(num_pages - 1, NULL_PAGE, -1))
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # least recently used first
        self._num_owners = [0] * num_pages
        self._keys: dict[int, bytes] = {}  # of pages whose content can be found, used or cached
        self._pages: dict[bytes, int] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, empty and cached."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages whose content can be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - 1 - self.num_free

    @property
    def num_shared(self) -> int:
        """Pages that several requests hold."""
        return sum(owners > 1 for owners in self._num_owners)

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Returns the pages `shared`, of which the caller becomes one more owner, and `count` pages of its own.

        Returns None, and changes nothing, when so many are not free.
        """
        if not count and not shared:
            return []  # the usual case: every decode row asks in every step
        if count > self.num_free - sum(page in self._cached for page in shared):
            return None
        for page in shared:
            self._cached.pop(page, None)
            self._num_owners[page] += 1
        split = len(self._empty) - min(count, len(self._empty))
        pages = self._empty[split:]
        del self._empty[split:]  # in place: the list may be long
        pages += [self._evict() for _ in range(count - len(pages))]
        for page in pages:
            self._num_owners[page] = 1
        return [*shared, *pages]

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back from one owner, given in order of position: of a cached chain, the tail is evicted first."""
        for page in reversed(pages):
            self._num_owners[page] -= 1
            if self._num_owners[page]:
                continue
            if page in self._keys:
                self._cached[page] = None
            else:
                self._empty.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Makes the content of a used page known by `key`, unless another page is; nobody may write to it any more."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key

    def find(self, key: bytes) -> int | None:
        """Returns the page whose content has this key."""
        return self._pages.get(key)

    def take_evicted(self) -> list[tuple[int, bytes]]:
        """Returns the pages evicted since the last call, whose content is there until the next step, and their keys."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def cached(self) -> list[tuple[int, bytes]]:
        """Returns the free pages whose content can be found, least recently used first, and their keys."""
        return [(page, self._keys[page]) for page in self._cached]

    def forget(self) -> None:
        """Drops every key; cached pages become empty."""
        self._empty += reversed(self._cached)
        self._cached.clear()
        self._keys.clear()
        self._pages.clear()

    def check_integrity(self, held: Sequence[int]) -> None:
        """Checks owners, free pages and keys against the pages that requests hold, one entry an owner.

        Raises:
            RuntimeError: a page is lost, has other owners than `held` says, is free twice or free and held, is not of
                this pool; a cached page has no key, an empty one has; keys and pages do not map to each other.
        """
        owners = collections.Counter(held)
        free = [*self._empty, *self._cached]
        known = set(range(1, self.num_pages))
        wrong = {
            "lost": known - owners.keys() - set(free),
            "unknown": (owners.keys() | set(free)) - known,
            "free and held": owners.keys() & set(free),
            "free twice": {page for page, count in collections.Counter(free).items() if count > 1},
            "with wrong owners": {page for page in known if self._num_owners[page] != owners[page]},
            "cached without a key": self._cached.keys() - self._keys.keys(),
            "empty with a key": set(self._empty) & self._keys.keys(),
            "with a wrong key": {page for page, key in self._keys.items() if self._pages.get(key) != page},
            "of unknown keys": set(self._pages.values()) - self._keys.keys(),
        }
        if found := [f"{what} {sorted(pages)[:8]}" for what, pages in wrong.items() if pages]:
            raise RuntimeError(
                f"the page pool is inconsistent: {len(self._empty)} empty, {len(self._cached)} cached and "
                f"{len(owners)} held of {self.num_pages - 1}; {', '.join(found)}"
            )

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        key = self._keys.pop(page)
        del self._pages[key]
        self._evicted.append((page, key))
        self.num_evictions += 1
        return page
