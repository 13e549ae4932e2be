"""The lock of a buffer, which the objects that it is made of share."""

from __future__ import annotations

import threading

from gleanrl.system.forks import renew_in_child


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
        renew_in_child(self)

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        """Copies and pickles have a lock of their own."""
        return Gate, ()

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Open."""
        self.lock = threading.RLock()
