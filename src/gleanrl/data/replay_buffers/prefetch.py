"""Batches drawn ahead: drawn in the caller's order, fetched by threads where that takes a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from gleanrl.arguments import non_negative
from gleanrl.data.replay_buffers.tickets import Fetched, Ticket
from gleanrl.data.replay_buffers.versions import Version
from gleanrl.devices import in_this_stream
from gleanrl.errors import InvalidArgumentError
from gleanrl.system import proc
from gleanrl.system.clock import monotonic
from gleanrl.system.threads import Job, Workers

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
        self._queue: deque[tuple[Ticket, Job[Fetched] | None]] = deque()
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

    def put(self, ticket: Ticket) -> None:
        """Have the records of a draw fetched."""
        self._leave_parent()
        self._queue.append((ticket, self._start(ticket)))

    def take(self) -> tuple[Ticket, Coming]:
        """Return the oldest draw and its records to come; a forked process has put one of its own before."""
        ticket, coming = self._queue.popleft()
        return ticket, coming or Left(self, ticket)

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

    def _start(self, ticket: Ticket) -> Job[Fetched] | None:
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

    def __iter__(self) -> Iterator[Ticket]:
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


class Left:
    """A fetch that is left to whoever takes the batch; `result` makes it.

    Args:
        queue: is told how long it took.
        ticket: what to fetch.
    """

    __slots__ = ("_queue", "_ticket")

    def __init__(self, queue: Prefetcher, ticket: Ticket) -> None:
        self._queue, self._ticket = queue, ticket

    def result(self) -> Fetched:
        """Return the records, or raise what the storage raised."""
        start = monotonic()
        fetched = self._ticket.fetch()
        self._queue.took(monotonic() - start)
        return fetched


Coming = Job[Fetched] | Left
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
