"""The pool of KV pages: which are free. Imports no jax."""

import itertools
from collections.abc import Sequence

NULL_PAGE = 0  # padding is written there and nobody reads it


class PagePool:
    """Hands out page numbers 1 .. num_pages - 1 and takes them back; page 0 is the null page.

    A page has one owner. Freed pages are reused last in, first out, while they are warm in the caches.
    """

    def __init__(self, num_pages: int, page_size: int):
        """Makes a pool with every page free.

        Raises:
            ValueError: there is no page besides the null page.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (one is the null page), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - 1 - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` pages, or None when so many are not free."""
        if count > len(self._free):
            return None
        split = len(self._free) - count
        pages = self._free[split:]
        del self._free[split:]  # in place: the list may be long, and every decode row asks in every step
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back."""
        self._free.extend(pages)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Checks that every page is either free or one of those `held` by requests, exactly once.

        Raises:
            RuntimeError: a page is lost, held twice, free and held, or not a page of this pool.
        """
        seen = sorted([*self._free, *held])
        if seen != list(range(1, self.num_pages)):
            lost = set(range(1, self.num_pages)) - set(seen)
            twice = {page for page, following in itertools.pairwise(seen) if page == following}
            unknown = set(seen) - set(range(1, self.num_pages))
            raise RuntimeError(
                f"the page pool is inconsistent: {len(self._free)} free and {len(held)} held of "
                f"{self.num_pages - 1}; lost {sorted(lost)[:8]}, twice {sorted(twice)[:8]}, "
                f"unknown {sorted(unknown)[:8]}"
            )
