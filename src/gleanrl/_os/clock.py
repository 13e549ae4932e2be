"""The seam to time: every wait and time-out of the library goes through here.

Times are monotonic seconds; a system clock that is set back can't stretch a deadline. Tests put a `FakeClock`
in place with `use`, and then no call in the process really waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol


class Clock(Protocol):
    """What a clock has to offer."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""

    def await_item(self, queue: SimpleQueue[Any], seconds: float | None) -> None:
        """Wait until something is in `queue`, and take it, or until `seconds` have passed; None for ever."""


class SystemClock:
    """The real one."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def await_item(self, queue: SimpleQueue[Any], seconds: float | None) -> None:
        """Wait for something in `queue`; signal handlers run meanwhile."""
        with suppress(Empty):
            queue.get(timeout=None if seconds is None else min(seconds, threading.TIMEOUT_MAX))


class FakeClock:
    """A clock that stands still until it is told to move, or until somebody sleeps on it.

    Not safe to share between threads that sleep at the same time: each sleep moves the time at once.

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
        """Move the time by `seconds` at once, and note it in `slept`."""
        self.slept.append(seconds)
        self.advance(seconds)

    def await_item(self, queue: SimpleQueue[Any], seconds: float | None) -> None:
        """Take what is in `queue`; if there is nothing, sleep for `seconds` instead."""
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
    """Return seconds since some fixed moment; never goes back."""
    return _clock.monotonic()


def sleep(seconds: float) -> None:
    """Wait for `seconds`; nothing happens for zero or less."""
    if seconds > 0:
        _clock.sleep(seconds)


def await_item(queue: SimpleQueue[Any], seconds: float | None) -> None:
    """Wait until something is in `queue`, and take it, or until `seconds` have passed; None for ever."""
    _clock.await_item(queue, seconds)


@contextmanager
def use(clock: Clock) -> Iterator[None]:
    """Put another clock in the place of the real one while the context is open (tests only; process-wide)."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


_LEAST_SECONDS = 1e-3  # of work, before it's worth a rest


class Pace:
    """The pace of a thread that leaves most of a processor to others: what it takes is followed by a rest.

    A low priority would do the same, but whoever waits for a lock of such a thread waits until nobody else runs.

    Args:
        share: of a processor, in (0, 1]; for the thread that makes this.
    """

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._since = time.thread_time()

    def keep(self) -> None:
        """Rest, if there was something to do since the last time."""
        used = time.thread_time() - self._since
        if used >= _LEAST_SECONDS:
            sleep(used * self._rest)
            self._since = time.thread_time()


class Deadline:
    """A moment by which something must have happened.

    It's read on the clock that is in place at each call. Any number of threads may read one deadline.

    Args:
        seconds: From now on; `None` for a deadline that never passes.

    Raises:
        ValueError: `seconds` is negative or NaN.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"Deadline: expected seconds >= 0 or None, got {seconds}")
        self._end = None if seconds is None else monotonic() + seconds

    def remaining(self) -> float | None:
        """Return the seconds left, 0.0 once it has passed, `None` if it never does.

        That's what the waits of the standard library take as their timeout.
        """
        return None if self._end is None else max(0.0, self._end - monotonic())

    def passed(self) -> bool:
        """Return whether the moment has come."""
        return self._end is not None and monotonic() >= self._end
