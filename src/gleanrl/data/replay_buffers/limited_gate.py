"""The lock of a buffer with a rate limiter: who takes it to insert or to sample may have to wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from gleanrl.data.replay_buffers.gate import Gate, give_up, nobody, take
from gleanrl.data.replay_buffers.limiter import Limiter, SamplesPerInsert
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from gleanrl.records import RateCounts
from gleanrl.system import threads
from gleanrl.system.clock import Deadline


class _OneForEachUse:
    """What stands behind the locks of such gates: a new hold for each ``with``."""

    def __init__(self, side: str) -> None:
        self._side = side

    def __get__(self, gate: LimitedGate | None, owner: Any) -> Any:
        return self if gate is None else _Hold(gate, self._side)


class LimitedGate(Gate):
    """A `Gate` at which inserts and samples wait until a limiter lets them in (see `limit`).

    Whatever happens under it may be what somebody waits for: whoever leaves it wakes those who needn't wait any more.
    """

    lock = _OneForEachUse("")
    inserting = _OneForEachUse("insert")
    sampling = _OneForEachUse("sample")
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


def limit(gate: Gate, rule: SamplesPerInsert, storage: Storage, counts: RateCounts | None = None) -> None:
    """Have the inserts and samples at a gate wait for each other from now on.

    Args:
        gate: becomes a `LimitedGate`.
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
        gate.__class__ = LimitedGate
        assert isinstance(gate, LimitedGate)
        gate.begin(limiter)


def _copied(rule: SamplesPerInsert, storage: Storage, counts: RateCounts) -> Gate:
    gate = Gate()
    limit(gate, rule, storage, counts)
    return gate


class _Hold:
    """One ``with``. An interrupt leaves nothing behind (see that of `Gate`): a lock that is taken is noted.

    Args:
        gate: whose lock.
        side: ``"insert"``, ``"sample"``, or ``""`` for what never waits and isn't counted.
    """

    __slots__ = ("__weakref__", "_gate", "_side", "_taken")

    def __init__(self, gate: LimitedGate, side: str) -> None:
        self._gate, self._side = gate, side
        self._taken: list[Any] = []

    def __enter__(self) -> None:
        self.__class__ = _Held
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
        self.__class__ = _Hold


class _Held(_Hold):
    __slots__ = ()

    def __del__(self) -> None:
        """Give up what an interrupt left."""
        self._leave()
