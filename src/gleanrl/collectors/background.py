"""A thread that collects batches in the background while the learner samples from the buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

from gleanrl._os import threads
from gleanrl.errors import UnsupportedError, WorkerTimeoutError


class _Signal:
    """Flags and locks that the background thread and its caller share."""

    stop = False
    pause = False
    thread: int | None = None

    def __init__(self) -> None:
        self.making, self.waiting = threading.Lock(), threading.Lock()


class Background:
    """Run a method again and again in a background thread.

    The run ends when `stop` is called, when the method raises, or when it returns False. It also ends when the owner of
    the method is garbage collected and when the program exits.

    The thread and the caller never use a collector at the same time. The caller enters `paused` to use the collector
    between two calls of the method. Entering `apart` is cheaper, and enough where only the collecting itself must not
    run.

    While the caller waits for the current batch, that batch bypasses the buffer's rate limiter. Otherwise the two would
    deadlock: the limiter may wait for samples that only the blocked caller could draw.

    An exception of the method is raised once, by the next call here. After that the run can be started again. One
    caller thread at a time.

    Args:
        make_batch: a bound method, held weakly. It makes one batch and returns whether there may be another one.
    """

    def __init__(self, make_batch: Callable[[], bool]) -> None:
        self._make_batch = WeakMethod(make_batch)
        self._workers = threads.Workers(1, "gleanrl-collector")
        self._job: threads.Job[bool] | None = None
        self._signal = _Signal()
        self._activity = threads.Activity()

    @property
    def running(self) -> bool:
        """Whether the thread is running; False in a forked process. Raises the exception that ended the run, once."""
        if self._job is None or self._workers.forked:
            return False
        if not self._job.ended:
            return True
        job, self._job = self._job, None
        job.result()
        return False

    @property
    def _inside(self) -> bool:
        """Whether the calling thread is the background thread."""
        return self._signal.thread == threading.get_ident()

    def start(self) -> None:
        """Start the thread.

        Raises:
            UnsupportedError: the thread is already running.
            Exception: the exception that ended the last run, if no call has raised it yet. Nothing is started.
        """
        if self.running:
            raise UnsupportedError(
                "start: the collector is already collecting in the background; call stop() first"
            )
        signal, make_batch, activity = _Signal(), self._make_batch, self._activity
        activity.begin()
        self._signal, self._job = signal, self._workers.start(lambda: _run(make_batch, signal, activity))

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop the thread after the current batch. Return whether more batches would have followed.

        The result is False if the thread was not running. In the background thread itself, the call does not wait and
        returns False.

        Args:
            timeout_s: how many seconds to wait for the current batch; None waits without limit.

        Raises:
            WorkerTimeoutError: the current batch did not end in time. It is still the last one.
            Exception: the exception that ended the run.
        """
        return self._end("stop", timeout_s)

    def _end(self, how: str, timeout_s: float | None = None) -> bool:
        """Set a flag of the run (``"stop"`` or ``"pause"``) and wait for the current batch.

        Return whether more batches would have followed. The thread is hurried first, so that it does not wait for the
        rate limiter.
        """
        # Read before the flag is set: a run that ends afterwards may have ended because of the flag.
        running = not self._inside and self.running
        setattr(self._signal, how, True)
        if not running:
            return False
        assert self._job is not None
        self._activity.hurry()
        if timeout_s is not None and not self._job.wait(timeout_s):
            raise WorkerTimeoutError(
                f"the current background batch did not end within {timeout_s} s; it is the last one: "
                "call again to keep waiting"
            )
        try:
            return self._job.result()
        finally:
            if self._job.ended:  # otherwise an interrupt ended the wait, and the thread is still running
                self._job = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the thread within a ``with`` block.

        The thread makes at least one batch between two such blocks, so that frequent pauses can't starve it. It runs
        again after the block, even if the block raises. A thread that had already ended, or that the block stops, is
        not started. Within the background thread itself the block has no effect.

        Raises:
            Exception: the exception that ended the run, before the block.
        """
        try:
            ended = not self._inside and self._end("pause")
        except BaseException:  # an interrupt ends the wait but not the run
            self._signal.pause = self._activity.hurried = False
            raise
        if not ended:
            yield
            return
        try:
            yield
        finally:
            if self._signal.stop:  # by a call of `stop` within the block, or by one before it that timed out
                self._activity.end()
            else:
                self.start()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Mark a ``with`` block as the collection of a batch, which `apart` excludes. No effect in other threads."""
        if not self._inside:
            yield
            return
        with self._signal.waiting:
            pass  # a caller that waits in `apart` gets the lock first: the lock alone isn't fair
        with self._signal.making:
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Prevent the collection of batches within a ``with`` block.

        The thread may still hand over a batch that is already collected, or wait to do so. The block has no effect
        within the background thread itself, or without a running thread.

        Raises:
            Exception: the exception that ended the run, before the block.
        """
        if self._inside or not self.running:
            yield
            return
        with self._signal.waiting, self._signal.making:
            yield


def _run(method: WeakMethod[Callable[[], bool]], signal: _Signal, activity: threads.Activity) -> bool:
    """Call the method until a pause, or a condition of `Background`, ends the run. Return whether more may follow."""
    signal.thread = threading.get_ident()
    threads.current.activity = activity
    has_collected = paused = False
    try:
        while not signal.stop and not (has_collected and signal.pause) and not threads.ending():
            make_batch = method()
            if make_batch is None or not make_batch():
                return False
            has_collected = True
            del make_batch  # between two calls the thread holds no reference that keeps the owner alive
        paused = not signal.stop and not threads.ending()
        return True
    finally:
        if not paused:
            activity.end()
