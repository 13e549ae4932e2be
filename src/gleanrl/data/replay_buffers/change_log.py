"""Which content a storage holds, what changed in it since, and whoever derives something from it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from gleanrl._arrays.results import new_tuple

_DISTANCE = 1 << 29  # what generations move by in loads; the core's marks keep as many low bits of them
_REMEMBERED = 1024  # ranges that a log tells apart

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


class Run:
    """One write, or ring writes that follow each other."""

    __slots__ = ("amended", "begin", "count", "spans", "start")

    def __init__(self, begin: int, spans: list[tuple[int, int]], amended: bool) -> None:
        self.begin = begin  # changes counted before it
        self.start, self.count = spans[0] if len(spans) == 1 else (-1, sum(count for _, count in spans))
        self.spans = spans if len(spans) > 1 else None  # (start, count) of each range, around the end
        self.amended = amended

    def unseen(self, version: Version, size: int) -> list[tuple[int, int]]:
        """Return what it changed after a version, as ``(start, stop)``; all of it, if it began after that."""
        seen = max(version.changes - self.begin, 0)
        if seen >= self.count:
            return []
        if self.spans is None:
            return ring_spans(self.start + seen, self.count - seen, size)
        return [span for start, count in self.spans for span in ring_spans(start, count, size)]


def changes_in(runs: Iterable[Run], version: Version, size: int) -> list[Change]:
    """Return what runs, the newest first, changed after a version (see `ChangeLog.since`)."""
    fresh: list[tuple[int, int]] = []
    amended: list[tuple[int, int]] = []
    for run in runs:
        (amended if run.amended else fresh).extend(run.unseen(version, size))
        if run.begin <= version.changes:
            break
    written = _merged(fresh)
    found = [Change(start, stop, False) for start, stop in written]
    found += [Change(*span, True) for span in _without(_merged(amended), written)]
    return sorted(found)


class ChangeLog:
    """What changed in the slots of a ring, in order. Not thread-safe: the storage's owner locks.

    Ring writes that follow each other make one range, however many they are, so that the log is exact for any time
    as long as a storage is written by a ring writer. Of other ranges the last 1024 are told apart, and those of the
    last write always.

    Args:
        origin: what the first content is a copy of, if anything.
    """

    def __init__(self, origin: Version | None = None) -> None:
        self._runs: deque[Run] = deque()
        self._ranges = self._size = 0
        self.renew(origin)

    def renew(self, origin: Version | None = None) -> None:
        """Begin another content, a copy of `origin` or of nothing: who followed the one before looks at everything."""
        self._runs.clear()
        self._ranges = 0
        self.origin = origin
        self.version = Version(secrets.randbits(62), 0)

    def note(self, start: int, count: int, size: int) -> None:
        """Note that `count` slots from `start` on, around the end of `size` slots, are about to change."""
        content, changes = self.version
        last = self._runs[-1] if self._runs else None
        if last is None or last.spans or last.amended or (last.start + last.count) % size != start:
            self.note_ranges([(start, count)], size)
            return
        # At every write: no object is made but the version. The order matters to whoever was interrupted between.
        last.count += count
        self.version = new_tuple(Version, (content, changes + count))

    def note_ranges(self, spans: list[tuple[int, int]], size: int, amended: bool = False) -> None:
        """Note that slots here and there are about to change.

        Args:
            spans: first slot and count of each range, around the end.
            size: slots of the ring.
            amended: see `Change`.
        """
        run, runs, version = Run(self.version.changes, spans, amended), self._runs, self.version
        runs.append(run)
        self._size = size
        self._ranges += len(spans)
        while self._ranges > _REMEMBERED and len(runs) > 1:
            self._ranges -= len(runs.popleft().spans or (0,))
        self.version = Version(version.content, version.changes + run.count)

    def since(self, version: Version) -> list[Change] | None:
        """Return what changed after `version`: ranges that don't overlap, in the order of the slots.

        A slot that was written anew and amended is written anew. Every slot, if it is longer ago than the log goes
        back; None for another content.
        """
        (content, changes), size = self.version, self._size
        if version.content != content:
            return None
        if version.changes == changes:
            return []
        if version.changes > changes or self._runs[0].begin > version.changes:
            return [Change(0, size, False)]
        last = self._runs[-1]
        seen = version.changes - last.begin
        if seen >= 0 and last.spans is None:  # what a follower of each write asks for
            start = (last.start + seen) % size
            if (stop := start + last.count - seen) <= size:
                return [new_tuple(Change, (start, stop, last.amended))]
        return changes_in(reversed(self._runs), version, size)


def ring_spans(start: int, count: int, size: int) -> list[tuple[int, int]]:
    """Return `count` slots from `start` on, around the end of `size`, as ``(start, stop)`` ranges."""
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
        """Return what changed after `version` (see `ChangeLog.since`); None for another content."""

    @property
    def origin(self) -> Version | None:
        """What this content began as a copy of, by loading or unpickling; None for nothing."""
        return None


class Follower(ABC, Generic[Source]):
    """Derives something from what a storage holds, and catches up when it is asked.

    `sync` compares versions; only where they differ is there anything to do. What was missed, because of an exception,
    an interrupt, a load or a write behind everybody's back, is caught up by the next `sync`: the version is taken over
    after the work, which may therefore be done twice and must bear it.

    Not thread-safe: the storage's owner locks.
    """

    followed: Version | None = None
    """The version that what is derived stands for; None for looking at everything the next time."""

    def sync(self, storage: Source) -> None:
        """Bring what is derived in step with `storage`."""
        version = storage.version
        if version == self.followed:
            return
        changes = None if self.followed is None else storage.changed_since(self.followed)
        if changes is None:
            self.followed = None
            self._look_at_all(storage)
        elif changes:
            self._look_at(storage, changes)
        self.followed = version

    def unfollow(self) -> None:
        """Look at everything the next time."""
        self.followed = None

    @abstractmethod
    def _look_at_all(self, storage: Source) -> None:
        """Derive everything anew: another content."""

    @abstractmethod
    def _look_at(self, storage: Source, changes: list[Change]) -> None:
        """Take in what changed: at least one range, of the content that was followed before."""


def slots_in(changes: list[Change]) -> torch.Tensor:
    """Return the slots of some changes, ``(n,)`` int64."""
    return torch.cat([torch.arange(change.start, change.stop, device="cpu") for change in changes])


def touched(slots: torch.Tensor, changes: list[Change] | None) -> torch.Tensor:
    """Return which of `slots`, ``(n,)`` int64, were written, amended ones too, ``(n,)`` bool; all of them for None.

    Args:
        slots: any.
        changes: ranges as `ChangeLog.since` returns them: in order, and apart.
    """
    if not changes:
        return torch.full(slots.shape, changes is None, dtype=torch.bool, device="cpu")
    # A slot lies in a range if one more of them has begun there than has ended.
    edges = (np.fromiter((change[which] for change in changes), np.int64, len(changes)) for which in (0, 1))
    begun, ended = (np.searchsorted(some, slots.numpy(), side="right") for some in edges)
    return torch.from_numpy(begun > ended)


def changes_since(state: Any, source: Versioned) -> list[Change] | None:
    """Return what changed since a saved version (see `version_state`), of the same content or of what it is a copy of.

    None if nothing tells.
    """
    version = version_from(state)
    if version is None:
        return None
    if version == source.origin:
        version = Version(source.version.content, 0)
    return source.changed_since(version)


def version_state(version: Version | None) -> list[int] | None:
    """Return a version as plain numbers, for saving."""
    return None if version is None else [*version]


def version_from(state: Any) -> Version | None:
    """Return the version that `version_state` made plain; anything else is none."""
    if isinstance(state, (list, tuple)) and len(state) == 2 and all(type(number) is int for number in state):
        return Version(*state)
    return None


def same_generations(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return where slots hold the records that they held at the generations `before`, ``(n,)`` each; loads apart."""
    return (now ^ before) & (_DISTANCE - 1) == 0


def moved_past(saved: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """Return saved generations, ``(n,)`` int64, for slots that have reached others: none comes again.

    All move by one distance, which `same_generations`, and whoever keeps their low bits only, doesn't notice.
    """
    behind = max(int((reached - saved).max()), 0) if saved.shape[0] else 0
    return saved + -(-behind // _DISTANCE) * _DISTANCE
