"""Batches on their way from a buffer's actor to its clients: sent, and not handed out yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from gleanrl.data.replay_buffers.draws import stamps
from gleanrl.data.replay_buffers.prefetch import Coming, Prefetcher
from gleanrl.data.replay_buffers.tickets import Ticket
from gleanrl.data.replay_buffers.versions import Version


class _Sent(NamedTuple):
    client: bytes
    number: int
    ticket: Ticket


class Shipping(Prefetcher):
    """What a buffer in an actor drew ahead: the batches that were sent to clients, in the order of their draws.

    A batch counts as drawn ahead until its client says that it has handed it out. So a state holds it, and whatever
    takes back what was drawn ahead begins with it, as far as what was drawn behind it is on its way to nobody else.

    Not thread-safe: an actor does one thing at a time.

    Attributes:
        client: to whom the next batch goes.
        number: that of the last batch sent.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.client = b""
        self.number = 0
        self._sent: list[_Sent] = []
        self._again = False  # whether the next batch is handed out at once

    def take(self) -> tuple[Ticket, Coming]:
        """Return the oldest draw and its records, which are sent to the client."""
        ticket, coming = super().take()
        if self._again:
            return ticket, coming
        self.number += 1
        self._sent.append(_Sent(self.client, self.number, ticket))
        return ticket, coming

    def handed_out(self, client: bytes, taken: int) -> None:
        """Forget what a client has handed out: everything up to the number `taken`."""
        self._sent = [sent for sent in self._sent if sent.client != client or sent.number > taken]

    def keep_only(self, client: bytes, taken: int) -> None:
        """Take as handed out whatever may not be taken back by this client: what others got, and what lies before."""
        self.handed_out(client, taken)
        others = [place for place, sent in enumerate(self._sent, 1) if sent.client != client]
        del self._sent[: max(others, default=0)]

    def at_end(self, client: bytes) -> bool:
        """Return whether the last batch under way to a client ends an epoch: the next one begins once that is over."""
        own = [sent.ticket for sent in self._sent if sent.client == client]
        return bool(own) and own[-1].ran_out

    def gone(self, client: bytes) -> bool:
        """Return whether a batch under way to a client was drawn from a content that is gone."""
        return any(sent.ticket.is_gone for sent in self._sent if sent.client == client)

    def overtaken(self, client: bytes) -> tuple[int, ...]:
        """Return the numbers of batches under way to a client whose records were overwritten."""
        return tuple(sent.number for sent in self._sent if sent.client == client and _is_stale(sent.ticket))

    @contextmanager
    def again(self, number: int) -> Iterator[Ticket | None]:
        """Have the buffer serve a batch that was sent before, as a local one does when its turn comes.

        Yields its draw; None if it was taken back.
        """
        found = next((sent for sent in self._sent if sent.number == number), None)
        if found is None:
            yield None
            return
        self._sent.remove(found)
        self.put(found.ticket)
        self._again = True
        try:
            yield found.ticket
        finally:
            self._again = False
            super().clear()

    # A queue, as the buffer sees it: what was sent stands before what wasn't.

    def __len__(self) -> int:
        """Return the number of batches drawn and not handed out."""
        return len(self._sent) + super().__len__()

    def __iter__(self) -> Iterator[Ticket]:
        """Yield the draws that weren't handed out, the oldest first."""
        yield from (sent.ticket for sent in self._sent)
        yield from super().__iter__()

    @property
    def place(self) -> Any:
        """The sampler's place before the first batch that wasn't handed out."""
        return self._sent[0].ticket.place if self._sent else super().place

    def clear(self) -> None:
        """Forget every batch."""
        self._sent.clear()
        super().clear()

    def forget_gone(self) -> None:
        """Forget batches of a content that is gone."""
        self._sent = [sent for sent in self._sent if not sent.ticket.is_gone]
        super().forget_gone()

    def join(self, version: Version) -> None:
        """Refuse: an actor's buffer isn't copied with what it sent."""
        raise NotImplementedError

    def _start(self, ticket: Ticket) -> None:
        """Leave it to whoever takes the batch: the request for it is waiting."""


def _is_stale(ticket: Ticket) -> bool:
    storage, drawn = ticket.storage, ticket.drawn
    if ticket.is_gone or storage.version == ticket.version:
        return False
    return not torch.equal(storage.generation(drawn.slots), stamps(drawn))
