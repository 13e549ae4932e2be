"""Protection of changes against interrupts, and renewal of objects in forked child processes.

An interrupt is Ctrl-C or any exception of a signal handler. A fork is `os.fork`, or multiprocessing's "fork". The child
has a copy of all objects, but only the thread that forked. So locks of other threads stay locked, random generators
repeat the parent's numbers, and shared maps are still the parent's.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from itertools import count
from threading import RLock
from typing import Protocol


class Renewable(Protocol):
    """An object that must be renewed in a forked child."""

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Make the object the child's own. Called in the child before any other code runs there.

        Args:
            lineage: the child's number among its parent's children, preceded by the numbers of its ancestors; unique in
                a program.
        """


_parts: weakref.WeakSet[Renewable] = weakref.WeakSet()
_children = count(1)
_lineage: tuple[int, ...] = ()
_child = 0


def renew_in_child(part: Renewable) -> None:
    """Call `part.after_fork` in every child that is forked from now on. Only a weak reference to `part` is kept."""
    _parts.add(part)


# Counted before the fork. If the child counted, the parent's next child would get the same number.
def _before() -> None:
    global _child
    _child = next(_children)


def _in_child() -> None:
    global _children, _lineage
    _lineage, _children = (*_lineage, _child), count(1)
    for part in list(_parts):
        part.after_fork(_lineage)


os.register_at_fork(before=_before, after_in_child=_in_child)


class ForkSafeLock:
    """A reentrant lock that a forked child finds free, whichever thread of the parent held it.

    Attributes:
        lock: the lock itself, for ``with ...lock:``. A `with` of this object would run Python code between the
            acquisition and the block, where an interrupt leaves the lock held.
    """

    def __init__(self) -> None:
        self.after_fork(())
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Take a new lock: the thread that held the old one doesn't exist in the child."""
        self.lock = RLock()


def to_the_end(change: Callable[[], None]) -> None:
    """Carry out a change completely; raise an interrupt that comes during the change after it.

    Python runs signal handlers between any two instructions of the main thread. An exception of a handler can therefore
    leave a change half done. Users press Ctrl-C more than once: up to three interrupts leave the change complete.

    The retries are nested `try` statements, not a loop or a recursion. Python checks for signals at a backward jump and
    at the start of a function, which are outside of the `try`.

    Args:
        change: an idempotent function that can't fail. All checks came before it, so it only assigns computed values.
    """
    try:
        change()
    except BaseException:
        try:
            change()
        except BaseException:
            try:
                change()
            except BaseException:
                change()
        raise
