"""Where the time of a run went."""

import os
import sys
import time
from pathlib import Path


class Stopwatch:
    """Laps of a run in seconds since the process began, and its tokens."""

    def __init__(self):
        """Ends the lap "start", that of the interpreter and the command line, where the system knows it."""
        self.num_tokens = 0
        self._num_first = 0  # tokens that came first, all at once: no time passed between them
        self._last = time.perf_counter()
        age = _process_age()
        self._laps: dict[str, float] = {} if age is None else {"start": age}
        self._notes: dict[str, str] = {}
        self._to_first = 0.0

    def lap(self, name: str, note: str = "") -> None:
        """Ends a lap and starts the next; the note is shown beside it."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._notes[name] = note
        self._last = now

    def count(self, num_tokens: int) -> None:
        """Counts tokens that have just come; the first end the lap "first token"."""
        if num_tokens and not self.num_tokens:
            self.lap("first token")
            self._to_first = sum(self._laps.values())
            self._num_first = num_tokens
        self.num_tokens += num_tokens

    def report(self) -> str:
        """Returns a table of the laps, the speed of decoding and the most memory that was used."""
        lines = []
        for name, seconds in self._laps.items():
            note = f"  {self._notes[name]}" if self._notes.get(name) else ""
            lines.append(f"{name:14}{seconds:8.3f} s{note}")
            if name == "first token":
                lines.append(f"{'= until then':14}{self._to_first:8.3f} s")
        if self.num_tokens > self._num_first:
            speed = (self.num_tokens - self._num_first) / self._laps["other tokens"]
            lines.append(f"{'decode':14}{speed:8.1f} tok/s")
        lines.append(f"{'tokens':14}{self.num_tokens:8}")
        return "\n".join([*lines, f"{'peak memory':14}{_peak_memory() / 2**20:8.0f} MiB"])


def _process_age() -> float | None:
    """Returns the seconds since this process began, None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # the name before may hold spaces
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None


def _peak_memory() -> int:
    """Returns the most bytes of the host that were resident at once."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent had when it started us
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    import resource

    # in bytes on macOS and in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
