"""Where the time of a run went."""

import sys
import time


class Stopwatch:
    """Laps of a run in seconds, and its tokens."""

    def __init__(self):
        """Starts the first lap."""
        self.num_tokens = 0
        self._num_first = 0  # tokens that came first, all at once: no time passed between them
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends a lap and starts the next."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def count(self, num_tokens: int) -> None:
        """Counts tokens that have just come; the first end the lap "first token"."""
        if num_tokens and not self.num_tokens:
            self.lap("first token")
            self._num_first = num_tokens
        self.num_tokens += num_tokens

    def report(self) -> str:
        """Returns a table of the laps, the speed of decoding and the most memory that was used."""
        lines = [f"{name:14}{seconds:8.3f} s" for name, seconds in self._laps.items()]
        if self.num_tokens > self._num_first:
            speed = (self.num_tokens - self._num_first) / self._laps["other tokens"]
            lines.append(f"{'decode':14}{speed:8.1f} tok/s")
        lines.append(f"{'tokens':14}{self.num_tokens:8}")
        return "\n".join([*lines, f"{'peak memory':14}{_peak_memory() / 2**20:8.0f} MiB"])


def _peak_memory() -> int:
    import resource

    # of the host; in bytes on macOS and in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
