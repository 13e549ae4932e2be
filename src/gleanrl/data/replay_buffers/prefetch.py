"""A queue of batches drawn ahead: the caller draws them, and threads may fetch their records.

`PendingSample` is a draw whose records aren't delivered yet; `PendingState` is its saved form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.devices import in_this_stream
from gleanrl._arrays.results import Draw, new_tuple
from gleanrl._arrays.tensordicts import Path
from gleanrl._os import proc
from gleanrl._os.clock import monotonic
from gleanrl._os.threads import Job, Workers
from gleanrl._state.state import StateReader, plain
from gleanrl._util import non_negative
from gleanrl.data.replay_buffers.change_log import Version, same_generations
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import is_key
from gleanrl.errors import InvalidArgumentError


class Fetched(NamedTuple):
    """The fetched records of a draw."""

    records: Any
    """The records in the form that the storage returns."""
    flags: Any
    """The columns that the sampler's `annotate` needs and that a fetch of some keys may lack; None otherwise."""


class PendingSample(NamedTuple):
    """A draw, with the version of its storage at that moment."""

    drawn: Draw
    storage: Storage
    version: Version
    """The storage's version at the draw."""
    ran_out: bool
    """Whether the draw ended an epoch."""
    epoch: int = 0
    """`Sampler.epoch` after the draw."""
    position: Any = None
    """The sampler's position before the draw (`Sampler.draw_position`), needed to cancel the draw."""

    @property
    def is_gone(self) -> bool:
        """Whether the storage was cleared or loaded since the draw."""
        return self.storage.version.content != self.version.content

    def fetch(self, paths: tuple[Path, ...] | None = None, flags: tuple[Path, ...] | None = None) -> Fetched:
        """Return the records, taking no lock; ``Fetched(None, None)`` if they can't be read because they are gone.

        Args:
            paths: the columns to fetch; None for all.
            flags: additional columns for `Fetched.flags`.
        """
        storage, slots = self.storage, self.drawn.slots
        try:
            records = storage.fetch(slots, paths)
            return new_tuple(Fetched, (records, storage.fetch(slots, flags) if flags else None))
        except IndexError:
            if not self.is_gone:
                raise
            return Fetched(None, None)

    def renewed(self, before: PendingSample, stale: torch.Tensor) -> torch.Tensor | None:
        """Return which rows must be fetched again, ``(n,)`` bool; None if fetching all rows is less work.

        A partial fetch copies each row twice: from the storage, then into the batch. So it pays for at most half of the
        rows.

        Args:
            before: the draw before the repair.
            stale: the rows that were overwritten, ``(n,)`` bool. No other rows were.
        """
        slots, old = self.drawn.slots, before.drawn.slots
        if slots.shape != old.shape:
            return None
        renewed = stale | (slots != old)
        return renewed if 2 * int(renewed.sum()) <= len(slots) else None

    def fetch_again(
        self,
        renewed: torch.Tensor,
        fetched: Fetched,
        paths: tuple[Path, ...] | None = None,
        flags: tuple[Path, ...] | None = None,
    ) -> Fetched:
        """Return the result of `fetch`, reading only the renewed rows; overwrites these rows in `fetched`."""
        storage, slots = self.storage, self.drawn.slots
        records = storage.fetch_again(fetched.records, slots, renewed, paths)
        return Fetched(records, storage.fetch_again(fetched.flags, slots, renewed, flags) if flags else None)

    def value(self) -> PendingState:
        """Return the draw as plain values. Rows overwritten since the draw are marked as not fresh."""
        drawn, storage = self.drawn, self.storage
        now, origin = storage.generation(drawn.slots), drawn.origin
        assert drawn.generation is not None
        if origin is not None:  # keep the slots whose records are still stored
            origin = origin[0, same_generations(storage.generation(origin[0]), origin[1])]
        unchanged = now == drawn.generation
        extras = tuple(drawn.extras.items())
        return PendingState(
            drawn.slots,
            extras,
            drawn.last,
            drawn.asked,
            drawn.epoch,
            origin,
            unchanged,
            self.ran_out,
            self.position,
        )


class PendingState(NamedTuple):
    """The saved form of a draw that wasn't delivered yet."""

    slots: torch.Tensor
    """``(n,)`` int64."""
    extras: tuple[tuple[Any, torch.Tensor], ...]
    """The sampler's extra values for each row, ``(n, ...)``, by key."""
    last: torch.Tensor | None
    """See `Draw.last`."""
    asked: int | None
    """See `Draw.asked`."""
    epoch: int
    """See `Draw.epoch`."""
    origin: torch.Tensor | None
    """Slots of `Draw.origin` whose records are still stored, ``(m,)`` int64."""
    fresh: torch.Tensor
    """The rows that weren't overwritten since the draw, ``(n,)`` bool."""
    ran_out: bool
    """Whether the draw ended an epoch."""
    place: Any
    """The sampler's position before the draw; None if unknown."""

    def plain(self, copies: dict[int, torch.Tensor]) -> dict[str, Any]:
        """Return plain values and private tensors; see `gleanrl._state.state.plain`."""
        state: dict[str, Any] = plain(self._replace(extras=()), copies)
        return {**state, "extras": [(key, value.clone()) for key, value in self.extras]}

    @classmethod
    def read(cls, reader: StateReader, rows: int, parse_position: Callable[[Any], Any]) -> PendingState:
        """Return the value that `plain` converted, for a storage with `rows` rows.

        Raises:
            SchemaError: a broken state, or slots outside of the storage.
        """
        slots, origin = (
            _slots(reader, "slots", rows),
            reader.optional("origin", partial(_slots, reader, rows=rows)),
        )
        count = slots.shape[0]
        flags = partial(reader.tensor, dtype=torch.bool, shape=(count,))
        return cls(
            slots,
            _extras(reader, count),
            reader.optional("last", flags),
            reader.optional("asked", partial(reader.integer, least=1)),
            reader.integer("epoch"),
            origin,
            flags("fresh"),
            reader.flag("ran_out"),
            reader.optional("place", lambda name: parse_position(reader.get(name))),
        )

    def ticket(self, storage: Storage) -> PendingSample:
        """Return the draw for a storage that holds the same records as the saved one.

        The draw gets this storage's generations. Rows that weren't fresh get -1, which never matches, so they are drawn
        again.
        """
        slots, tails = self.slots, self.origin
        origin = None if tails is None else torch.stack([tails, storage.generation(tails)])
        generation = torch.where(self.fresh, storage.generation(slots), -1)
        drawn = Draw(slots, dict(self.extras), generation, self.last, self.asked, origin, self.epoch)
        # -1 differs from every version, so the generations decide which rows are still valid.
        version = storage.version._replace(changes=-1)
        return PendingSample(drawn, storage, version, self.ran_out, self.epoch, self.place)


def _slots(reader: StateReader, name: str, rows: int) -> torch.Tensor:
    slots = reader.tensor(name, torch.int64, (None,))
    if not bool(((slots >= 0) & (slots < rows)).all()):
        raise reader.wrong(name, f"slots in [0, {rows})")
    return slots


def _extras(reader: StateReader, count: int) -> tuple[tuple[Any, torch.Tensor], ...]:
    found = []
    pairs = reader.get("extras")
    for pair in pairs if isinstance(pairs, (list, tuple)) else (None,):
        sound = isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)
        if not sound or pair[1].shape[:1] != (count,) or not is_key(pair[0]):
            raise reader.wrong("extras", f"pairs of a key and a tensor ({count}, ...)")
        found.append((pair[0], pair[1].clone()))
    return tuple(found)


_HANDED_OVER_S = 1e-4
"""Shorter fetches, in seconds, aren't given to threads. The handover costs both threads together half of it."""
_FEWEST, _MOST = 16, 1024
"""Fewest and most fetches by threads before the caller makes one to measure its duration."""
_IN_A_ROW = 3
"""Consecutive long fetches before threads take over. A single one may be an interrupt or cold caches."""


class Prefetcher:
    """A queue of draws whose records are fetched by threads while the caller is busy.

    A fetch that is shorter than its handover to a thread is left to the caller of `take`. After every `_FEWEST` to
    `_MOST` fetches by threads, the caller makes one fetch itself to measure its duration. If that is long, threads
    continue. If it is short, the caller fetches until several consecutive fetches are long.

    The caller draws and takes batches in its own order, so the result doesn't depend on the number of threads. The
    caller also checks whether a batch is still valid when it takes it.

    Not thread-safe: the buffer calls it under its lock. `take` returns a job, whose result is awaited without the lock.

    Args:
        depth: batches kept ahead, at least 1.
        threads: fetching threads, at least 1; they start with the first batch.
    """

    def __init__(self, depth: int, threads: int) -> None:
        self.depth = depth
        self.threads = threads
        self._queue: deque[tuple[PendingSample, Job[Fetched] | None]] = deque()
        self._workers = Workers(threads, "gleanrl-prefetch")
        self._by_threads = self._pause = _FEWEST  # remaining fetches by threads, and their number in a period
        self._long = _IN_A_ROW  # consecutive long fetches; threads fetch at first

    def __len__(self) -> int:
        """Return the number of batches drawn and not yet taken."""
        return len(self._queue)

    @property
    def wants_more(self) -> bool:
        """Whether to draw another batch: at most `depth` are queued, and the last one doesn't end an epoch."""
        return len(self._queue) <= self.depth and not (self._queue and self._queue[-1][0].ran_out)

    @property
    def forked(self) -> bool:
        """Whether this is a forked process and the queued batches were drawn by its parent."""
        return self._workers.forked

    def put(self, ticket: PendingSample) -> None:
        """Add a draw to the queue. A thread fetches its records, unless the fetch is left to the caller of `take`."""
        self._leave_parent()
        self._queue.append((ticket, self._start(ticket)))

    def take(self) -> tuple[PendingSample, Coming]:
        """Remove and return the oldest draw, and the job or deferred fetch of its records."""
        ticket, coming = self._queue.popleft()
        return ticket, coming or Undelivered(self, ticket)

    def took(self, seconds: float) -> None:
        """Record the duration of a fetch that the caller of `take` made. Any thread may call it."""
        self._long = 0 if seconds < _HANDED_OVER_S else self._long + 1
        if not self._long:
            self._pause = _FEWEST
        elif self._long >= _IN_A_ROW:
            self._by_threads, self._pause = self._pause, min(2 * self._pause, _MOST)

    def forget_gone(self) -> None:
        """Drop batches of an old content from the front: the user cleared or loaded the storage directly."""
        while self._queue and self._queue[0][0].is_gone:
            self._queue.popleft()

    def join(self, version: Version) -> None:
        """Bind all batches to a copied storage; generations then decide which rows are still valid."""
        old = version._replace(changes=-1)
        self._queue = deque((ticket._replace(version=old), coming) for ticket, coming in self._queue)

    def _leave_parent(self) -> None:
        """In a forked process, replace the jobs by deferred fetches, since the threads exist in the parent only."""
        if self._workers.forked:
            self._queue = deque((ticket, None) for ticket in self)
            self._by_threads = self._by_threads or 1  # start a thread in this process, which resets `forked`

    def _start(self, ticket: PendingSample) -> Job[Fetched] | None:
        """Start a fetch by a thread; return None to leave it to the caller of `take`."""
        if not self._by_threads:
            return None
        self._by_threads -= 1
        device = getattr(ticket.storage, "device", None)  # a user's storage may lack the attribute
        known = isinstance(device, torch.device)
        return self._workers.start(in_this_stream(ticket.fetch, device if known else None))

    @property
    def position(self) -> Any:
        """The sampler's position before the oldest queued draw, None if unknown. The queue must not be empty."""
        return self._queue[0][0].position

    def clear(self) -> None:
        """Drop every queued batch. Threads finish the fetches that have begun."""
        self._queue.clear()

    def __iter__(self) -> Iterator[PendingSample]:
        """Yield the queued draws, the oldest first."""
        # A copy: another thread may change the queue meanwhile.
        return (ticket for ticket, _ in [*self._queue])

    def __getstate__(self) -> dict[str, Any]:
        """Return the draws from the present content for pickling; a copy fetches their records again."""
        living = [ticket for ticket in self if not ticket.is_gone]
        # A draw without extras has a read-only mapping, which can't be pickled.
        draws = [ticket.drawn._replace(extras=dict(ticket.drawn.extras)) for ticket in living]
        tickets = [ticket._replace(drawn=drawn) for ticket, drawn in zip(living, draws, strict=True)]
        return {"depth": self.depth, "threads": self.threads, "tickets": tickets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle. Fetches are deferred, because the storage may not be unpickled yet."""
        self.__init__(state["depth"], state["threads"])  # type: ignore[misc]
        self._queue.extend((ticket, None) for ticket in state["tickets"])


class Undelivered:
    """A deferred fetch, which the caller of `result` makes itself.

    Args:
        queue: the prefetcher, which records the duration.
        ticket: the draw to fetch.
    """

    __slots__ = ("_queue", "_ticket")

    def __init__(self, queue: Prefetcher, ticket: PendingSample) -> None:
        self._queue, self._ticket = queue, ticket

    def result(self) -> Fetched:
        """Fetch and return the records, and record the duration; each call fetches again."""
        start = monotonic()
        fetched = self._ticket.fetch()
        self._queue.took(monotonic() - start)
        return fetched


Coming = Job[Fetched] | Undelivered
"""A fetch in progress or deferred: `result` returns the records."""


def make_prefetcher(depth: Any, threads: Any) -> Prefetcher | None:
    """Return the prefetcher for a buffer's `prefetch` and `prefetch_threads`; None for no prefetching.

    Raises:
        InvalidArgumentError: a negative number, or threads without prefetching.
    """
    depth = 0 if depth is None else non_negative("prefetch", depth)
    threads = 0 if threads is None else non_negative("prefetch_threads", threads)
    if not depth:
        if threads:
            raise InvalidArgumentError(
                f"prefetch_threads: got {threads} threads, but no prefetch; pass prefetch=, or leave both out"
            )
        return None
    return Prefetcher(depth, threads or min(depth, proc.cpu_count()))
