"""Versions of a storage's content, a log of its changes, and followers that derive data from it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from gleanrl._arrays.results import new_tuple
from gleanrl._os.shared_memory import fence

_DISTANCE = 1 << 29  # loads add multiples of this to generations; the core's marks keep the low 29 bits
_REMEMBERED = 1024  # most ranges that a log keeps
# Positions in the head of a shared log. _ORIGIN: the origin's content and changes. _REWRITTEN: the count of changes
# after the last dropped run with new records.
_CONTENT, _CHANGES, _NUM_RUNS, _SLOTS, _HAS_ORIGIN, _ORIGIN, _REWRITTEN = 0, 1, 2, 3, 4, 5, 7

Words: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Source = TypeVar("Source", bound="Versioned")


class Version(NamedTuple):
    """The state of a storage at one moment, as plain numbers for comparing and saving. Compare with ``==``."""

    content: int
    """Identifier of the content: a new random number after every clearing and loading, in any storage and process."""
    changes: int
    """Slots changed since that content began, counted before the bytes move. A slot counts each time it changes."""


class Change(NamedTuple):
    """A range of changed slots, ``[start, stop)``."""

    start: int
    stop: int
    amended: bool
    """True if the slots still hold the same records, with a changed column. False if they hold new records."""


class Run:
    """One write, or consecutive ring writes merged into one."""

    __slots__ = ("amended", "begin", "count", "spans", "start")

    def __init__(self, begin: int, spans: list[tuple[int, int]], amended: bool) -> None:
        self.begin = begin  # `Version.changes` before this run
        self.start, self.count = spans[0] if len(spans) == 1 else (-1, sum(count for _, count in spans))
        # (start, count) of each range; a range may wrap around the end.
        self.spans = spans if len(spans) > 1 else None
        self.amended = amended

    def unseen(self, version: Version, size: int) -> list[tuple[int, int]]:
        """Return the slots that this run changed after a version, as ``(start, stop)`` ranges.

        A run of several ranges returns all of them if any change is unseen.
        """
        seen = max(version.changes - self.begin, 0)
        if seen >= self.count:
            return []
        if self.spans is None:
            return ring_spans(self.start + seen, self.count - seen, size)
        return [span for start, count in self.spans for span in ring_spans(start, count, size)]


def changes_in(runs: Iterable[Run], version: Version, size: int) -> list[Change]:
    """Return the slots that runs changed after a version (see `ChangeLog.since`). `runs` has the newest run first."""
    writes: list[tuple[int, int]] = []
    amended: list[tuple[int, int]] = []
    for run in runs:
        (amended if run.amended else writes).extend(run.unseen(version, size))
        if run.begin <= version.changes:
            break
    written = _merged(writes)
    found = [Change(start, stop, False) for start, stop in written]
    found += [Change(*span, True) for span in _without(_merged(amended), written)]
    return sorted(found)


class ChangeLog:
    """The changes in the slots of a ring, in order. Not thread-safe: the caller holds the buffer's lock.

    Consecutive ring writes merge into one range. The log of a storage that only a ring writer writes is therefore exact
    for any past version. Of other writes the log keeps the last 1024 ranges, and always all ranges of the last write.
    If it drops only amendments, it still tells new records from amended ones.

    Args:
        origin: the version of the content that the first content is a copy of; None for no copy.
    """

    def __init__(self, origin: Version | None = None) -> None:
        self._runs: deque[Run] = deque()
        self._ranges = self._size = 0
        self.renew(origin)

    def renew(self, origin: Version | None = None) -> None:
        """Begin a new content, a copy of `origin` if given. Followers of the old content then read everything."""
        self._runs.clear()
        self._ranges = 0
        self._rewritten = 0  # `Version.changes` after the last run with new records that is no longer kept
        self.origin = origin
        self.version = Version(secrets.randbits(62), 0)

    def note(self, start: int, count: int, size: int) -> None:
        """Record that `count` slots from `start` on are about to change, wrapping around at `size` slots."""
        content, changes = self.version
        last = self._runs[-1] if self._runs else None
        if last is None or last.spans or last.amended or (last.start + last.count) % size != start:
            self.note_ranges([(start, count)], size)
            return
        # Called at every write, so it creates no object but the version. The run grows before the version: after an
        # interrupt in between, the log reports too many slots, never too few.
        last.count += count
        self.version = new_tuple(Version, (content, changes + count))

    def note_ranges(self, spans: list[tuple[int, int]], size: int, amended: bool = False) -> None:
        """Record that several ranges of slots are about to change.

        Args:
            spans: ``(start, count)`` of each range; a range may wrap around the end.
            size: slots of the ring.
            amended: see `Change`.
        """
        run, runs, version = Run(self.version.changes, spans, amended), self._runs, self.version
        runs.append(run)
        self._size = size
        self._ranges += len(spans)
        while self._ranges > _REMEMBERED and len(runs) > 1:
            if not runs[0].amended:
                self._rewritten = runs[0].begin + runs[0].count
            self._ranges -= len(runs.popleft().spans or (0,))
        self.version = Version(version.content, version.changes + run.count)

    def since(self, version: Version) -> list[Change] | None:
        """Return the changes after `version`, as ranges that don't overlap, sorted by slot.

        A slot that was both overwritten and amended is reported as overwritten. If the log no longer has all writes
        after `version`, or `version` has more changes than the log, one range covers every slot. If it lacks only
        amendments, every slot that wasn't overwritten is reported as amended.

        Returns:
            The changes, or None if `version` is of another content.
        """
        (content, changes), size = self.version, self._size
        if version.content != content:
            return None
        if version.changes == changes:
            return []
        if not self._rewritten <= version.changes <= changes:
            return [Change(0, size, False)]
        if self._runs[0].begin > version.changes:
            return changes_in([*reversed(self._runs), amendment_of_all(version, size)], version, size)
        last = self._runs[-1]
        seen = version.changes - last.begin
        if seen >= 0 and last.spans is None:  # fast path for a follower that syncs after every write
            start = (last.start + seen) % size
            if (stop := start + last.count - seen) <= size:
                return [new_tuple(Change, (start, stop, last.amended))]
        return changes_in(reversed(self._runs), version, size)


class SharedLog(ChangeLog):
    """A `ChangeLog` in shared memory. Its version can be read at any time, everything else under the lock only.

    Args:
        head: the memory of the counters, ``(HEAD_WORDS,)``.
        runs: the memory of the logged runs, ``(n, RUN_WORDS)``: begin, start, count and whether it is an amendment.
    """

    HEAD_WORDS, RUN_WORDS = 8, 4

    def __init__(self, head: Words, runs: Words) -> None:
        self._head, self._table = head, runs

    @property
    def version(self) -> Version:  # type: ignore[override]
        """The present version. If it is read after records, it covers every write that began before."""
        fence()
        # Read in this order. If another process calls `renew` in between, the result has the new content. In the
        # other order it could equal an earlier version of the old content, and the change would be missed.
        changes = int(self._head[_CHANGES])
        return Version(int(self._head[_CONTENT]), changes)

    @property
    def origin(self) -> Version | None:  # type: ignore[override]
        """The version that this content is a copy of; None if there is none.

        It is shared, so the sampler of any process can find the changes since a saved state.
        """
        if not self._head[_HAS_ORIGIN]:
            return None
        return Version(*self._head[_ORIGIN : _ORIGIN + 2].tolist())

    def renew(self, origin: Version | None = None) -> None:
        """Begin another content."""
        self._head[_HAS_ORIGIN] = origin is not None
        self._head[_ORIGIN : _ORIGIN + 2] = origin or 0
        # Before the runs go: this process may be killed in between.
        self._head[_REWRITTEN] = self._head[_CHANGES]
        self._head[_NUM_RUNS] = 0
        self._head[_CONTENT] = secrets.randbits(62)
        self._head[_CHANGES] = self._head[_REWRITTEN] = 0
        fence()

    def forget(self) -> None:
        """Mark every slot as changed."""
        self._head[_REWRITTEN] = self._head[_CHANGES] + 1  # first, as in `renew`
        self._head[_NUM_RUNS] = 0
        self._head[_CHANGES] += 1

    def note(self, start: int, count: int, size: int) -> None:
        """Log that `count` slots from `start` on are about to change, around the end of `size` slots."""
        self._head[_SLOTS] = size
        number = int(self._head[_NUM_RUNS])
        last = self._table[(number - 1) % len(self._table)]
        if number and not last[3] and (last[1] + last[2]) % size == start:
            last[2] += count
            self._head[_CHANGES] += count
        else:
            self._append(start, count, False)
        fence()

    def note_ranges(self, spans: list[tuple[int, int]], size: int, amended: bool = False) -> None:
        """Log that several ranges of slots are about to change (see `ChangeLog.note_ranges`)."""
        self._head[_SLOTS] = size
        for start, count in spans:
            self._append(start, count, amended)
        fence()

    def _append(self, start: int, count: int, amended: bool) -> None:
        number = int(self._head[_NUM_RUNS])
        run = self._table[number % len(self._table)]
        if number >= len(self._table) and not run[3]:
            self._head[_REWRITTEN] = run[0] + run[2]
        run[:] = (self._head[_CHANGES], start, count, amended)
        self._head[_NUM_RUNS] = number + 1
        self._head[_CHANGES] += count

    def since(self, version: Version) -> list[Change] | None:
        """Return the changes after `version` (see `ChangeLog.since`)."""
        now, number, size = self.version, int(self._head[_NUM_RUNS]), int(self._head[_SLOTS])
        if version.content != now.content:
            return None
        if version.changes == now.changes:
            return []
        num_logged = min(number, len(self._table))
        oldest = int(self._table[(number - num_logged) % len(self._table)][0]) if num_logged else now.changes
        if not self._head[_REWRITTEN] <= version.changes < now.changes:
            return [Change(0, size, False)]
        rows = (self._table[(number - 1 - back) % len(self._table)].tolist() for back in range(num_logged))
        runs = (Run(begin, [(start, count)], bool(amended)) for begin, start, count, amended in rows)
        dropped = [amendment_of_all(version, size)] if version.changes < oldest else []
        return changes_in(chain(runs, dropped), version, size)


def amendment_of_all(version: Version, size: int) -> Run:
    """Return a run in place of amendments after `version` that a log no longer keeps: all slots may be amended."""
    return Run(version.changes, [(0, size)], True)


def ring_spans(start: int, count: int, size: int) -> list[tuple[int, int]]:
    """Return `count` slots from `start` on as ``(start, stop)`` ranges, wrapping around at `size`."""
    if count >= size:
        return [(0, size)]
    start %= size
    stop = start + count
    return [(start, stop)] if stop <= size else [(0, stop - size), (start, size)]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, with touching or overlapping ones merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _without(spans: list[tuple[int, int]], excluded: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of `spans` outside of `excluded`; both are merged and sorted."""
    left = []
    for begin, end in spans:
        for start, stop in excluded:
            if stop <= begin or start >= end:
                continue
            if start > begin:
                left.append((begin, start))
            begin = stop
        if begin < end:
            left.append((begin, end))
    return left


class Versioned(Protocol):
    """A source that followers can follow: it has a version and reports the changes since an earlier one."""

    @property
    def version(self) -> Version:
        """The current version."""

    @property
    def origin(self) -> Version | None:
        """The version of the content that this content was loaded or unpickled from; None if it wasn't."""

    def changed_since(self, version: Version) -> list[Change] | None:
        """Return the changes after `version` (see `ChangeLog.since`); None for another content."""


class Follower(ABC, Generic[Source]):
    """Base class for data derived from a storage; `sync` brings the data up to date.

    `sync` compares versions and does work only if they differ. So the next `sync` also repairs changes that the
    follower missed: after an exception, an interrupt, a load, or a direct write to the storage. `sync` records the new
    version after the work. An interrupted sync therefore repeats the work, and subclasses must tolerate that.

    Not thread-safe: the caller holds the buffer's lock.
    """

    followed: Version | None = None
    """The version that the derived data matches; None if the next `sync` must read everything."""

    def sync(self, storage: Source) -> None:
        """Update the derived data to match `storage`."""
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
        """Make the next `sync` read everything."""
        self.followed = None

    @abstractmethod
    def _look_at_all(self, storage: Source) -> None:
        """Derive everything from the whole content, which is new or unknown."""

    @abstractmethod
    def _look_at(self, storage: Source, changes: list[Change]) -> None:
        """Process the changes: at least one range, of the content that was followed before."""


def slots_in(changes: list[Change]) -> torch.Tensor:
    """Return the slots in a list of changes, ``(n,)`` int64."""
    return torch.cat([torch.arange(change.start, change.stop, device="cpu") for change in changes])


def touched(slots: torch.Tensor, changes: list[Change] | None) -> torch.Tensor:
    """Return which slots were written or amended, ``(n,)`` bool; all of them if `changes` is None.

    Args:
        slots: slots in any order, ``(n,)`` int64.
        changes: the result of `ChangeLog.since`: ranges that are sorted and don't overlap.
    """
    if not changes:
        return torch.full(slots.shape, changes is None, dtype=torch.bool, device="cpu")
    # A slot lies in a range if one more range has begun at or before it than has ended.
    edges = (np.fromiter((change[which] for change in changes), np.int64, len(changes)) for which in (0, 1))
    begun, ended = (np.searchsorted(some, slots.numpy(), side="right") for some in edges)
    return torch.from_numpy(begun > ended)


def changes_since(state: Any, source: Versioned) -> list[Change] | None:
    """Return the changes of `source` since a saved version (see `version_state`).

    The version may be of this content, or exactly the version that this content is a copy of. Returns None if the
    changes are unknown.
    """
    version = version_from(state)
    if version is None:
        return None
    if version == source.origin:
        version = Version(source.version.content, 0)
    return source.changed_since(version)


def version_state(version: Version | None) -> list[int] | None:
    """Return a version as a list of plain numbers, for saving; None for None."""
    return None if version is None else [*version]


def version_from(state: Any) -> Version | None:
    """Return the version that `version_state` converted; None for any other value."""
    if isinstance(state, (list, tuple)) and len(state) == 2 and all(type(number) is int for number in state):
        return Version(*state)
    return None


def same_generations(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return where slots hold the same records as at the generations `before`, ``(n,)`` bool.

    Loads add multiples of ``2**29`` to generations; the comparison ignores these.
    """
    return (now ^ before) & (_DISTANCE - 1) == 0


def moved_past(saved: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """Return saved generations, ``(n,)`` int64, raised so that none is below the slot's present generation.

    A generation must never repeat, or an old priority update could match a new record. All slots get the same multiple
    of ``2**29``, so `same_generations` and code that keeps only the low bits still match.
    """
    behind = max(int((reached - saved).max()), 0) if saved.shape[0] else 0
    return saved + -(-behind // _DISTANCE) * _DISTANCE
