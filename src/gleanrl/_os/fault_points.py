"""Named fault points: places in the code where a test can make something go wrong.

Code says `faults.point("fs.sync")` just before the act. Outside `inject` that's one comparison of a module's
variable (about 50 ns). Inside, a plan of actions decides what happens at which visit.

The rule of `inject`: tests only, one at a time in a process (a nested one replaces the outer one until it
ends). Points may be visited from any thread; visits are counted under a lock, actions run outside it.
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
    """An action and the visits of its fault point at which it happens.

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
    """What `inject` yields: how often each fault point was visited so far, planned or not."""

    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str) -> int:
        """Count one visit of the point and return its number, from 1."""
        with self._lock:
            self.counts[name] += 1
            return self.counts[name]


_active: tuple[Mapping[str, At], Visits] | None = None


def point(name: str) -> None:
    """Mark a place where a fault can be injected; does nothing unless a test planned one for `name`.

    Args:
        name: What is about to happen, as `area.act`.
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
    """Make the planned actions happen at their fault points while the context is open.

    An empty plan only counts, which tells a test how many places there are to fail.

    Args:
        plan: For each fault point's name an action, or an `At` that also says at which visits.

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
