"""Rate limiters, which make inserts and samples wait for each other at the buffer's lock (see `BufferLock`)."""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

from gleanrl._arrays.results import RateCounts
from gleanrl._os.threads import Activity
from gleanrl._state.state import Stateful, StateReader
from gleanrl._util import positive
from gleanrl.errors import InvalidArgumentError, RateLimiterTimeoutError


class SamplesPerInsert:
    """A rate limiter that makes inserts and samples wait, so that each row is sampled `ratio` times on average.

    The limiter computes the rows that are *due* to be sampled: ``due = ratio * inserted - sampled``. Rows inserted
    before `min_size` was reached don't count.

    - An insert waits while ``due > tolerance``.
    - A sample waits while ``due < -tolerance``, or while fewer than `min_size` records are stored.

    A call that may proceed processes all of its rows at once. So `due` exceeds the tolerance by one call's rows at most
    (times `ratio` for an insert). Inserts and samples never wait at the same time. A larger tolerance makes them wait
    less often; with 0 they alternate. Once all threads that insert are known to have ended, samples wait no longer.

    A limiter has no state, so several buffers may use the same one. Each buffer has its own counts.

    Args:
        ratio: rows sampled for each row inserted, more than 0. With `extend` of 100 rows and `sample` of 400 rows, a
            ratio of 8 gives two samples for each insert.
        min_size: the number of records that must be stored before the first sample, 1 or more.
        tolerance: by how many sampled rows either side may be ahead, 0 or more; infinity for no limit.
        timeout_s: after so many seconds a waiting call raises `RateLimiterTimeoutError`; None for no limit. If no other
            thread can end the wait, the call raises the error at once.

    Raises:
        InvalidArgumentError: a number out of its range.

    Examples:
        >>> import torch
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
        >>> limiter = SamplesPerInsert(ratio=2.0, min_size=4)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, rate_limiter=limiter)
        >>> index = buffer.extend(torch.arange(6))
        >>> buffer.sample().shape, buffer.stats().rate_limiter
        (torch.Size([4]), RateCounts(inserted=6, sampled=4, free=4))
    """

    def __init__(
        self, ratio: float, min_size: int = 1, tolerance: float = 0.0, *, timeout_s: float | None = 300.0
    ) -> None:
        self.ratio = _number("ratio", ratio, math.ulp(0.0), math.inf)
        self.min_size = positive("min_size", min_size)
        self.tolerance = _number("tolerance", tolerance, 0.0)
        self.timeout_s = None if timeout_s is None else _number("timeout_s", timeout_s, 0.0, math.inf)

    def due(self, counts: RateCounts) -> float:
        """Return the number of rows still to be sampled; negative if too many were sampled."""
        return self.ratio * max(counts.inserted - counts.free, 0) - counts.sampled

    def __repr__(self) -> str:
        """Show the arguments."""
        return (
            f"SamplesPerInsert(ratio={self.ratio:g}, min_size={self.min_size}, tolerance={self.tolerance:g})"
        )


class MinSize(SamplesPerInsert):
    """A rate limiter that makes samples wait until enough records are stored; inserts never wait.

    `SamplesPerInsert` documents the arguments.
    """

    def __init__(self, min_size: int, *, timeout_s: float | None = 300.0) -> None:
        super().__init__(1.0, min_size, math.inf, timeout_s=timeout_s)

    def __repr__(self) -> str:
        """Show the minimum size."""
        return f"MinSize({self.min_size})"


class RowCounts(Protocol):
    """The counts of a storage that a limiter reads."""

    max_size: int

    @property
    def rows_written(self) -> int:
        """Number of transitions ever written."""

    def __len__(self) -> int:
        """Return the number of transitions stored."""


class Limiter(Stateful[RateCounts]):
    """The counts of one buffer, and the conditions under which its calls must wait.

    Not thread-safe: the caller holds the buffer's lock.

    Args:
        rule: the user's limiter.
        storage: the buffer's storage, which counts the rows written.
        counts: initial counts; None to start at 0.
    """

    def __init__(self, rule: SamplesPerInsert, storage: RowCounts, counts: RateCounts | None = None) -> None:
        self.rule = rule
        # The storage refers to the lock: a cycle would delay freeing its memory.
        self._storage = weakref.ref(storage)
        self.feeders: set[Activity] = set()
        """The activities of the threads that insert. Empty after an insert by a thread without a known end."""
        self._insert: tuple[object, int] | None = None  # the running insert, and `rows_written` before it
        self.counts = self._initial_counts(len(storage)) if counts is None else counts

    @property
    def storage(self) -> RowCounts:
        """The buffer's storage."""
        found = self._storage()
        assert found is not None
        return found

    def inserts_wait(self) -> bool:
        """Return whether an insert must wait for samples."""
        rule = self.rule
        return rule.due(self.counts) > rule.tolerance and len(self.storage) >= rule.min_size

    def samples_wait(self) -> bool:
        """Return whether a sample must wait for inserts.

        False once all threads that insert have ended: the wait would never end.
        """
        rule = self.rule
        if rule.due(self.counts) >= -rule.tolerance and len(self.storage) >= rule.min_size:
            return False
        return not self.feeders or not all(feeder.over for feeder in self.feeders)

    # Inserted rows are counted by the storage's `rows_written`, so the count is right even if the insert failed.

    def insert_begins(self, insert: object, feeder: Activity | None) -> None:
        """Begin to count written rows, unless an outer insert already counts them, and register the thread.

        Args:
            insert: identifies the insert.
            feeder: the activity of its thread; None if the thread's end is unknown.
        """
        if feeder is None:
            self.feeders.clear()
        else:
            self.feeders.add(feeder)
        if self._insert is None:
            self._insert = insert, self.storage.rows_written

    def insert_ends(self, insert: object) -> None:
        """Add the rows that this insert wrote to the counts. A second call does nothing."""
        if self._insert is not None and self._insert[0] is insert:
            inserted = self.counts.inserted + self.storage.rows_written - self._insert[1]
            self.counts, self._insert = self.counts._replace(inserted=inserted), None

    def stand_alone(self) -> None:
        """Reset after a fork: the inserting threads don't exist in the child."""
        self.feeders.clear()
        if self._insert is not None:
            self.insert_ends(self._insert[0])

    def sampled(self, rows: int) -> None:
        """Add delivered rows to the counts; a negative number removes some."""
        self.counts = self.counts._replace(sampled=self.counts.sampled + rows)

    def restart(self) -> None:
        """Restart the counts of inserted and sampled rows at 0.

        `free` becomes the number of rows that `min_size` lacks now.
        """
        self.counts = self._initial_counts(len(self.storage))

    def _initial_counts(self, stored: int) -> RateCounts:
        return RateCounts(0, 0, max(self.rule.min_size - stored, 0))

    def error(self, side: str, why: str) -> RateLimiterTimeoutError:
        """Return the error for an ``"insert"`` or ``"sample"`` that waited in vain; `why` says how it ended."""
        counts, rule, stored = self.counts, self.rule, len(self.storage)
        due = rule.due(counts)
        if side == "insert":
            rows = math.ceil(due - rule.tolerance)
            waited = (
                f"extend waited for samples {why}: {rows} more rows have to be sampled before the next insert"
            )
            remedy = (
                "Nothing was written. Let another thread sample meanwhile, or sample more between two inserts"
            )
        else:
            rows = rule.min_size - stored
            if due < -rule.tolerance:
                warming = max(counts.free - counts.inserted, 0)
                rows = max(rows, warming + math.ceil((-rule.tolerance - due) / rule.ratio))
            waited = f"sample waited for inserts {why}: {rows} more rows have to be inserted before the next sample"
            remedy = (
                "Nothing was drawn. Let another thread insert meanwhile, or insert more between two samples"
            )
        return RateLimiterTimeoutError(
            f"{waited} ({rule}; {counts.inserted} inserted, {counts.sampled} sampled, {stored} stored). {remedy}; "
            "timeout_s limits the seconds of a wait"
        )

    def snapshot(self) -> RateCounts:
        """Return the counts."""
        return self.counts

    def parse(self, state: Any, stored: int | None = None) -> RateCounts:
        """Return saved counts; if `state` is None, initial counts for `stored` records.

        Raises:
            SchemaError: the state isn't that of a rate limiter.
        """
        if state is None and stored is not None:
            return self._initial_counts(stored)
        reader = StateReader(state, "a rate limiter")
        return RateCounts(*(reader.integer(name) for name in RateCounts._fields))

    def adopt(self, value: RateCounts) -> None:
        """Take over counts that `parse` returned. Rows of a running insert aren't counted."""
        self.counts, self._insert = value, None


def _number(name: str, value: Any, least: float, most: float | None = None) -> float:
    """Return `value` as a float; raise unless it is a number of `least` or more, and below `most`."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not sound or not value >= least or (most is not None and value >= most):
        bound = "more than 0" if 0 < least < 1 else f"{least:g} or more"
        raise InvalidArgumentError(f"{name}: expected a number, {bound}, got {value!r}")
    return float(value)
