"""Rate limiters, which make inserts and samples wait for each other, and the lock at which they wait."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

from gleanrl._arrays.results import RateCounts
from gleanrl._os import threads
from gleanrl._os.clock import Deadline
from gleanrl._os.threads import Activity
from gleanrl._state.state import Stateful, StateReader
from gleanrl._util import positive
from gleanrl.data.replay_buffers.lock import BufferLock, give_up, no_holder, take
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, RateLimiterTimeoutError, UnsupportedError


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


class Limiter(Stateful[RateCounts]):
    """The counts of one buffer, and the conditions under which its calls must wait.

    Not thread-safe: the caller holds the buffer's lock.

    Args:
        rule: the user's limiter.
        storage: the buffer's storage, which counts the rows written.
        counts: initial counts; None to start at 0.
    """

    def __init__(self, rule: SamplesPerInsert, storage: Storage, counts: RateCounts | None = None) -> None:
        self.rule = rule
        # The storage refers to the lock: a cycle would delay freeing its memory.
        self._storage = weakref.ref(storage)
        self.feeders: set[Activity] = set()
        """The activities of the threads that insert. Empty after an insert by a thread without a known end."""
        self._insert: tuple[object, int] | None = None  # the running insert, and `rows_written` before it
        self.counts = self._initial_counts(len(storage)) if counts is None else counts

    @property
    def storage(self) -> Storage:
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


class _LimitedUse:
    """Descriptor for the locks of a `RateLimitedLock`: returns a new `_LimitedHold` for each ``with``."""

    def __init__(self, side: str) -> None:
        self._side = side

    def __get__(self, gate: RateLimitedLock | None, owner: Any) -> Any:
        return self if gate is None else _LimitedHold(gate, self._side)


class RateLimitedLock(BufferLock):
    """A `BufferLock` at which inserts and samples wait until the rate limiter admits them (see `limit`).

    Any change under the lock may end a wait. So each release wakes the waiting threads whose condition now holds.
    """

    lock = _LimitedUse("")
    inserting = _LimitedUse("insert")
    sampling = _LimitedUse("sample")
    limiter: Limiter

    def begin(self, limiter: Limiter) -> None:
        """Initialize the rate limiting, with no waiting calls.

        From now on `outer` refers to the first hold of the thread that has the lock.
        """
        self.forget_locks()
        self.limiter = limiter
        self.waiting: dict[threads.Waiter, Callable[[], bool]] = {}
        """The waiting calls, each with a function that returns whether it must still wait."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as a new lock with the same counts."""
        limiter = self.limiter
        return _copied, (limiter.rule, limiter.storage, limiter.counts)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Replace the lock by a free one and reset the limiter."""
        super().after_fork(lineage)
        self.limiter.stand_alone()
        self.begin(self.limiter)


def limit(
    gate: BufferLock, rule: SamplesPerInsert, storage: Storage, counts: RateCounts | None = None
) -> None:
    """Make the inserts and samples at a lock wait for each other from now on.

    Args:
        gate: the lock, which becomes a `RateLimitedLock`.
        rule: the rate limiter.
        storage: the storage of the buffers that use this lock.
        counts: initial counts; None to start at 0.

    Raises:
        InvalidTypeError: `rule` isn't a rate limiter.
        InvalidArgumentError: `min_size` exceeds the storage's capacity, or the lock already has a limiter.
        UnsupportedError: the storage is shared with other processes.
    """
    if not isinstance(rule, SamplesPerInsert):
        raise InvalidTypeError(f"rate_limiter: expected SamplesPerInsert or MinSize, got {rule!r}")
    if gate.shared is not None:
        raise UnsupportedError(
            "rate_limiter: it counts in one process only, but other processes use the storage; leave it out"
        )
    if gate.limiter is not None:
        raise InvalidArgumentError(
            "rate_limiter: another buffer over this storage has one, which applies to both; leave it out here"
        )
    if rule.min_size > storage.max_size:
        raise InvalidArgumentError(
            f"rate_limiter: min_size={rule.min_size} is more than the {storage.max_size} records that fit into the "
            "storage; lower min_size, or use a larger storage"
        )
    with gate.lock:
        limiter = Limiter(rule, storage, counts)
        # The class changes in place, because other buffers over this storage already refer to this lock.
        gate.__class__ = RateLimitedLock
        assert isinstance(gate, RateLimitedLock)
        gate.begin(limiter)


def _copied(rule: SamplesPerInsert, storage: Storage, counts: RateCounts) -> BufferLock:
    gate = BufferLock()
    limit(gate, rule, storage, counts)
    return gate


class _LimitedHold:
    """One ``with`` block at a `RateLimitedLock`. It records each acquired lock to survive interrupts.

    See `_Hold` in `lock.py` for how.

    Args:
        gate: the lock.
        side: ``"insert"``, ``"sample"``, or ``""`` for a call that never waits and isn't counted.
    """

    __slots__ = ("__weakref__", "_gate", "_side", "_acquired")

    def __init__(self, gate: RateLimitedLock, side: str) -> None:
        self._gate, self._side = gate, side
        self._acquired: list[Any] = []

    def __enter__(self) -> None:
        self.__class__ = _LimitedAcquiredHold
        limiter = self._gate.limiter
        try:
            self._take()
            if self._side == "sample":
                if limiter.samples_wait():
                    self._wait(limiter.samples_wait)
            elif self._side == "insert":
                if limiter.inserts_wait():
                    self._wait(limiter.inserts_wait)
                self._begin_insert()
        except BaseException:
            self._leave()
            raise

    def _begin_insert(self) -> None:
        gate, feeder = self._gate, threads.current.activity
        if feeder is not None and feeder not in gate.limiter.feeders:
            # Waiting samples must also wake if this thread ends without admitting them.
            for waiter in gate.waiting:
                waiter.watch(feeder)
        gate.limiter.insert_begins(self._acquired, feeder)

    def _wait(self, needed: Callable[[], bool]) -> None:
        """Release and re-acquire the lock until the call may proceed.

        Raises:
            RateLimiterTimeoutError: the timeout passed, or no other thread could ever end the wait.
        """
        gate, limiter, here = self._gate, self._gate.limiter, threads.current.activity
        gate.learner_waits = False  # this thread waits for the limiter, not for the lock
        deadline = Deadline(limiter.rule.timeout_s)
        while True:
            waiter = threads.Waiter()
            try:
                # Register for all events before the condition is checked: an event in between is then not missed.
                for activity in (*limiter.feeders, here):
                    if activity is not None:
                        waiter.watch(activity)
                gate.waiting[waiter] = needed
                # A hurried thread doesn't wait, because another thread waits for it (otherwise: deadlock).
                if not needed() or (here is not None and here.hurried):
                    return
                if why := self._in_vain(deadline):
                    raise limiter.error(self._side, why)
                self._give_up()
                waiter.wait(deadline)
                self._take()
            finally:
                gate.waiting.pop(waiter, None)
                waiter.close()

    def _in_vain(self, deadline: Deadline) -> str:
        if deadline.passed():
            return f"for {self._gate.limiter.rule.timeout_s:g} s"
        if self._gate.outer() is not self:
            return "within a call that holds the buffer's lock, so that no other thread can end the wait"
        return (
            "in the only thread that there is, so that no other thread can end the wait"
            if threads.alone()
            else ""
        )

    def _take(self) -> None:
        gate = self._gate
        take(gate.threads, self._acquired)
        if gate.outer() is None:
            gate.outer = weakref.ref(self)

    def _give_up(self) -> None:
        gate = self._gate
        if gate.outer() is self:
            gate.outer = no_holder
        give_up(gate.threads, self._acquired)

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        gate = self._gate
        if self._acquired:
            gate.limiter.insert_ends(self._acquired)
            try:
                if gate.outer() is self:
                    for waiter, needed in list(gate.waiting.items()):
                        if not needed():
                            waiter.wake()
                            gate.waiting.pop(waiter, None)
            finally:
                self._give_up()
        self.__class__ = _LimitedHold


class _LimitedAcquiredHold(_LimitedHold):
    __slots__ = ()

    def __del__(self) -> None:
        """Release the locks after an interrupt."""
        self._leave()
