"""The lock of a buffer, shared by its components and, for a shared storage, by processes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import starmap
from typing import Any, Protocol

from gleanrl._os import clock
from gleanrl._os.interrupts import renew_in_child
from gleanrl._os.shared_memory import SharedMemory

_PAUSE_S = 5e-5
"""Seconds of one wait in `give_way`: about as long as a thread needs to wake up."""
_MAX_PAUSES = 20


class Shared(Protocol):
    """The protocol of a storage that several processes share."""

    @property
    def memory(self) -> SharedMemory:
        """The shared memory that holds the lock between processes."""

    def pull(self) -> None:
        """Read the other processes' changes. Called right after the lock is acquired."""

    def settle(self) -> None:
        """Undo a failed write of this process. Called right before the lock is released."""


class _OneForEachUse:
    """Descriptor for the locks of a shared storage: returns a new `_Hold` for each ``with``."""

    def __get__(self, gate: BufferLock | None, owner: Any) -> Any:
        return self if gate is None else _Hold(gate)


class BufferLock:
    """The lock of one buffer: ``with gate.lock:``.

    The lock covers:

    - a whole write, from its checks until all parts have processed it;
    - a draw, but not the fetch of its records, so that no writer waits for a fetch;
    - every change of a part by the user.

    The lock is reentrant: a part that is notified of a write may call the buffer.

    With a shared storage the lock also excludes other processes. While a process holds it, the storage in this process
    matches the shared memory.

    In a forked process the lock is free, even if a thread of the parent held it. That thread doesn't exist in the
    child, and its unfinished write isn't published.

    Args:
        storage: the storage that processes share; None for threads of this process only.
    """

    lock: AbstractContextManager[Any] = _OneForEachUse()  # type: ignore[assignment]
    inserting: AbstractContextManager[Any] = _OneForEachUse()  # type: ignore[assignment]
    """The lock, taken to write new records."""
    sampling: AbstractContextManager[Any] = _OneForEachUse()  # type: ignore[assignment]
    """The lock, taken to draw a batch that will be delivered."""
    learner_waits: bool = False
    """Whether a learner waits for the lock: a hint for threads that write in a tight loop (see `give_way`)."""
    limiter: Any
    """The rate limiter that may delay inserts and samples (see `RateLimitedLock`); None without one."""
    _storage: weakref.ref[Any] | None = None

    def __init__(self, storage: Shared | None = None) -> None:
        self.limiter = None
        if storage is not None:
            self._storage = weakref.ref(storage)
        self.after_fork(())
        renew_in_child(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as a new lock for the other process. The lock between processes stays the same."""
        return BufferLock, (self.shared,)

    @property
    def shared(self) -> Any:
        """The storage if the lock excludes other processes; None otherwise."""
        return None if self._storage is None else self._storage()

    def share(self, storage: Shared) -> None:
        """Exclude other processes from now on, for all buffers with this lock. The caller holds the lock.

        A new thread lock replaces the present one.
        """
        self._storage = weakref.ref(storage)
        self.after_fork(())

    def give_way(self) -> None:
        """Let a waiting learner acquire the lock first. The caller doesn't hold the lock.

        Waits for about 1 ms at most, then clears `learner_waits`.

        Python's locks aren't fair. A thread that releases and re-acquires a lock gets it before a waiting thread wakes
        up. Next to a thread that only writes, a learner would draw a few times a second.
        """
        for _ in range(_MAX_PAUSES):
            if not self.learner_waits:
                return
            clock.sleep(_PAUSE_S)
        self.learner_waits = False  # the learner was interrupted or has no CPU: don't delay further writes

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Replace the lock by a free one, for which no learner waits."""
        self.threads = threading.RLock()
        self.learner_waits = False
        self.outer: Callable[[], Any] = no_holder
        """A weak reference to the `_Hold` that has the lock between processes."""
        if self._storage is None:
            # Instance attributes take precedence over the class's descriptors, so a plain lock costs no `_Hold`.
            self.lock = self.inserting = self.sampling = self.threads
        else:
            self.forget_locks()

    def forget_locks(self) -> None:
        """Remove the instance's plain locks, so that the class's descriptors are used."""
        for name in ("lock", "inserting", "sampling"):
            self.__dict__.pop(name, None)


class _Hold:
    """One ``with`` block. It releases its locks when its last reference is dropped, even after an interrupt.

    The ``with`` statement keeps the object alive. Python runs signal handlers between its own instructions, never
    inside a call of C code. So one C call both acquires a lock and records it, and another one releases it: no
    interrupt can come in between.
    """

    __slots__ = ("__weakref__", "_file", "_gate", "_thread")

    def __init__(self, gate: BufferLock) -> None:
        self._gate = gate
        self._thread: list[Any] = []  # one entry for each acquisition of the thread lock
        self._file: list[Any] = []

    def __enter__(self) -> None:
        gate, storage = self._gate, self._gate.shared
        self.__class__ = _AcquiredHold
        take(gate.threads, self._thread)
        if gate.outer() is None:
            gate.outer = weakref.ref(self)
            self._file.extend(storage.memory.acquiring())
            storage.pull()

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        gate = self._gate
        try:
            if self._file:
                gate.shared.settle()
        finally:
            if gate.outer() is self:
                gate.outer = no_holder
            deque(gate.shared.memory.releasing(self._file), 0)
            give_up(gate.threads, self._thread)
        self.__class__ = _Hold


class _AcquiredHold(_Hold):
    __slots__ = ()

    def __del__(self) -> None:
        """Release the locks after an interrupt. Not the usual path, since Python discards exceptions raised in here."""
        self._leave()


def take(lock: threading.RLock, noted: list[Any]) -> None:
    """Acquire a lock and append an entry to `noted`, within one call of C code."""
    noted.extend(map({True: ()}.get, starmap(lock.acquire, [()])))


def give_up(lock: threading.RLock, noted: list[Any]) -> None:
    """Release a lock once for each entry of `noted` and remove the entry, within one call of C code."""
    deque(starmap(lock.release, map(noted.pop, range(len(noted)))), 0)


def no_holder() -> None:
    """Return None, as a weak reference does whose object is gone."""
    return None
