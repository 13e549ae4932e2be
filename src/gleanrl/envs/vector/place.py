"""Where a group of environments is at work."""

from __future__ import annotations

from typing import Protocol


class Place(Protocol):
    """A row of integers that can be set: a list, or shared memory. Its first entry is the environment at work."""

    def __getitem__(self, position: int, /) -> int:
        """Return an entry."""

    def __setitem__(self, position: int, value: int, /) -> None:
        """Set an entry."""
