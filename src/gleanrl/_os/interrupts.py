"""Interrupts: what Ctrl-C, or any exception of a signal handler, does to a change that has begun.

Forks of this process (`os.fork`, multiprocessing's "fork"): what belongs to one process is renewed in the other.

A forked child has a copy of everything, and of threads only the one that forked: locks that others held stay taken,
generators go on like the parent's, and memory-mapped files are the parent's, too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from itertools import count
from typing import Protocol


class Renewable(Protocol):
    """What has to know that it is in a forked child now."""

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Become the child's own; called in the child, before anything else runs there.

        Args:
            lineage: which child this is of its parent, and so on; no two processes of a program have the same.
        """


_parts: weakref.WeakSet[Renewable] = weakref.WeakSet()
_children = count(1)
_lineage: tuple[int, ...] = ()
_child = 0


def renew_in_child(part: Renewable) -> None:
    """Call `part.after_fork` in every child that is forked from now on; it is held weakly."""
    _parts.add(part)


def _before() -> None:
    global _child
    _child = next(_children)


def _in_child() -> None:
    global _children, _lineage
    _lineage, _children = (*_lineage, _child), count(1)
    for part in list(_parts):
        part.after_fork(_lineage)


os.register_at_fork(before=_before, after_in_child=_in_child)


def to_the_end(change: Callable[[], None]) -> None:
    """Carry out a change that has to be whole; an interrupt that comes meanwhile is raised after it.

    Python runs signal handlers between any two instructions of the main thread, so that an exception of theirs can
    leave a change half done. Impatient users press Ctrl-C again: up to three interrupts leave the change whole. No loop
    and no recursion, since Python looks for signals at a jump and at the begin of a function, outside of their `try`.

    Args:
        change: what can't fail by itself (everything was checked before), and may be done twice with the result of
            once: it assigns what was worked out before.
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
