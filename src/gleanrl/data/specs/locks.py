"""Locks of composites, and whether any spec has changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from typing_extensions import Self

from gleanrl.errors import UnsupportedError


class Changes:
    """Tells whether specs of this process have changed.

    Attributes:
        latest: another object after any mask was set or dropped, or any entry of a composite exchanged, and after
            any work of an environment in another process, whose masks may have changed.
    """

    latest = object()

    @classmethod
    def note(cls) -> None:
        """Note a change that was made."""
        cls.latest = object()


class Lockable(ABC):
    """Something with entries that can be locked, with what is nested in it.

    Attributes:
        all_locks: another object after any lock in this process was set or opened: as long as it is the same, what
            `is_fixed` keeps its entries.
    """

    all_locks = object()
    _locked = False
    _locked_from_above = False

    require_own: Callable[[str], None]

    @abstractmethod
    def _nested(self) -> Iterable[Lockable]:
        """Return what is locked and unlocked together with this one."""

    @property
    def is_locked(self) -> bool:
        """Whether entries can't be set or removed."""
        return self._locked

    @property
    def locked(self) -> bool:
        """The same as `is_locked`."""
        return self._locked

    @property
    def is_fixed(self) -> bool:
        """Whether entries can't be set or removed, here or in anything nested."""
        return self._locked and all(part.is_fixed for part in self._nested())

    def lock_(self, recurse: bool | None = None) -> Self:
        """Forbid setting and removing entries, here and, unless `recurse` is False, in nested composites.

        Returns:
            the composite itself.
        """
        self.require_own("lock_")
        self._set_lock(True, False, recurse is not False)
        return self

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow setting and removing entries again, here and, unless `recurse` is False, in nested composites.

        Returns:
            the composite itself.

        Raises:
            UnsupportedError: if the lock is that of a composite around this one.
        """
        if self._locked_from_above:
            raise UnsupportedError(
                "unlock_: this composite was locked with the one it is part of; unlock that one"
            )
        self._set_lock(False, False, recurse is not False)
        return self

    def _set_lock(self, locked: bool, from_above: bool, recurse: bool) -> None:
        Lockable.all_locks = object()
        self._locked, self._locked_from_above = locked, locked and from_above
        for spec in self._nested() if recurse else ():
            spec._set_lock(locked, True, True)


def require_unlocked(composite: Lockable, key: Any) -> None:
    """Check that what stands under a key of a composite may change.

    Raises:
        UnsupportedError: if the composite is locked, or a part of another spec.
    """
    composite.require_own(f"key {key!r}")
    if composite.is_locked:
        raise UnsupportedError(f"key {key!r}: can't change a locked composite; call unlock_() first")
