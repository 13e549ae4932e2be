"""Batch after batch in a thread, while the learner samples from the buffer that they go into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

from gleanrl._os import threads
from gleanrl.errors import UnsupportedError, WorkerTimeoutError


class _Signal:
    """What a run and whoever stops it share."""

    stop = False
    pause = False
    thread: int | None = None

    def __init__(self) -> None:
        self.making, self.asked = threading.Lock(), threading.Lock()


class Background:
    """Takes turns in a thread until it is stopped, a turn fails, or there is nothing left to do.

    The thread and the caller never use a collector at the same time: whoever wants to do anything else meanwhile does
    it within `paused`, between two turns, or, where that is enough, within `apart`. A turn that somebody waits for
    waits for nobody: what it puts into a buffer passes the buffer's rate limiter. What a turn raised is raised by the
    next call here, once; then it can be started again. It ends with the last reference to the turn's owner, and with
    the program. One caller at a time.

    Args:
        turn: a method, held weakly; returns whether there is another turn.
    """

    def __init__(self, turn: Callable[[], bool]) -> None:
        self._turn = WeakMethod(turn)
        self._workers = threads.Workers(1, "gleanrl-collector")
        self._job: threads.Job[bool] | None = None
        self._signal = _Signal()
        self._activity = threads.Activity()

    @property
    def running(self) -> bool:
        """Whether turns are being taken; raises what the last one raised."""
        if self._job is None or self._workers.forked:
            return False
        if not self._job.ended:
            return True
        job, self._job = self._job, None
        job.result()
        return False

    @property
    def _inside(self) -> bool:
        """Whether the caller is a turn."""
        return self._signal.thread == threading.get_ident()

    def start(self) -> None:
        """Begin."""
        if self.running:
            raise UnsupportedError("start: the collector collects in the background already")
        signal, turn, activity = _Signal(), self._turn, self._activity
        activity.begin()
        self._signal, self._job = signal, self._workers.start(lambda: _run(turn, signal, activity))

    def stop(self, timeout_s: float | None = None) -> bool:
        """End after the turn at hand; return whether there would have been further ones.

        Args:
            timeout_s: how long to wait for its end; None for as long as it takes.

        Raises:
            WorkerTimeoutError: it didn't end in that time; it will, and then there is no further one.
        """
        return self._end("stop", timeout_s)

    def _end(self, how: str, timeout_s: float | None = None) -> bool:
        # Looked at before it's told: what ends afterwards may have ended because of that.
        running = not self._inside and self.running
        setattr(self._signal, how, True)
        if not running:
            return False
        assert self._job is not None
        self._activity.hurry()
        if timeout_s is not None and not self._job.wait(timeout_s):
            raise WorkerTimeoutError(
                f"the batch in the background didn't end within {timeout_s} s; it's the last one: call again to wait on"
            )
        try:
            return self._job.result()
        finally:
            if self._job.ended:  # else an interrupt: the turn at hand goes on
                self._job = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no turn within a ``with`` block, and at least one between two of them; a turn itself is such a block."""
        try:
            ended = not self._inside and self._end("pause")
        except BaseException:  # an interrupt ends the wait, not the run
            self._signal.pause = self._activity.hurried = False
            raise
        if not ended:
            yield
            return
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Have a batch made within a ``with`` block."""
        if not self._inside:
            yield
            return
        with self._signal.asked:
            pass  # whoever waits for the end of a batch comes before the next one
        with self._signal.making:
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Have no batch made within a ``with`` block; one that was made may be handed over, or wait for that."""
        if self._inside or not self.running:
            yield
            return
        with self._signal.asked, self._signal.making:
            yield


def _run(method: WeakMethod[Callable[[], bool]], signal: _Signal, activity: threads.Activity) -> bool:
    """Return whether there are further turns."""
    signal.thread = threading.get_ident()
    threads.here.activity = activity
    taken = paused = False
    try:
        while not signal.stop and not (taken and signal.pause) and not threads.ending():
            turn = method()
            if turn is None or not turn():
                return False
            taken = True
            del turn  # between two turns nobody here keeps the owner alive
        paused = not signal.stop and not threads.ending()
        return True
    finally:
        if not paused:
            activity.end()
