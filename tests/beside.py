"""A thread that calls a function repeatedly while a test runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(act: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call `act` every `every_s` seconds in a thread, until the block ends."""
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
