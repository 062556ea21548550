"""Ctrl-C that waits for a safe moment."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Holds back SIGINT until the block ends, so that it never lands half way through a change of state.

    Without it, a Ctrl-C between a donated step and the assignment of its result would lose the KV cache. Only the
    main thread receives signals; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple] = []
    former = signal.signal(signal.SIGINT, lambda *event: received.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if received and callable(former):
            former(*received[0])  # Python's own handler raises KeyboardInterrupt
