"""Progress on standard error, shown only where a person is likely to watch."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]

SPINNER_DELAY = 0.3  # seconds; what is quicker would only flicker


@contextlib.contextmanager
def byte_progress(description: str) -> Iterator[Progress]:
    """Yields a callback (bytes done, bytes in all) that draws a bar from its first call on."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description)

    def update(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


@contextlib.contextmanager
def spinner(description: str) -> Iterator[None]:
    """Shows that something is going on, once it has gone on for a while."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(description)
    timer = threading.Timer(SPINNER_DELAY, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may just be starting the spinner
        status.stop()
