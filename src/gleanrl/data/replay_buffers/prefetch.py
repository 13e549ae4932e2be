"""Batches drawn ahead: drawn in the caller's order, fetched by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from gleanrl.arguments import non_negative
from gleanrl.data.replay_buffers.tickets import Fetched, Ticket
from gleanrl.data.replay_buffers.versions import Version
from gleanrl.errors import InvalidArgumentError
from gleanrl.system import proc
from gleanrl.system.threads import Job, Workers


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
        self._queue: deque[tuple[Ticket, Job[Fetched] | None]] = deque()
        self._workers = Workers(threads, "gleanrl-prefetch")

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

    def take(self) -> tuple[Ticket, Job[Fetched]]:
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

    def _start(self, ticket: Ticket) -> Job[Fetched]:
        return self._workers.start(ticket.fetch)

    @property
    def place(self) -> Any:
        """The sampler's place before the first batch that wasn't taken, None if it isn't known; there is one."""
        return self._queue[0][0].place

    def clear(self) -> None:
        """Forget every batch that wasn't taken."""
        self._queue.clear()

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


def make_prefetcher(depth: Any, threads: Any) -> Prefetcher | None:
    """Return what a buffer's `prefetch` and `prefetch_threads` ask for; None for nothing."""
    depth = 0 if depth is None else non_negative("prefetch", depth)
    threads = 0 if threads is None else non_negative("prefetch_threads", threads)
    if not depth:
        if threads:
            raise InvalidArgumentError("prefetch_threads: there is nothing to fetch ahead without prefetch")
        return None
    return Prefetcher(depth, threads or min(depth, proc.cpu_count()))
