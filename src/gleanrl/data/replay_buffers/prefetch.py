"""Batches drawn ahead: drawn in the caller's order, fetched by threads where that takes a while.

Draws that wait for their records: a draw, what its storage looked like then, and both as plain values.
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
    """The records of a draw."""

    records: Any
    """As the storage returns them."""
    flags: Any
    """The columns that the sampler's entries are made of, where the records may lack them; None otherwise."""


class PendingSample(NamedTuple):
    """A draw, and what its storage looked like at that moment."""

    drawn: Draw
    storage: Storage
    version: Version
    """The storage's version at the draw."""
    ran_out: bool
    """Whether the draw ended an epoch."""
    epoch: int = 0
    """`Sampler.epoch` after the draw."""
    place: Any = None
    """The sampler's place before the draw (`Sampler.place`), if it may have to be taken back."""

    @property
    def is_gone(self) -> bool:
        """Whether the storage was cleared or loaded since the draw."""
        return self.storage.version.content != self.version.content

    def fetch(self, paths: tuple[Path, ...] | None = None, flags: tuple[Path, ...] | None = None) -> Fetched:
        """Return the records, None if the storage forgot them meanwhile; takes no lock.

        Args:
            paths: their columns; None for all.
            flags: further columns to fetch beside them.
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
        """Return which rows have to be fetched again, ``(n,)`` bool; None if it's less work to fetch all of them.

        Args:
            before: the draw that this one has come from.
            stale: which of its rows were overwritten, ``(n,)`` bool; no others were.
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
        """Return what `fetch` does, where all but the renewed rows are as they were fetched; writes into these."""
        storage, slots = self.storage, self.drawn.slots
        records = storage.fetch_again(fetched.records, slots, renewed, paths)
        return Fetched(records, storage.fetch_again(fetched.flags, slots, renewed, flags) if flags else None)

    def value(self) -> PendingState:
        """Return the draw as plain values; rows that were overwritten since are marked, their draw is void."""
        drawn, storage = self.drawn, self.storage
        now, origin = storage.generation(drawn.slots), drawn.origin
        assert drawn.generation is not None
        if origin is not None:  # those whose records are still there
            origin = origin[0, same_generations(storage.generation(origin[0]), origin[1])]
        fresh = now == drawn.generation
        extras = tuple(drawn.extras.items())
        return PendingState(
            drawn.slots, extras, drawn.last, drawn.asked, drawn.epoch, origin, fresh, self.ran_out, self.place
        )


class PendingState(NamedTuple):
    """A draw that wasn't handed out yet."""

    slots: torch.Tensor
    """``(n,)`` int64."""
    extras: tuple[tuple[Any, torch.Tensor], ...]
    """What else comes with each row, ``(n, ...)``, by key."""
    last: torch.Tensor | None
    """See `Draw.last`."""
    asked: int | None
    """See `Draw.asked`."""
    epoch: int
    """See `Draw.epoch`."""
    origin: torch.Tensor | None
    """Slots of `Draw.origin` whose records are still there, ``(m,)`` int64."""
    fresh: torch.Tensor
    """Which rows weren't overwritten since the draw, ``(n,)`` bool."""
    ran_out: bool
    """Whether the draw ended an epoch."""
    place: Any
    """The sampler's place before the draw; None if it isn't known."""

    def plain(self, copies: dict[int, torch.Tensor]) -> dict[str, Any]:
        """Return plain values and tensors of their own; see `gleanrl._state.state.plain`."""
        state: dict[str, Any] = plain(self._replace(extras=()), copies)
        return {**state, "extras": [(key, value.clone()) for key, value in self.extras]}

    @classmethod
    def read(cls, reader: StateReader, rows: int, parse_place: Callable[[Any], Any]) -> PendingState:
        """Return what `plain` made plain, of a storage with so many rows; `SchemaError` for anything else."""
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
            reader.optional("place", lambda name: parse_place(reader.get(name))),
        )

    def ticket(self, storage: Storage) -> PendingSample:
        """Return the draw again, of a storage that holds what it was drawn from."""
        slots, tails = self.slots, self.origin
        origin = None if tails is None else torch.stack([tails, storage.generation(tails)])
        generation = torch.where(self.fresh, storage.generation(slots), -1)
        drawn = Draw(slots, dict(self.extras), generation, self.last, self.asked, origin, self.epoch)
        # Before every change: whether its rows are still there shows by generations.
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
"""Handing a fetch to a thread and back costs about half of that, of both threads together."""
_FEWEST, _MOST = 16, 1024
"""Fetches by threads between two that show how long one takes."""
_IN_A_ROW = 3
"""Fetches that take long before threads take over: one alone may have been interrupted, or found cold caches."""


class Prefetcher:
    """A queue of draws whose records threads fetch while the caller is busy.

    Fetches that are shorter than handing them over are left to whoever takes the batch. Threads go on for as long as
    one that is left now and then takes long, and begin again after several in a row.

    The caller draws, in its own order, and takes the batches in that order: what is served doesn't depend on
    the number of threads. Whether a batch is still good when it is taken is for the caller to check.

    Not thread-safe: the buffer calls it under its lock (`take` hands out a job, to wait for outside).

    Args:
        depth: batches kept ahead, at least 1.
        threads: fetching threads, at least 1; they start with the first batch.
    """

    def __init__(self, depth: int, threads: int) -> None:
        self.depth = depth
        self.threads = threads
        self._queue: deque[tuple[PendingSample, Job[Fetched] | None]] = deque()
        self._workers = Workers(threads, "gleanrl-prefetch")
        self._by_threads = self._pause = _FEWEST  # fetches, until one is left to the taker again
        self._long = _IN_A_ROW  # fetches that took long, one after the other: at first as if they had

    def __len__(self) -> int:
        """Return the number of batches drawn and not taken."""
        return len(self._queue)

    @property
    def wants_more(self) -> bool:
        """Whether another batch is to be drawn: never beyond the end of an epoch."""
        return len(self._queue) <= self.depth and not (self._queue and self._queue[-1][0].ran_out)

    @property
    def forked(self) -> bool:
        """Whether what is in the queue was drawn by the process that this one was forked from."""
        return self._workers.forked

    def put(self, ticket: PendingSample) -> None:
        """Have the records of a draw fetched."""
        self._leave_parent()
        self._queue.append((ticket, self._start(ticket)))

    def take(self) -> tuple[PendingSample, Coming]:
        """Return the oldest draw and its records to come; a forked process has put one of its own before."""
        ticket, coming = self._queue.popleft()
        return ticket, coming or Undelivered(self, ticket)

    def took(self, seconds: float) -> None:
        """Learn how long a fetch took whoever took the batch; any thread may call it."""
        self._long = 0 if seconds < _HANDED_OVER_S else self._long + 1
        if not self._long:
            self._pause = _FEWEST
        elif self._long >= _IN_A_ROW:
            self._by_threads, self._pause = self._pause, min(2 * self._pause, _MOST)

    def forget_gone(self) -> None:
        """Forget batches of a content that is gone: the storage was cleared without a word to the buffer."""
        while self._queue and self._queue[0][0].is_gone:
            self._queue.popleft()

    def join(self, version: Version) -> None:
        """Take all batches as drawn from this content: whether their rows are still there shows by generations."""
        old = version._replace(changes=-1)
        self._queue = deque((ticket._replace(version=old), coming) for ticket, coming in self._queue)

    def _leave_parent(self) -> None:
        """Start anew in a forked process: the threads, and what they were to fetch, stayed in its parent."""
        if self._workers.forked:
            self._queue = deque((ticket, None) for ticket in self)
            self._by_threads = self._by_threads or 1  # a thread of its own, so that it has left

    def _start(self, ticket: PendingSample) -> Job[Fetched] | None:
        """Have a thread fetch the records, or leave that to whoever takes the batch."""
        if not self._by_threads:
            return None
        self._by_threads -= 1
        device = getattr(ticket.storage, "device", None)  # a user's class may have none
        known = isinstance(device, torch.device)
        return self._workers.start(in_this_stream(ticket.fetch, device if known else None))

    @property
    def place(self) -> Any:
        """The sampler's place before the first batch that wasn't taken, None if it isn't known; there is one."""
        return self._queue[0][0].place

    def clear(self) -> None:
        """Forget every batch that wasn't taken."""
        self._queue.clear()

    def __iter__(self) -> Iterator[PendingSample]:
        """Yield the draws that weren't taken, the oldest first."""
        return (ticket for ticket, _ in [*self._queue])  # which other threads may change meanwhile

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the draws of what is still stored; their records are fetched again."""
        living = [ticket for ticket in self if not ticket.is_gone]
        # A draw without extras has a read-only mapping, which can't be pickled.
        draws = [ticket.drawn._replace(extras=dict(ticket.drawn.extras)) for ticket in living]
        tickets = [ticket._replace(drawn=drawn) for ticket, drawn in zip(living, draws, strict=True)]
        return {"depth": self.depth, "threads": self.threads, "tickets": tickets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle; whoever takes a batch fetches it, the storage may not be there yet."""
        self.__init__(state["depth"], state["threads"])  # type: ignore[misc]
        self._queue.extend((ticket, None) for ticket in state["tickets"])


class Undelivered:
    """A fetch that is left to whoever takes the batch; `result` makes it.

    Args:
        queue: is told how long it took.
        ticket: what to fetch.
    """

    __slots__ = ("_queue", "_ticket")

    def __init__(self, queue: Prefetcher, ticket: PendingSample) -> None:
        self._queue, self._ticket = queue, ticket

    def result(self) -> Fetched:
        """Return the records, or raise what the storage raised."""
        start = monotonic()
        fetched = self._ticket.fetch()
        self._queue.took(monotonic() - start)
        return fetched


Coming = Job[Fetched] | Undelivered
"""Records to come: `result` returns them."""


def make_prefetcher(depth: Any, threads: Any) -> Prefetcher | None:
    """Return what a buffer's `prefetch` and `prefetch_threads` ask for; None for nothing."""
    depth = 0 if depth is None else non_negative("prefetch", depth)
    threads = 0 if threads is None else non_negative("prefetch_threads", threads)
    if not depth:
        if threads:
            raise InvalidArgumentError("prefetch_threads: there is nothing to fetch ahead without prefetch")
        return None
    return Prefetcher(depth, threads or min(depth, proc.cpu_count()))
