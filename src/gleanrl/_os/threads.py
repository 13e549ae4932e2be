"""Threads that work ahead of the caller, in a way that interrupts and the interpreter's end can't break."""

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
    """One call that a thread makes, and what came of it.

    An interrupt (Ctrl-C, the exception of a signal handler) that comes while somebody waits harms nothing: one raw
    lock is held until the call has ended, and nobody else keeps it.

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
        """Make the call; once, after which it is forgotten, with whatever it holds."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            del self._call
            self.ended = True
            self._pending.release()

    def wait(self, seconds: float) -> bool:
        """Wait for the call to end, so long at most; return whether it has."""
        deadline = Deadline(seconds)
        while not self.ended and not deadline.passed():
            sleep(_SECONDS_BETWEEN_LOOKS)
        return self.ended

    def join(self) -> None:
        """Wait for the call to end."""
        with self._pending:
            pass

    def result(self) -> Result:
        """Wait for the call to end; return what it returned, or raise what it raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """A few threads that make calls in the order in which they were given.

    They start with the first call and end with this object; at the interpreter's end they are waited for, because a
    thread that wakes up later than that takes the process down. A forked process has none of them: it starts its own,
    and the calls that were given before are the parent's.

    Not thread-safe: its owner locks.

    Args:
        count: threads, at least 1.
        name: what they are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._process = os.getpid()
        self._open()

    def _open(self) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._started = 0
        weakref.finalize(self, self._jobs.put, None).atexit = False

    @property
    def forked(self) -> bool:
        """Whether this process is another one than that of the threads."""
        return self._process != os.getpid()

    def start(self, call: Callable[[], Result]) -> Job[Result]:
        """Have a call made."""
        if self.forked:
            self._process = os.getpid()
            self._open()
        if self._started < self.count:
            # In this order an interrupt may leave one thread more than asked for, but never none at all.
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
        self.jobs.put(None)  # for the next one: however many there are, they all end


def for_each(call: Callable[[Item], object], items: Iterable[Item], count: int) -> None:
    """Make a call with each item, in several threads, of which the caller's is one; they begin in order.

    Once this returns or raises, no call is under way. After an error none begins.

    Args:
        call: may be made in any thread.
        items: what with.
        count: threads, at most.

    Raises:
        BaseException: what a call raised first, or what interrupted the caller.
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
            except RuntimeError:  # the interpreter is about to end, and starts none
                break
            helpers.append(helper)
        work()
    except BaseException as interrupt:
        errors.append(interrupt)
    finally:
        for helper in helpers:
            while helper.is_alive():
                try:
                    helper.join()
                except BaseException as interrupt:
                    errors.append(interrupt)
    if errors:
        raise errors[0]


def stack_of(number: int | None) -> str:
    """Return in words the Python stack of the thread of that number; None for one that hasn't begun."""
    frame = None if number is None else sys._current_frames().get(number)
    if frame is None:
        return "it has no stack to show"
    return "its Python stack:\n" + "".join(traceback.format_stack(frame)).rstrip()


class Waiter:
    """One wait, which other threads end; it begins with the object, so that no call of theirs is lost."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._watched: list[Activity] = []

    def watch(self, activity: Activity) -> None:
        """End also when an activity is hurried, or over."""
        self._watched.append(activity)
        activity.waiters[self] = None

    def wake(self) -> None:
        """End the wait."""
        self._calls.put(None)

    def wait(self, deadline: Deadline) -> None:
        """Wait until somebody ends it, or for as long as there is time."""
        await_item(self._calls, deadline.remaining())

    def close(self) -> None:
        """Be woken no more."""
        for activity in self._watched:
            activity.waiters.pop(self, None)


class Activity:
    """What a thread does turn after turn, as others see it: whether they wait for it, and whether it is over.

    A thread that is waited for should wait for nobody, and nobody for one whose activity is over. Any thread may call
    any method.
    """

    def __init__(self) -> None:
        self.hurried = self.over = False
        self.waiters: dict[Waiter, None] = {}
        """Who waits, in this activity or for it."""
        _activities.add(self)

    def begin(self) -> None:
        """Begin, or go on: before there is a thread that could be waited for."""
        self.hurried = self.over = False

    def hurry(self) -> None:
        """Have the thread wait for nobody."""
        self.hurried = True
        self._wake()

    def end(self) -> None:
        """Let everybody know that it is over."""
        self.over = True
        self._wake()

    def _wake(self) -> None:
        for waiter in list(self.waiters):
            waiter.wake()
            self.waiters.pop(waiter, None)


class _Here(threading.local):
    activity: Activity | None = None


here = _Here()
"""The activity of the calling thread; None for the user's own threads."""
_activities: weakref.WeakSet[Activity] = weakref.WeakSet()


def alone() -> bool:
    """Return whether nobody will come whom the calling thread waits for: it is the only one."""
    return threading.active_count() == 1 and threading.current_thread() is threading.main_thread()


_ending = False


def ending() -> bool:
    """Return whether the program ends: a call that goes on and on has to end, too."""
    return _ending


def _end_all() -> None:
    """Let every thread end, and wait until it has."""
    global _ending
    _ending = True
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
