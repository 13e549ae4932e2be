"""Threads that work ahead of the caller, and waits between threads.

Both survive interrupts and the interpreter's exit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from gleanrl._os.clock import Deadline, await_item, sleep

_SECONDS_BETWEEN_LOOKS = 0.01

Result = TypeVar("Result")
Item = TypeVar("Item")


class Job(Generic[Result]):
    """One call that a thread makes, and its result.

    An interrupt (Ctrl-C, the exception of a signal handler) during a wait does no harm. The job holds a raw lock until
    the call has ended, and a waiter takes it only for a moment.

    Attributes:
        ended: whether the call has ended.
    """

    __slots__ = ("_call", "_error", "_pending", "_result", "ended")

    def __init__(self, call: Callable[[], Result]) -> None:
        self.ended = False
        self._call = call
        self._error: BaseException | None = None
        self._pending = threading.Lock()
        self._pending.acquire()

    def run(self) -> None:
        """Make the call. Works once: the call is forgotten afterwards, with all objects that it refers to."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            del self._call
            self.ended = True
            self._pending.release()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the call; return whether it has ended, with or without an error."""
        deadline = Deadline(seconds)
        while not self.ended and not deadline.passed():
            sleep(_SECONDS_BETWEEN_LOOKS)
        return self.ended

    def join(self) -> None:
        """Wait for the end of the call."""
        with self._pending:
            pass

    def result(self) -> Result:
        """Wait for the end of the call, and return its result or raise its error."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """Threads that make calls in the order of `start`.

    One more thread starts with each of the first `count` calls. The threads end with this object, after all its calls.
    The interpreter's exit drops calls that haven't begun, and waits for the threads, because a thread that wakes up
    later crashes the process. A forked child has none of the threads. It starts its own at its next call, and the
    earlier calls stay with the parent.

    Not thread-safe: its owner locks.

    Args:
        count: the number of threads, at least 1.
        name: their name.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._process = os.getpid()
        self._open()

    def _open(self) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._started = 0
        # Not at exit: `_end_all` ends the threads there, and waits for them.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the process of the threads."""
        return self._process != os.getpid()

    def start(self, call: Callable[[], Result]) -> Job[Result]:
        """Let a thread make a call, and return its job at once."""
        if self.forked:
            self._process = os.getpid()
            self._open()
        if self._started < self.count:
            # In this order, an interrupt may leave one thread too many, but never a job without a thread.
            _Worker(self._jobs, self._name).start()
            self._started += 1
        job = Job(call)
        self._jobs.put(job)
        return job


class _Worker(threading.Thread):
    def __init__(self, jobs: SimpleQueue[Job[Any] | None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs = jobs

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()
            del job
        self.jobs.put(None)  # ends the next thread, which ends the one after it


def for_each(call: Callable[[Item], object], items: Iterable[Item], count: int) -> None:
    """Make a call with each item, in several threads including the caller's; calls begin in the order of the items.

    No call is running once this returns or raises. After an error, no further call begins.

    Args:
        call: the function; any thread may call it.
        items: its arguments.
        count: the most threads.

    Raises:
        BaseException: the first error of a call, or the interrupt of the caller.
    """
    left, errors = deque(items), list[BaseException]()

    def work() -> None:
        while not errors:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                call(item)
            except BaseException as error:
                errors.append(error)

    helpers: list[threading.Thread] = []
    try:
        for _ in range(min(count, len(left)) - 1):
            helper = threading.Thread(target=work, name="gleanrl-helper")
            try:
                helper.start()
            # The interpreter is exiting and starts no threads any more; the caller does the work.
            except RuntimeError:
                break
            helpers.append(helper)
        work()
    except BaseException as interrupt:
        errors.append(interrupt)
    finally:
        for helper in helpers:
            # An interrupt ends a join early, and the helper would still use the caller's objects.
            while helper.is_alive():
                try:
                    helper.join()
                except BaseException as interrupt:
                    errors.append(interrupt)
    if errors:
        raise errors[0]


def stack_of(number: int | None) -> str:
    """Return the Python stack of a thread as text; `number` is the thread's ident, or None if it hasn't started."""
    frame = None if number is None else sys._current_frames().get(number)
    if frame is None:
        return "it has no stack to show"
    return "its Python stack:\n" + "".join(traceback.format_stack(frame)).rstrip()


class Waiter:
    """One wait that other threads can end.

    It begins with the object. So a `wake` between the caller's check of its condition and its `wait` isn't lost.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._watched: list[Activity] = []

    def watch(self, activity: Activity) -> None:
        """Also end the wait when an activity is hurried, or over."""
        self._watched.append(activity)
        activity.waiters[self] = None

    def wake(self) -> None:
        """End the wait."""
        self._calls.put(None)

    def wait(self, deadline: Deadline) -> None:
        """Wait for `wake`, or until the deadline. Each `wake` ends one wait; it also ends a wait that begins later."""
        await_item(self._calls, deadline.remaining())

    def close(self) -> None:
        """Unregister from the watched activities."""
        for activity in self._watched:
            activity.waiters.pop(self, None)


class Activity:
    """The state of a thread's repeated work, for other threads.

    The state says whether other threads wait for the work (`hurried`), and whether it is over.

    While another thread waits for it, the thread should not wait itself (otherwise: deadlock). No thread should wait
    for an activity that is over. Any thread may call any method.
    """

    def __init__(self) -> None:
        self.hurried = self.over = False
        self.waiters: dict[Waiter, None] = {}
        """The waiters within this activity, and the waiters for it."""
        _activities.add(self)

    def begin(self) -> None:
        """Begin or resume. Called before the thread exists."""
        self.hurried = self.over = False

    def hurry(self) -> None:
        """Ask the thread not to wait: set `hurried`, and end and remove all waits within the activity and for it."""
        self.hurried = True
        self._wake()

    def end(self) -> None:
        """Announce that the activity is over: set `over`, and end and remove all waits within it or for it."""
        self.over = True
        self._wake()

    def _wake(self) -> None:
        for waiter in list(self.waiters):
            waiter.wake()
            self.waiters.pop(waiter, None)


class _CurrentThread(threading.local):
    activity: Activity | None = None


current = _CurrentThread()
"""The activity of the calling thread; None for the user's threads."""
_activities: weakref.WeakSet[Activity] = weakref.WeakSet()


def alone() -> bool:
    """Return whether the calling thread is the only one, so that no other thread can end its wait."""
    return threading.active_count() == 1 and threading.current_thread() is threading.main_thread()


_ending = False


def ending() -> bool:
    """Return whether the program is ending. Calls that repeat without an end must stop then."""
    return _ending


def _end_all() -> None:
    """Drop the calls of all `Workers` that haven't begun, end their threads, and wait until they have ended."""
    global _ending
    _ending = True
    # First the activities, so that no worker's job waits for another thread while it is joined below.
    for activity in list(_activities):
        activity.hurry()
    workers = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    for worker in workers:
        try:
            while worker.jobs.get_nowait() is not None:
                pass
        except Empty:
            pass
        worker.jobs.put(None)
    for worker in workers:
        worker.join()


atexit.register(_end_all)
