"""The clock of the library: every wait and timeout uses it.

Times are monotonic seconds, so that a system clock that is set back can't extend a deadline. Tests install a
`FakeClock` with `use`; then no call in the process really waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol


class Clock(Protocol):
    """The methods of a clock."""

    def monotonic(self) -> float:
        """Return the seconds since a fixed moment; never decreases."""

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""

    def await_item(self, queue: SimpleQueue[Any], seconds: float | None) -> None:
        """Wait for an item in `queue` and take it, or return after `seconds`; None waits without limit."""


class SystemClock:
    """The clock of the system."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def await_item(self, queue: SimpleQueue[Any], seconds: float | None) -> None:
        """Wait for an item in `queue` and take it. Signal handlers run during the wait."""
        with suppress(Empty):
            queue.get(timeout=None if seconds is None else min(seconds, threading.TIMEOUT_MAX))


class FakeClock:
    """A clock for tests. Its time moves only by `advance`, `sleep` and a timeout of `await_item`, which return at once.

    Only one thread may sleep on it at a time, because each sleep moves the time immediately.

    Args:
        start: The first reading in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """Return the current reading in seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Move the time by `seconds` at once, and append them to `slept`."""
        self.slept.append(seconds)
        self.advance(seconds)

    def await_item(self, queue: SimpleQueue[Any], seconds: float | None) -> None:
        """Take an item from `queue`. If the queue is empty and `seconds` isn't None, sleep for `seconds` instead.

        With None and an empty queue, the call really waits for an item.
        """
        if seconds is None or not queue.empty():
            queue.get()
        else:
            self.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Move the time by `seconds`.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"FakeClock.advance: expected seconds >= 0, got {seconds}")
        self._now += seconds


_clock: Clock = SystemClock()


def monotonic() -> float:
    """Return the seconds since a fixed moment; never decreases."""
    return _clock.monotonic()


def sleep(seconds: float) -> None:
    """Wait for `seconds`; return at once for zero or less."""
    if seconds > 0:
        _clock.sleep(seconds)


def await_item(queue: SimpleQueue[Any], seconds: float | None) -> None:
    """Wait for an item in `queue`, remove and drop it, or return after `seconds`; None waits without limit."""
    _clock.await_item(queue, seconds)


@contextmanager
def use(clock: Clock) -> Iterator[None]:
    """Replace the process's clock while the context is open. For tests only."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


_LEAST_SECONDS = 1e-3  # Less work than this isn't followed by a rest.


class Pace:
    """Limits the share of a processor that a thread uses: after each piece of work, the thread rests.

    A low priority would also free the processor. But a thread of low priority may hold a lock for long, because it runs
    only when no other thread does. Every thread that waits for the lock would then wait, too.

    Args:
        share: the share of one processor, in (0, 1], for the thread that creates this object.
    """

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._since = time.thread_time()

    def keep(self) -> None:
        """Rest in proportion to the processor time used since the last rest, unless it is below 1 ms.

        Only the thread that created this object may call this.
        """
        used = time.thread_time() - self._since
        if used >= _LEAST_SECONDS:
            sleep(used * self._rest)
            self._since = time.thread_time()


class Deadline:
    """A moment by which an event must have happened.

    Each call reads the current clock. Any number of threads may share a deadline.

    Args:
        seconds: Time from now; `None` for a deadline that never passes.

    Raises:
        ValueError: `seconds` is negative or NaN.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"Deadline: expected seconds >= 0 or None, got {seconds}")
        self._end = None if seconds is None else monotonic() + seconds

    def remaining(self) -> float | None:
        """Return the seconds left: 0.0 after the deadline, `None` if it never passes.

        The waits of the standard library accept this as their timeout.
        """
        return None if self._end is None else max(0.0, self._end - monotonic())

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self._end is not None and monotonic() >= self._end
