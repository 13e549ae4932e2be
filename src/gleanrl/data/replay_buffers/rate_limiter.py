"""The lock of a buffer with a rate limiter: who takes it to insert or to sample may have to wait.

Rate limiters: inserts and samples of a buffer that wait for each other, so that their numbers keep a ratio.
"""

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
from gleanrl.data.replay_buffers.lock import BufferLock, give_up, nobody, take
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, RateLimiterTimeoutError, UnsupportedError


class SamplesPerInsert:
    """Lets a buffer's inserts and samples wait for each other: each row is sampled so often, on average.

    *Due* is what the learner is behind: ``ratio * inserted - sampled``, in rows, where the rows that came before
    sampling could begin don't count. An insert waits while more than `tolerance` is due, a sample while less than
    ``-tolerance`` is, or while fewer than `min_size` records are stored. Who is let in is let in with all it has: due
    stays within the tolerance but for the rows of one call, whatever the sizes of batches are, and never do both wait.
    The larger the tolerance, the less the two wait for each other; with 0 they take turns.

    A limiter has no state, one may be given to several buffers: each counts for itself.

    Args:
        ratio: rows sampled for each row inserted, more than 0. With ``extend`` of 100 and ``sample`` of 400 rows a
            ratio of 8 makes two samples for each insert.
        min_size: no sample before so many records are stored, 1 or more.
        tolerance: how many sampled rows either side may be ahead, 0 or more; infinity for any number.
        timeout_s: how many seconds a call may wait before it raises `RateLimiterTimeoutError`; None for any number.

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
        """Return how many rows more ought to have been sampled; less than 0 if it were too many."""
        return self.ratio * max(counts.inserted - counts.free, 0) - counts.sampled

    def __repr__(self) -> str:
        """Show the numbers."""
        return (
            f"SamplesPerInsert(ratio={self.ratio:g}, min_size={self.min_size}, tolerance={self.tolerance:g})"
        )


class MinSize(SamplesPerInsert):
    """Lets a buffer's samples wait until enough is stored; inserts never wait.

    The arguments are those of `SamplesPerInsert`.
    """

    def __init__(self, min_size: int, *, timeout_s: float | None = 300.0) -> None:
        super().__init__(1.0, min_size, math.inf, timeout_s=timeout_s)

    def __repr__(self) -> str:
        """Show the size."""
        return f"MinSize({self.min_size})"


class Limiter(Stateful[RateCounts]):
    """The counts of one buffer, and who has to wait by them.

    Not thread-safe: whoever calls it holds the gate.

    Args:
        rule: what the user gave.
        storage: the buffer's, which knows how many rows were written.
        counts: where to go on; None for the beginning.
    """

    def __init__(self, rule: SamplesPerInsert, storage: Storage, counts: RateCounts | None = None) -> None:
        self.rule = rule
        self._storage = weakref.ref(storage)  # which refers to the gate, and is large
        self.feeders: set[Activity] = set()
        """Who inserts; empty once somebody has of whom it isn't known when he ends."""
        self._insert: tuple[object, int] | None = None  # under way: whose, and rows written before it
        self.counts = self._fresh(len(storage)) if counts is None else counts

    @property
    def storage(self) -> Storage:
        """The buffer's."""
        found = self._storage()
        assert found is not None
        return found

    def inserts_wait(self) -> bool:
        """Return whether an insert has to wait for samples."""
        rule = self.rule
        return rule.due(self.counts) > rule.tolerance and len(self.storage) >= rule.min_size

    def samples_wait(self) -> bool:
        """Return whether a sample has to wait for inserts; not if all who inserted have come to their end."""
        rule = self.rule
        if rule.due(self.counts) >= -rule.tolerance and len(self.storage) >= rule.min_size:
            return False
        return not self.feeders or not all(feeder.over for feeder in self.feeders)

    # What is written while an insert is under way is inserted: however that ended, the storage knows.

    def insert_begins(self, insert: object, feeder: Activity | None) -> None:
        """Count what is written from now on, unless an insert around this one does.

        Args:
            insert: which insert.
            feeder: what its thread does all the time; None where it isn't known when it ends.
        """
        if feeder is None:
            self.feeders.clear()
        else:
            self.feeders.add(feeder)
        if self._insert is None:
            self._insert = insert, self.storage.rows_written

    def insert_ends(self, insert: object) -> None:
        """Count what was written; may be called twice."""
        if self._insert is not None and self._insert[0] is insert:
            inserted = self.counts.inserted + self.storage.rows_written - self._insert[1]
            self.counts, self._insert = self.counts._replace(inserted=inserted), None

    def stand_alone(self) -> None:
        """Be in a forked process, where no thread is that inserted."""
        self.feeders.clear()
        if self._insert is not None:
            self.insert_ends(self._insert[0])

    def sampled(self, rows: int) -> None:
        """Count rows that are handed out."""
        self.counts = self.counts._replace(sampled=self.counts.sampled + rows)

    def restart(self) -> None:
        """Count from 0."""
        self.counts = self._fresh(len(self.storage))

    def _fresh(self, stored: int) -> RateCounts:
        return RateCounts(0, 0, max(self.rule.min_size - stored, 0))

    def error(self, side: str, why: str) -> RateLimiterTimeoutError:
        """Return what an ``"insert"`` or a ``"sample"`` raises that waited in vain."""
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
            "timeout_s says how long a call waits"
        )

    # State

    def snapshot(self) -> RateCounts:
        """Return the counts."""
        return self.counts

    def parse(self, state: Any, stored: int | None = None) -> RateCounts:
        """Return saved counts; of a buffer that had none, with so many records stored, those of a beginning."""
        if state is None and stored is not None:
            return self._fresh(stored)
        reader = StateReader(state, "a rate limiter")
        return RateCounts(*(reader.integer(name) for name in RateCounts._fields))

    def adopt(self, value: RateCounts) -> None:
        """Go on from counts."""
        self.counts, self._insert = value, None


def _number(name: str, value: Any, least: float, most: float | None = None) -> float:
    """Return `value` as a float if it is a number of `least` or more, and below `most`."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not sound or not value >= least or (most is not None and value >= most):
        bound = "more than 0" if 0 < least < 1 else f"{least:g} or more"
        raise InvalidArgumentError(f"{name}: expected a number, {bound}, got {value!r}")
    return float(value)


class _LimitedUse:
    """What stands behind the locks of such gates: a new hold for each ``with``."""

    def __init__(self, side: str) -> None:
        self._side = side

    def __get__(self, gate: RateLimitedLock | None, owner: Any) -> Any:
        return self if gate is None else _LimitedHold(gate, self._side)


class RateLimitedLock(BufferLock):
    """A `BufferLock` at which inserts and samples wait until a limiter lets them in (see `limit`).

    Whatever happens under it may be what somebody waits for: whoever leaves it wakes those who needn't wait any more.
    """

    lock = _LimitedUse("")
    inserting = _LimitedUse("insert")
    sampling = _LimitedUse("sample")
    limiter: Limiter

    def begin(self, limiter: Limiter) -> None:
        """Be such a gate from now on; `outer` is the first hold of the thread that has the lock."""
        self.forget_locks()
        self.limiter = limiter
        self.waiting: dict[threads.Waiter, Callable[[], bool]] = {}
        """Who waits, and whether he still has to."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have a lock of their own, and go on counting."""
        limiter = self.limiter
        return _copied, (limiter.rule, limiter.storage, limiter.counts)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Open."""
        super().after_fork(lineage)
        self.limiter.stand_alone()
        self.begin(self.limiter)


def limit(
    gate: BufferLock, rule: SamplesPerInsert, storage: Storage, counts: RateCounts | None = None
) -> None:
    """Have the inserts and samples at a gate wait for each other from now on.

    Args:
        gate: becomes a `RateLimitedLock`.
        rule: when they have to.
        storage: that of the buffers which share the gate.
        counts: where to go on; None for the beginning.

    Raises:
        InvalidTypeError: `rule` is no limiter.
        InvalidArgumentError: it asks for more than fits, or there is one already.
        UnsupportedError: the storage is shared with other processes.
    """
    if not isinstance(rule, SamplesPerInsert):
        raise InvalidTypeError(f"rate_limiter: expected SamplesPerInsert or MinSize, got {rule!r}")
    if gate.shared is not None:
        raise UnsupportedError(
            "rate_limiter: other processes use the storage, and it counts in one process only"
        )
    if gate.limiter is not None:
        raise InvalidArgumentError(
            "rate_limiter: another buffer over this storage has one, which holds for both; leave it out here"
        )
    if rule.min_size > storage.max_size:
        raise InvalidArgumentError(
            f"rate_limiter: min_size={rule.min_size} is more than the {storage.max_size} records that fit into the "
            "storage"
        )
    with gate.lock:
        limiter = Limiter(rule, storage, counts)
        gate.__class__ = RateLimitedLock
        assert isinstance(gate, RateLimitedLock)
        gate.begin(limiter)


def _copied(rule: SamplesPerInsert, storage: Storage, counts: RateCounts) -> BufferLock:
    gate = BufferLock()
    limit(gate, rule, storage, counts)
    return gate


class _LimitedHold:
    """One ``with``. An interrupt leaves nothing behind (see that of `BufferLock`): a lock that is taken is noted.

    Args:
        gate: whose lock.
        side: ``"insert"``, ``"sample"``, or ``""`` for what never waits and isn't counted.
    """

    __slots__ = ("__weakref__", "_gate", "_side", "_taken")

    def __init__(self, gate: RateLimitedLock, side: str) -> None:
        self._gate, self._side = gate, side
        self._taken: list[Any] = []

    def __enter__(self) -> None:
        self.__class__ = _LimitedHeld
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
        gate, feeder = self._gate, threads.here.activity
        if feeder is not None and feeder not in gate.limiter.feeders:
            for waiter in gate.waiting:  # it may end before it lets anybody in
                waiter.watch(feeder)
        gate.limiter.insert_begins(self._taken, feeder)

    def _wait(self, needed: Callable[[], bool]) -> None:
        """Give the lock up and take it again, until there is no need to wait any more."""
        gate, limiter, here = self._gate, self._gate.limiter, threads.here.activity
        gate.asked = False  # it isn't the lock that is waited for
        deadline = Deadline(limiter.rule.timeout_s)
        while True:
            waiter = threads.Waiter()
            try:
                # Told of everything first, and then looked: nothing can come in between unnoticed.
                for activity in (*limiter.feeders, here):
                    if activity is not None:
                        waiter.watch(activity)
                gate.waiting[waiter] = needed
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
            return "within a call that holds the buffer's lock, so that nobody can come"
        return "in the only thread that there is, so that nobody can come" if threads.alone() else ""

    def _take(self) -> None:
        gate = self._gate
        take(gate.threads, self._taken)
        if gate.outer() is None:
            gate.outer = weakref.ref(self)

    def _give_up(self) -> None:
        gate = self._gate
        if gate.outer() is self:
            gate.outer = nobody
        give_up(gate.threads, self._taken)

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        gate = self._gate
        if self._taken:
            gate.limiter.insert_ends(self._taken)
            try:
                if gate.outer() is self:
                    for waiter, needed in list(gate.waiting.items()):
                        if not needed():
                            waiter.wake()
                            gate.waiting.pop(waiter, None)
            finally:
                self._give_up()
        self.__class__ = _LimitedHold


class _LimitedHeld(_LimitedHold):
    __slots__ = ()

    def __del__(self) -> None:
        """Give up what an interrupt left."""
        self._leave()
