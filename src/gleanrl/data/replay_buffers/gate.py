"""The lock of a buffer, which the objects that it is made of share."""

from __future__ import annotations

import os
import threading
import weakref

_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """The lock of one buffer: ``with gate.lock:``.

    Under it happen a whole write, from its checks until every part knows of it; a draw, but not its fetch, for which
    no writer waits; whatever changes a part from outside. The thread that holds it may take it again: who is told of a
    write may call the buffer.

    In a forked process it is open, whoever held it in the parent: that thread doesn't exist there, and what it was
    writing at that moment isn't published.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _gates.add(self)

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        """Copies and pickles have a lock of their own."""
        return Gate, ()


def _reopen() -> None:
    for gate in list(_gates):
        gate.lock = threading.RLock()


os.register_at_fork(after_in_child=_reopen)
