"""Named fault points: places in the code where a test can inject an error.

Code calls ``fault_points.point("fs.sync")`` just before the action. Outside of `inject`, a call costs one comparison of
a module variable (about 50 ns). Inside, a plan of actions decides which visits fail.

Only tests use `inject`, one at a time in a process; a nested `inject` replaces the outer one until it ends. Any thread
may visit a point. Visits are counted under a lock, and actions run outside of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

Action = BaseException | type[BaseException] | Callable[[], object]


@dataclass(frozen=True)
class At:
    """An action, and the visits of its fault point at which it happens.

    Args:
        action: An exception (instance or class) to raise, or a function to call.
        visit: The first visit at which it happens, counted from 1.
        repeat: Whether it happens at every later visit as well.
    """

    action: Action
    visit: int = 1
    repeat: bool = False

    def is_due(self, visit: int) -> bool:
        """Return whether the action happens at this visit."""
        return visit == self.visit or (self.repeat and visit > self.visit)


@dataclass
class Visits:
    """The numbers of visits of all fault points so far, planned or not. `inject` yields it."""

    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str) -> int:
        """Count one visit of the point and return its number, from 1."""
        with self._lock:
            self.counts[name] += 1
            return self.counts[name]


_active: tuple[Mapping[str, At], Visits] | None = None


def point(name: str) -> None:
    """Mark a place where a test can inject a fault. Inside `inject`, count the visit, and run an action that is due.

    Args:
        name: The action that follows, as ``area.action``.
    """
    active = _active
    if active is not None:
        _visit(name, *active)


def _visit(name: str, plan: Mapping[str, At], visits: Visits) -> None:
    number = visits.add(name)
    at = plan.get(name)
    if at is None or not at.is_due(number):
        return
    if isinstance(at.action, (BaseException, type)):
        raise at.action
    at.action()


@contextmanager
def inject(plan: Mapping[str, At | Action]) -> Iterator[Visits]:
    """Run the planned actions at their fault points while the context is open.

    An empty plan only counts visits, which tells a test how many places can fail.

    Args:
        plan: An action for each fault point's name, or an `At` that also selects the visits.

    Yields:
        The visits so far.
    """
    global _active
    before = _active
    visits = Visits()
    _active = ({name: at if isinstance(at, At) else At(at) for name, at in plan.items()}, visits)
    try:
        yield visits
    finally:
        _active = before
