"""Interrupts: what Ctrl-C, or any exception of a signal handler, does to a change that has begun."""

from __future__ import annotations

from collections.abc import Callable


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
