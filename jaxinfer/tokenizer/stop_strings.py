"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Splits a stream of text into what is final and what may yet become a stop string.

    The stop that completes first wins; of those that complete at the same character, the longest. So the
    result does not depend on how the text is cut into pieces.

    Attributes:
        matched: The stop string that was found, or None.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool):
        if isinstance(stop, str):
            raise ValueError(f"stop must be a list of strings, got the string {stop!r}; write stop=[{stop!r}]")
        for index, string in enumerate(stop):
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop[{index}] must be a non-empty string, got {string!r}")
        self._stop = tuple(stop)
        self._include = include_in_output
        self._first_characters = frozenset(string[0] for string in stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is final now; after a match, the text up to the cut and then nothing."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        held = self._held + text
        found = [(at + len(string), at, string) for string in self._stop if (at := held.find(string)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return held[: end if self._include else start]
        cut = self._hold_from(held)
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """Returns the held text: the stream has ended, so no stop string can come of it."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str) -> int:
        """Returns where the longest end of the text begins that a stop string begins with."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(string.startswith(tail) for string in self._stop):
                    return start
        return len(text)
