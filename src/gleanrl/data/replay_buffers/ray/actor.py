"""A buffer in a Ray actor: what its clients' calls come to there.

What a buffer's actor and its clients say to each other.

Batches on their way from a buffer's actor to its clients: sent, and not handed out yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch

from gleanrl._checkpoint.async_dump import Dump
from gleanrl._process.serialization import Arrived, PickledBatch
from gleanrl.data.replay_buffers.change_log import Version
from gleanrl.data.replay_buffers.draws import stamps
from gleanrl.data.replay_buffers.ensemble import ReplayBufferEnsemble
from gleanrl.data.replay_buffers.prefetch import Coming, PendingSample, Prefetcher
from gleanrl.data.replay_buffers.presets import copies_at_once
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.sampling import Served
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import UnsupportedError

SAVES = frozenset(("checkpointed_state", "dumps", "state_dict"))
"""Methods that save what was drawn ahead, and wasn't handed out."""
_LEAVES = SAVES | {
    "__getitem__",
    "__len__",
    "__repr__",
    "__setitem__",
    "add",
    "extend",
    "generation",
    "mark_update",
    "stats",
    "update_priority",
    "update_tensordict_priority",
    "verify",
}


def leaves_draws(path: tuple[str, ...]) -> bool:
    """Return whether a call leaves alone what was drawn ahead, as that of a local buffer does; those of parts do."""
    return len(path) > 1 or path[0] in _LEAVES


class Caller(NamedTuple):
    """Who calls, and what became of the batches that were sent to it ahead."""

    client: bytes
    """One process's client, and no other one's."""
    era: int
    """Counts up when the client throws away what is on its way to it."""
    taken: int
    """The number of the last batch that it handed out."""


class Opened(NamedTuple):
    """What a client needs to know of a buffer that was made."""

    depth: int
    """Batches on their way to a client at once; 0 for none ahead."""
    batch_size: int | None
    """The buffer's."""


class BufferReply(NamedTuple):
    """What a call came to."""

    value: Any
    """A parcel of what it returned, or a `Token`."""
    depth: int
    """See `Opened`; exchanging the sampler may change it."""
    void: bool
    """Whether what was sent to the caller ahead isn't to be handed out any more: the storage has another content."""
    stale: tuple[int, ...]
    """The numbers of batches sent to the caller ahead whose records were overwritten: they are drawn again."""
    warnings: tuple[Warning, ...]
    """What it warned of."""


class Dumping(NamedTuple):
    """Stands for a checkpoint that the actor writes in the background."""

    number: int


class Token(Enum):
    """What stands for something that stays in the actor."""

    BUFFER = 1
    METHOD = 2
    PART = 3


class _Sent(NamedTuple):
    client: bytes
    number: int
    ticket: PendingSample


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

    def take(self) -> tuple[PendingSample, Coming]:
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
    def again(self, number: int) -> Iterator[PendingSample | None]:
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

    def __iter__(self) -> Iterator[PendingSample]:
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

    def _start(self, ticket: PendingSample) -> None:
        """Leave it to whoever takes the batch: the request for it is waiting."""


def _is_stale(ticket: PendingSample) -> bool:
    storage, drawn = ticket.storage, ticket.drawn
    if ticket.is_gone or storage.version == ticket.version:
        return False
    return not torch.equal(storage.generation(drawn.slots), stamps(drawn))


_WRITES = frozenset(("add", "extend"))


class BufferHost:
    """A buffer, and what is under way to its clients.

    An actor does one thing at a time, in the order in which each client asked for it. So a client's batches come as
    they would from a local buffer with the same `prefetch`.
    """

    def __init__(self) -> None:
        self._eras: dict[bytes, int] = {}
        self._shipping: Shipping | None = None
        self._depth = 0
        self._dumps: list[Dump] = []
        self._prepared: Callable[[], None] = _nothing
        self._num_prepared = 0
        # Views of what arrived: records are copied out of them, and nothing is written into them.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")

    def open(self, making: Arrived, seed: int) -> Opened:
        """Make the buffer of ``(class, arguments, keyword arguments)``; unseeded generators begin with `seed`."""
        torch.manual_seed(seed)
        kind, args, options = making.open()
        self._buffer: ReplayBuffer | ReplayBufferEnsemble = kind(*args, **options)
        buffer = self._buffer
        if isinstance(buffer, ReplayBuffer):
            if buffer.stats().rate_limiter is not None:
                raise UnsupportedError(
                    "rate_limiter: a call that waits would keep the actor from what it waits for; pace the "
                    "collectors by len() and write_count, or keep the buffer in this process"
                )
            draws = buffer.server.draws
            if draws.prefetcher is not None:
                self._depth = draws.prefetcher.depth
                draws.prefetcher = self._shipping = Shipping()
        return Opened(self._ahead(), buffer.batch_size)

    # What clients ask for

    def ahead(self, client: bytes, era: int, due: tuple[int, ...]) -> PickledBatch:
        """Return the next batches for a client, each with its number, as many as are `due`.

        None in place of one that there isn't now: the client threw away what it had asked for, or an epoch has come to
        its end. For each one `due` says what the client had taken when it was.
        """
        return PickledBatch([self._next(Caller(client, era, taken)) for taken in due])

    def _next(self, caller: Caller) -> tuple[int, Served] | None:
        shipping = self._shipping
        assert shipping is not None
        self._listen(caller)
        if caller.era < self._eras[caller.client] or not self._ahead():
            return None
        shipping.handed_out(caller.client, caller.taken)
        if shipping.at_end(caller.client):
            return None
        shipping.client = caller.client
        server = self._buffer.server
        served = server.as_user(server.size_of(None), None, True)
        return shipping.number, served

    def again(self, caller: Caller, number: int) -> BufferReply:
        """Return the batch of that number, drawn again, to be handed out now; None if it was taken back."""
        shipping, buffer, served = self._shipping, self._buffer, None
        assert shipping is not None and isinstance(buffer, ReplayBuffer)
        self._listen(caller)
        shipping.handed_out(caller.client, caller.taken)
        with warnings.catch_warnings(record=True) as said, shipping.again(number) as ticket:
            if ticket is not None:
                server = buffer.server
                server.draws.not_served(ticket)  # it counted when it was sent
                served = server.as_user(server.size_of(None), None, True)
        return self._reply(caller, None if served is None else PickledBatch(served), said)

    def serve(self, caller: Caller, size: int | None, keys: Any, wants_info: bool) -> BufferReply:
        """Return a batch that is drawn now, `Served`."""
        self._listen(caller)
        with warnings.catch_warnings(record=True) as said:
            server = self._buffer.server
            served = server.as_user(server.size_of(size), keys, wants_info)
        return self._reply(caller, PickledBatch(served), said)

    def new_epoch(self, caller: Caller) -> BufferReply:
        """Begin a new epoch with the next batch."""
        self._listen(caller)
        self._buffer.server.new_epoch()
        return self._reply(caller, None, ())

    def call(
        self, caller: Caller, path: tuple[str, ...], arguments: Arrived, data: Arrived | None = None
    ) -> BufferReply:
        """Call a method of the buffer, or of one of its parts; `data` is its first argument if it's given."""
        name = path[-1] if len(path) == 1 else ""
        self._listen(caller)
        if self._shipping is not None:
            settle = self._shipping.keep_only if name in SAVES else self._shipping.handed_out
            settle(caller.client, caller.taken)
        buffer = self._buffer
        lends = name in _WRITES and isinstance(buffer, ReplayBuffer) and copies_at_once(buffer)
        with warnings.catch_warnings(record=True) as said:
            opened = [
                parcel.view() if lends else parcel.open()
                for parcel in (arguments, data)
                if parcel is not None
            ]
            args, options = opened[0]
            args = (*opened[1:], *args)
            value = self._sendable(self._at(path)(*args, **options))
        return self._reply(caller, value, said)

    def prepare(self, caller: Caller, state: Arrived) -> BufferReply:
        """Check a state that the buffer is to go on from; return its number, for `adopt`. One state at a time waits."""
        self._listen(caller)
        self._prepared = self._buffer.loading(state.open())
        self._num_prepared += 1
        return self._reply(caller, self._num_prepared, ())

    def adopt(self, caller: Caller, number: int) -> BufferReply:
        """Go on from the state of that number; a second call, after an interrupt of the first, does nothing."""
        if number != self._num_prepared:
            raise UnsupportedError(
                "loading: another state was checked since, which took this one's place; load it anew"
            )
        prepared, self._prepared = self._prepared, _nothing
        prepared()
        return self._reply(caller, None, ())

    def get(self, path: tuple[str, ...]) -> Any:
        """Return an attribute of the buffer, or of one of its parts."""
        value = self._at(path)
        return Token.METHOD if callable(value) else self._sendable(value)

    def set(self, path: tuple[str, ...], value: Arrived) -> None:
        """Set an attribute of the buffer, or of one of its parts."""
        setattr(self._at(path[:-1]), path[-1], value.open())

    def dump(self, dumping: Dumping, wait: bool) -> bool:
        """Return whether a checkpoint in the background has ended, or is there, which raises its error.

        Nobody waits here: others have something to do meanwhile.
        """
        dump = self._dumps[dumping.number]
        return dump.wait(0.0) if wait else dump.done()

    def _at(self, path: tuple[str, ...]) -> Any:
        found: Any = self._buffer
        for name in path:
            found = getattr(found, name)
        return found

    def _sendable(self, value: Any) -> Any:
        if value is self._buffer:
            return Token.BUFFER
        if isinstance(value, Dump):
            self._dumps.append(value)
            return Dumping(len(self._dumps) - 1)
        return Token.PART if isinstance(value, (Storage, Sampler, Writer)) else PickledBatch(value)

    def _reply(self, caller: Caller, value: Any, said: Any) -> BufferReply:
        shipping, client = self._shipping, caller.client
        void, stale = (False, ()) if shipping is None else (shipping.gone(client), shipping.overtaken(client))
        return BufferReply(value, self._ahead(), void, stale, tuple(warning.message for warning in said))

    # What is under way

    def _ahead(self) -> int:
        """Return how many batches are to be under way to a client."""
        buffer = self._buffer
        return self._depth if isinstance(buffer, ReplayBuffer) and buffer.server.draws_ahead else 0

    def _listen(self, caller: Caller) -> None:
        """Take back what was under way to a client that threw it away; what is under way to others reaches them."""
        if caller.era > self._eras.setdefault(caller.client, 0):
            self._eras[caller.client] = caller.era
            if self._shipping is not None and isinstance(self._buffer, ReplayBuffer):
                self._shipping.keep_only(caller.client, caller.taken)
                self._shipping.forget_gone()
                self._buffer.server.draws.take_back()


def _nothing() -> None:
    """Go on as it is."""
