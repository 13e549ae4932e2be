"""The lock of a buffer, shared by its components and, for a shared storage, by processes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import starmap
from typing import Any, Protocol

from gleanrl._arrays.results import RateCounts
from gleanrl._os import clock, threads
from gleanrl._os.interrupts import renew_in_child
from gleanrl._os.shared_memory import SharedMemory
from gleanrl.data.replay_buffers.rate_limiter import Limiter, RowCounts, SamplesPerInsert
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

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
    """Descriptor for the locks of a shared or rate-limited storage: returns a new `_Hold` for each ``with``."""

    def __init__(self, side: str = "") -> None:
        self._side = side

    def __get__(self, gate: BufferLock | None, owner: Any) -> Any:
        return self if gate is None else _Hold(gate, self._side)


class BufferLock:
    """The lock of one buffer: ``with gate.lock:``.

    The lock covers:

    - a whole write, from its checks until all parts have processed it;
    - a draw, but not the fetch of its records, so that no writer waits for a fetch;
    - every change of a part by the user.

    The lock is reentrant: a part that is notified of a write may call the buffer.

    With a shared storage the lock also excludes other processes. While a process holds it, the storage in this process
    matches the shared memory.

    With a rate limiter, inserts and samples wait at the lock until the limiter admits them (see `limit`). Any change
    under the lock may end a wait. So each release wakes the waiting threads whose condition now holds.

    In a forked process the lock is free, even if a thread of the parent held it. That thread doesn't exist in the
    child, and its unfinished write isn't published.

    Args:
        storage: the storage that processes share; None for threads of this process only.
    """

    lock: AbstractContextManager[Any] = _OneForEachUse()  # type: ignore[assignment]
    inserting: AbstractContextManager[Any] = _OneForEachUse("insert")  # type: ignore[assignment]
    """The lock, taken to write new records."""
    sampling: AbstractContextManager[Any] = _OneForEachUse("sample")  # type: ignore[assignment]
    """The lock, taken to draw a batch that will be delivered."""
    learner_waits: bool = False
    """Whether a learner waits for the lock: a hint for threads that write in a tight loop (see `give_way`)."""
    limiter: Any = None
    """The `Limiter` that may delay inserts and samples; None without one."""
    _storage: weakref.ref[Any] | None = None

    def __init__(self, storage: Shared | None = None) -> None:
        if storage is not None:
            self._storage = weakref.ref(storage)
        self.after_fork(())
        renew_in_child(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as a new lock with the same limiter's counts. The lock between processes stays the same."""
        limiter = self.limiter
        if limiter is not None:
            return _copied, (limiter.rule, limiter.storage, limiter.counts)
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

    def limit(self, rule: SamplesPerInsert, storage: RowCounts, counts: RateCounts | None = None) -> None:
        """Make inserts and samples wait for each other from now on.

        Args:
            rule: the rate limiter.
            storage: the storage of the buffers that use this lock.
            counts: initial counts; None to start at 0.

        Raises:
            InvalidTypeError: `rule` isn't a rate limiter.
            InvalidArgumentError: `min_size` exceeds the storage's capacity, or the lock already has a limiter.
            UnsupportedError: the storage is shared with other processes.
        """
        if not isinstance(rule, SamplesPerInsert):
            raise InvalidTypeError(f"rate_limiter: expected SamplesPerInsert or MinSize, got {rule!r}")
        if self.shared is not None:
            raise UnsupportedError(
                "rate_limiter: it counts in one process only, but other processes use the storage; leave it out"
            )
        if self.limiter is not None:
            raise InvalidArgumentError(
                "rate_limiter: another buffer over this storage has one, which applies to both; leave it out here"
            )
        if rule.min_size > storage.max_size:
            raise InvalidArgumentError(
                f"rate_limiter: min_size={rule.min_size} is more than the {storage.max_size} records that fit into the "
                "storage; lower min_size, or use a larger storage"
            )
        with self.lock:
            self._forget_plain_locks()
            self.limiter = Limiter(rule, storage, counts)

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
        """Replace the lock by a free one, for which no call waits."""
        self.threads = threading.RLock()
        self.learner_waits = False
        self.outer: Callable[[], Any] = no_holder
        """A weak reference to the first `_Hold` of the thread that has the lock."""
        self.waiting: dict[threads.Waiter, Callable[[], bool]] = {}
        """The calls that wait for the limiter, each with a function that returns whether it must still wait."""
        if self.limiter is not None:
            self.limiter.stand_alone()
        elif self._storage is None:
            # Instance attributes take precedence over the class's descriptors, so a plain lock costs no `_Hold`.
            self.lock = self.inserting = self.sampling = self.threads
        else:
            self._forget_plain_locks()

    def _forget_plain_locks(self) -> None:
        """Remove the instance's plain locks, so that the class's descriptors are used."""
        for name in ("lock", "inserting", "sampling"):
            self.__dict__.pop(name, None)


def _copied(rule: SamplesPerInsert, storage: RowCounts, counts: RateCounts) -> BufferLock:
    gate = BufferLock()
    gate.limit(rule, storage, counts)
    return gate


class _Hold:
    """One ``with`` block. It releases its locks when its last reference is dropped, even after an interrupt.

    The ``with`` statement keeps the object alive. Python runs signal handlers between its own instructions, never
    inside a call of C code. So one C call both acquires a lock and records it, and another one releases it: no
    interrupt can come in between.

    Args:
        gate: the lock.
        side: ``"insert"``, ``"sample"``, or ``""`` for a call that never waits for the limiter and isn't counted.
    """

    __slots__ = ("__weakref__", "_file", "_gate", "_side", "_thread")

    def __init__(self, gate: BufferLock, side: str) -> None:
        self._gate, self._side = gate, side
        self._thread: list[Any] = []  # one entry for each acquisition of the thread lock
        self._file: list[Any] = []

    def __enter__(self) -> None:
        self.__class__ = _AcquiredHold
        try:
            self._take()
            if self._side and self._gate.limiter is not None:
                self._pass(self._gate.limiter)
        except BaseException:
            self.__exit__()
            raise

    def _take(self) -> None:
        gate = self._gate
        take(gate.threads, self._thread)
        if gate.outer() is None:
            gate.outer = weakref.ref(self)
            if gate._storage is not None:
                storage = gate.shared
                self._file.extend(storage.memory.acquiring())
                storage.pull()

    def _pass(self, limiter: Limiter) -> None:
        """Wait until the limiter admits this call, and begin to count an insert."""
        inserts = self._side == "insert"
        needed = limiter.inserts_wait if inserts else limiter.samples_wait
        if needed():
            self._wait(limiter, needed)
        if inserts:
            feeder = threads.current.activity
            if feeder is not None and feeder not in limiter.feeders:
                # Waiting samples must also wake if this thread ends without admitting them.
                for waiter in self._gate.waiting:
                    waiter.watch(feeder)
            limiter.insert_begins(self._thread, feeder)

    def _wait(self, limiter: Limiter, needed: Callable[[], bool]) -> None:
        """Release and re-acquire the lock until the call may proceed.

        Raises:
            RateLimiterTimeoutError: the timeout passed, or no other thread could ever end the wait.
        """
        gate, here = self._gate, threads.current.activity
        gate.learner_waits = False  # this thread waits for the limiter, not for the lock
        deadline = clock.Deadline(limiter.rule.timeout_s)
        while True:
            waiter = threads.Waiter()
            try:
                # Register for all events before the condition is checked: an event in between is then not missed.
                for activity in (*limiter.feeders, here):
                    if activity is not None:
                        waiter.watch(activity)
                gate.waiting[waiter] = needed
                # A hurried thread doesn't wait, because another thread waits for it (otherwise: deadlock).
                if not needed() or (here is not None and here.hurried):
                    return
                if why := self._in_vain(limiter, deadline):
                    raise limiter.error(self._side, why)
                self._give_up()
                waiter.wait(deadline)
                self._take()
            finally:
                gate.waiting.pop(waiter, None)
                waiter.close()

    def _in_vain(self, limiter: Limiter, deadline: clock.Deadline) -> str:
        """Return why it makes no sense to wait any longer; an empty text if it does."""
        if deadline.passed():
            return f"for {limiter.rule.timeout_s:g} s"
        if self._gate.outer() is not self:
            return "within a call that holds the buffer's lock, so that no other thread can end the wait"
        return (
            "in the only thread that there is, so that no other thread can end the wait"
            if threads.alone()
            else ""
        )

    def __exit__(self, *exception: object) -> None:
        gate, limiter = self._gate, self._gate.limiter
        if limiter is not None and self._thread:
            limiter.insert_ends(self._thread)
        try:
            if self._file:
                gate.shared.settle()
            if limiter is not None and gate.outer() is self:
                for waiter, needed in list(gate.waiting.items()):
                    if not needed():
                        waiter.wake()
                        gate.waiting.pop(waiter, None)
        finally:
            self._give_up()
        self.__class__ = _Hold

    def _give_up(self) -> None:
        gate = self._gate
        if gate.outer() is self:
            gate.outer = no_holder
        if self._file:
            deque(gate.shared.memory.releasing(self._file), 0)
        give_up(gate.threads, self._thread)


class _AcquiredHold(_Hold):
    __slots__ = ()

    def __del__(self) -> None:
        """Release the locks after an interrupt. Not the usual path, since Python discards exceptions raised in here."""
        self.__exit__()


def take(lock: threading.RLock, noted: list[Any]) -> None:
    """Acquire a lock and append an entry to `noted`, within one call of C code."""
    noted.extend(map({True: ()}.get, starmap(lock.acquire, [()])))


def give_up(lock: threading.RLock, noted: list[Any]) -> None:
    """Release a lock once for each entry of `noted` and remove the entry, within one call of C code."""
    deque(starmap(lock.release, map(noted.pop, range(len(noted)))), 0)


def no_holder() -> None:
    """Return None, as a weak reference does whose object is gone."""
    return None
