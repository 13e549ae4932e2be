"""What goes on in a thread beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(act: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call `act` each time that so many seconds have passed, until the block ends."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
