"""When a fork may begin, and which pages of its source it begins with. Imports no jax."""

import dataclasses

from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.request import Request, Status


@dataclasses.dataclass(frozen=True)
class ForkRule:
    """The rule for one engine.

    Attributes:
        live: which pages a source still has.
        has_open_pages: whether the newest tokens of a request are in a page of its own that nobody can copy.
    """

    live: LivePages
    has_open_pages: bool

    def is_due(self, fork: Request) -> bool:
        """Whether it need not wait for its source: that has computed what they share, or has ended."""
        source = fork.source
        return source is not None and (source.is_finished or self._has_passed(source, fork))

    def can_share(self, fork: Request) -> bool:
        """Whether its source holds all pages that the fork needs; else it is a request like any other."""
        source = fork.source
        return (
            source is not None
            and self._has_passed(source, fork)
            and source.num_dead_pages <= self.live.num_dead(self._start(fork))
        )

    def pages(self, fork: Request) -> tuple[list[int], list[int], int]:
        """Returns the source's pages that hold the tokens before the fork's first, and how many of theirs are dead.

        Those are full ones, and apart from them the one that the fork goes on in, which the source goes on writing.
        """
        source, (num_full, rest) = fork.source, divmod(self._start(fork), self.live.page_size)
        assert source is not None
        fork.page_keys = source.page_keys[:num_full]
        num_live = num_full - source.num_dead_pages
        return source.pages[:num_live], source.pages[num_live : num_live + (rest > 0)], source.num_dead_pages

    def _start(self, fork: Request) -> int:
        """Returns what a fork computes first: its last token, or all in the open page, which is its owner's."""
        last = fork.num_tokens - 1
        return last - last % self.live.page_size if self.has_open_pages else last

    @staticmethod
    def _has_passed(source: Request, fork: Request) -> bool:
        return source.status is Status.RUNNING and source.num_computed_tokens >= fork.num_tokens - 1
