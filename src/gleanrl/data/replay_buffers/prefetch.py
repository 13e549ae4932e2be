"""Batches drawn ahead: drawn in the caller's order, fetched by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.versions import Version
from gleanrl.records import Draw
from gleanrl.system.threads import Job, Workers
from gleanrl.tree import Path


class Ticket(NamedTuple):
    """A draw, and what its storage looked like at that moment."""

    drawn: Draw
    storage: Storage
    version: Version
    """The storage's version at the draw."""
    ran_out: bool
    """Whether the draw ended an epoch."""
    epoch: int = 0
    """`Sampler.epoch` after the draw."""
    mark: tuple[Any, ...] | None = None
    """The sampler's place before the draw, if it may have to be taken back."""

    @property
    def is_gone(self) -> bool:
        """Whether the storage was cleared or loaded since the draw."""
        return self.storage.version.content != self.version.content


def fetch(ticket: Ticket, paths: tuple[Path, ...] | None = None) -> Any:
    """Return the records of a draw, or None if the storage forgot them meanwhile; takes no lock."""
    try:
        return ticket.storage.fetch(ticket.drawn.slots, paths)
    except IndexError:
        if not ticket.is_gone:
            raise
        return None


class Prefetcher:
    """A queue of draws whose records threads fetch while the caller is busy.

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
        self._queue: deque[tuple[Ticket, Job[Any] | None]] = deque()
        self._workers = Workers(threads, "gleanrl-prefetch")

    def __len__(self) -> int:
        """Return the number of batches drawn and not taken."""
        return len(self._queue)

    @property
    def wants_more(self) -> bool:
        """Whether another batch is to be drawn: never beyond the end of an epoch."""
        return len(self._queue) <= self.depth and not (self._queue and self._queue[-1][0].ran_out)

    def put(self, ticket: Ticket) -> None:
        """Have the records of a draw fetched."""
        self._leave_parent()
        self._queue.append((ticket, self._start(ticket)))

    def take(self) -> tuple[Ticket, Job[Any]]:
        """Return the oldest draw and its records to come."""
        self._leave_parent()
        ticket, coming = self._queue.popleft()
        return ticket, coming or self._start(ticket)

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

    def _start(self, ticket: Ticket) -> Job[Any]:
        return self._workers.start(partial(fetch, ticket))

    def clear(self) -> tuple[Any, ...] | None:
        """Forget every batch that wasn't taken; return the sampler's place before the first of them, if known."""
        mark = self._queue[0][0].mark if self._queue else None
        self._queue.clear()
        return mark

    def __iter__(self) -> Iterator[Ticket]:
        """Yield the draws that weren't taken, the oldest first."""
        return (ticket for ticket, _ in self._queue)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the draws; their records are fetched again."""
        # A draw without extras has a read-only mapping, which can't be pickled.
        draws = [ticket.drawn._replace(extras=dict(ticket.drawn.extras)) for ticket in self]
        tickets = [ticket._replace(drawn=drawn) for ticket, drawn in zip(self, draws, strict=True)]
        return {"depth": self.depth, "threads": self.threads, "tickets": tickets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle; each fetch starts when its batch is taken, the storage may not be there yet."""
        self.__init__(state["depth"], state["threads"])  # type: ignore[misc]
        self._queue.extend((ticket, None) for ticket in state["tickets"])
