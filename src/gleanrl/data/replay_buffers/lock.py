"""The lock of a buffer, which the objects that it is made of share."""

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

_TURN_S = 5e-5
"""About what a thread needs to wake up."""
_TURNS = 20


class Shared(Protocol):
    """What processes share: the storage of their buffers."""

    @property
    def memory(self) -> SharedMemory:
        """Whose lock is taken."""

    def pull(self) -> None:
        """Come in step: the lock was taken."""

    def settle(self) -> None:
        """Leave nothing unfinished: the lock is about to be given up."""


class _OneForEachUse:
    """What stands behind the locks of gates that have none of their own: a new hold for each ``with``."""

    def __get__(self, gate: BufferLock | None, owner: Any) -> Any:
        return self if gate is None else _Hold(gate)


class BufferLock:
    """The lock of one buffer: ``with gate.lock:``.

    Under it happen a whole write, from its checks until every part knows of it; a draw, but not its fetch, for which
    no writer waits; whatever changes a part from outside. The thread that holds it may take it again: who is told of a
    write may call the buffer.

    With a shared storage it excludes other processes as well, and while it is held the storage is in step with them.

    In a forked process it is open, whoever held it in the parent: that thread doesn't exist there, and what it was
    writing at that moment isn't published.

    Args:
        storage: what processes share; None for threads of this process alone.
    """

    lock: AbstractContextManager[Any] = _OneForEachUse()  # type: ignore[assignment]
    inserting: AbstractContextManager[Any] = _OneForEachUse()  # type: ignore[assignment]
    """The lock, for a write of new records."""
    sampling: AbstractContextManager[Any] = _OneForEachUse()  # type: ignore[assignment]
    """The lock, for the draw of a batch that is handed out."""
    asked: bool = False
    """Whether a learner waits for the lock: a hint, for those who take it again and again to write (`give_way`)."""
    limiter: Any
    """What may hold back inserts and samples (see `LimitedGate`); None for nothing."""
    _storage: weakref.ref[Any] | None = None

    def __init__(self, storage: Shared | None = None) -> None:
        self.limiter = None
        if storage is not None:
            self._storage = weakref.ref(storage)
        self.after_fork(())
        renew_in_child(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have a lock of their own in their process; that of the processes is one."""
        return BufferLock, (self.shared,)

    @property
    def shared(self) -> Any:
        """The storage, if other processes are excluded, too; None if not."""
        return None if self._storage is None else self._storage()

    def share(self, storage: Shared) -> None:
        """Exclude other processes from now on, for everybody who has this gate; the caller holds it."""
        self._storage = weakref.ref(storage)
        self.after_fork(())

    def give_way(self) -> None:
        """Let a thread that has `asked` in first; the caller doesn't hold the lock.

        Python's locks aren't fair: who gives one up and takes it at once has it again before anybody woke up, so that a
        learner beside a thread that only writes would draw a few times a second.
        """
        for _ in range(_TURNS):
            if not self.asked:
                return
            clock.sleep(_TURN_S)
        self.asked = False  # he was interrupted, or gets no processor: nobody waits for that

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Open."""
        self.threads = threading.RLock()
        self.asked = False
        self.outer: Callable[[], Any] = nobody
        """The hold that has the lock of the processes."""
        if self._storage is None:
            # Found before the class's own, at no cost.
            self.lock = self.inserting = self.sampling = self.threads
        else:
            self.forget_locks()

    def forget_locks(self) -> None:
        """Have those of the class stand for the locks."""
        for name in ("lock", "inserting", "sampling"):
            self.__dict__.pop(name, None)


class _Hold:
    """One ``with``. It gives up what it has with its last reference at the latest, wherever an interrupt came.

    The ``with`` statement keeps it alive. Python runs signal handlers between its instructions, never inside a call of
    C code: a lock is taken and noted within one such call, and given up within another.
    """

    __slots__ = ("__weakref__", "_file", "_gate", "_thread")

    def __init__(self, gate: BufferLock) -> None:
        self._gate = gate
        self._thread: list[Any] = []  # what to call with what, to give up each lock
        self._file: list[Any] = []

    def __enter__(self) -> None:
        gate, storage = self._gate, self._gate.shared
        self.__class__ = _Held
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
                gate.outer = nobody
            deque(gate.shared.memory.releasing(self._file), 0)
            give_up(gate.threads, self._thread)
        self.__class__ = _Hold


class _Held(_Hold):
    __slots__ = ()

    def __del__(self) -> None:
        """Give up what an interrupt left; an exception in here would be lost, so that this isn't everybody's way."""
        self._leave()


def take(lock: threading.RLock, noted: list[Any]) -> None:
    """Take a lock and note it, within one call of C code."""
    noted.extend(map({True: ()}.get, starmap(lock.acquire, [()])))


def give_up(lock: threading.RLock, noted: list[Any]) -> None:
    """Release a lock as often as is noted, within one call of C code."""
    deque(starmap(lock.release, map(noted.pop, range(len(noted)))), 0)


def nobody() -> None:
    """Return what a weak reference to nobody does."""
    return None
