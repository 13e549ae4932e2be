"""Which content a storage holds, what changed in it since, and whoever derives something from it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

import torch

_REMEMBERED = 1024  # runs that a log tells apart

Source = TypeVar("Source", bound="Versioned")


class Version(NamedTuple):
    """A moment in a storage's life; plain numbers, for comparing and saving. Compare with ``==``."""

    content: int
    """Which content: another number after every clearing and loading, of any storage in any process."""
    changes: int
    """Slots changed since that content began, counted before the bytes move. A slot counts as often as it changed."""


class Change(NamedTuple):
    """Neighbouring slots that changed: ``[start, stop)``."""

    start: int
    stop: int
    amended: bool
    """Whether the records stayed what they are, a column of theirs apart; False where the slots hold others."""


class _Run(NamedTuple):
    begin: int  # changes counted before it
    start: int
    length: int
    amended: bool


class ChangeLog:
    """What changed in the slots of a ring, in order. Not thread-safe: the storage's owner locks.

    Ring writes that follow each other make one run, however many they are, so that the log is exact for any time as
    long as a storage is written by a ring writer. Other writes make a run each; of those the last 1024 are told
    apart.
    """

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque(maxlen=_REMEMBERED)
        self.renew()

    def renew(self) -> None:
        """Begin another content: whoever followed the one before looks at everything."""
        self._runs.clear()
        self.version = Version(secrets.randbits(62), 0)

    def note(self, start: int, count: int, size: int, amended: bool = False) -> None:
        """Note that `count` slots from `start` on, around the end of `size` slots, are about to change."""
        version, runs = self.version, self._runs
        if runs:
            last = runs[-1]
            if last.amended is amended and not amended and (last.start + last.length) % size == start:
                runs[-1] = _Run(last.begin, last.start, last.length + count, amended)
                self.version = Version(version.content, version.changes + count)
                return
        runs.append(_Run(version.changes, start, count, amended))
        self.version = Version(version.content, version.changes + count)

    def since(self, version: Version, size: int) -> list[Change] | None:
        """Return what changed after `version`: ranges that don't overlap, in the order of the slots.

        A slot that was written anew and amended is written anew. None stands for everything: another content, or
        longer ago than the log goes back.

        Args:
            version: a former version.
            size: slots of the ring.
        """
        content, changes = self.version
        if version.content != content or version.changes > changes:
            return None
        if version.changes == changes:
            return []
        if not self._runs or self._runs[0].begin > version.changes:
            return None
        fresh: list[tuple[int, int]] = []
        amended: list[tuple[int, int]] = []
        for run in reversed(self._runs):
            seen = max(version.changes - run.begin, 0)
            if seen < run.length:
                (amended if run.amended else fresh).extend(_spans(run.start + seen, run.length - seen, size))
            if run.begin <= version.changes:
                break
        written = _merged(fresh)
        found = [Change(start, stop, False) for start, stop in written]
        found += [Change(*span, True) for span in _without(_merged(amended), written)]
        return sorted(found)


def _spans(start: int, count: int, size: int) -> list[tuple[int, int]]:
    if count >= size:
        return [(0, size)]
    start %= size
    stop = start + count
    return [(start, stop)] if stop <= size else [(0, stop - size), (start, size)]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, those that touch made one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _without(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what of merged `spans` lies outside of merged `others`."""
    left = []
    for begin, end in spans:
        for start, stop in others:
            if stop <= begin or start >= end:
                continue
            if start > begin:
                left.append((begin, start))
            begin = stop
        if begin < end:
            left.append((begin, end))
    return left


class Versioned(ABC):
    """What can be followed: it has a version, and tells what changed since another one."""

    @property
    @abstractmethod
    def version(self) -> Version:
        """The present version."""

    @abstractmethod
    def changed_since(self, version: Version) -> list[Change] | None:
        """Return what changed after `version` (see `ChangeLog.since`); None for everything."""


class Follower(ABC, Generic[Source]):
    """Derives something from what a storage holds, and catches up when it is asked.

    `sync` compares versions; only where they differ is there anything to do. What was missed, because of an exception,
    an interrupt, a load or a write behind everybody's back, is caught up by the next `sync`: the version is taken over
    after the work, which may therefore be done twice and must bear it.

    Not thread-safe: the storage's owner locks.
    """

    _followed: Version | None = None

    def sync(self, storage: Source) -> None:
        """Bring what is derived in step with `storage`."""
        version = storage.version
        if version == self._followed:
            return
        changes = None if self._followed is None else storage.changed_since(self._followed)
        if changes is None:
            self._followed = None
            self._look_at_all(storage)
        else:
            self._look_at(storage, changes)
        self._followed = version

    def unfollow(self) -> None:
        """Look at everything the next time."""
        self._followed = None

    @abstractmethod
    def _look_at_all(self, storage: Source) -> None:
        """Derive everything anew."""

    @abstractmethod
    def _look_at(self, storage: Source, changes: list[Change]) -> None:
        """Take in what changed: at least one range, of the content that was followed before."""


def slots_in(changes: list[Change]) -> torch.Tensor:
    """Return the slots of some changes, ``(n,)`` int64."""
    return torch.cat([torch.arange(change.start, change.stop, device="cpu") for change in changes])


def touched(slots: torch.Tensor, changes: list[Change] | None) -> torch.Tensor:
    """Return which of `slots`, ``(n,)`` int64, hold other records now, ``(n,)`` bool; all of them for None."""
    found = torch.full(slots.shape, changes is None, dtype=torch.bool, device="cpu")
    for start, stop, amended in changes or ():
        if not amended:
            found |= (slots >= start) & (slots < stop)
    return found


def version_state(version: Version | None) -> list[int] | None:
    """Return a version as plain numbers, for saving."""
    return None if version is None else [*version]


def version_from(state: Any) -> Version | None:
    """Return the version that `version_state` made plain; anything else is none."""
    if isinstance(state, (list, tuple)) and len(state) == 2 and all(type(number) is int for number in state):
        return Version(*state)
    return None
