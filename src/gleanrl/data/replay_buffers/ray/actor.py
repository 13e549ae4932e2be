"""A buffer in a Ray actor: the host that executes clients' calls, and the messages between both.

Batches that the host has sent to clients count as drawn ahead until the client hands them out to its user. `Shipping`
describes the exception for several clients.
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
"""Methods that save the batches drawn ahead and not handed out yet."""
_LEAVES = SAVES | {
    "__getitem__",
    "__len__",
    "__repr__",
    "_repr_html_",
    "__setitem__",
    "add",
    "describe",
    "episodes",
    "extend",
    "generation",
    "mark_update",
    "stats",
    "update_priority",
    "update_tensordict_priority",
    "verify",
}


def leaves_draws(path: tuple[str, ...]) -> bool:
    """Return whether a call keeps the batches drawn ahead, as on a local buffer. Calls to parts always do."""
    return len(path) > 1 or path[0] in _LEAVES


class Caller(NamedTuple):
    """Identifies a client, and says which of the batches sent ahead it has handed out."""

    client: bytes
    """A random name of the client, which exists in one process."""
    era: int
    """Number of times that the client discarded the batches on their way to it."""
    last_consumed: int
    """The number of the last batch that the client handed out."""


class Opened(NamedTuple):
    """The properties of a new buffer that its clients need."""

    depth: int
    """Number of batches on their way to a client at the same time; 0 for none."""
    batch_size: int | None
    """The buffer's default batch size."""


class BufferReply(NamedTuple):
    """The reply to a call."""

    value: Any
    """The pickled result, a `Token`, a `Dumping`, the number that `BufferHost.prepare` gave, or None."""
    depth: int
    """See `Opened`; replacing the sampler may change it."""
    void: bool
    """Whether the client must discard all batches sent ahead, because the storage has another content."""
    stale: tuple[int, ...]
    """Numbers of batches sent ahead to this client whose records were overwritten. They must be drawn again."""
    warnings: tuple[Warning, ...]
    """The warnings of the call; always empty for `new_epoch`, `prepare` and `adopt`."""


class Dumping(NamedTuple):
    """Reference to a checkpoint that the actor writes in the background."""

    number: int


class Token(Enum):
    """Replaces a result that stays in the actor."""

    BUFFER = 1
    METHOD = 2
    PART = 3


class _Sent(NamedTuple):
    client: bytes
    number: int
    ticket: PendingSample


class Shipping(Prefetcher):
    """The batches that a buffer in an actor has drawn ahead and sent to clients, in the order of their draws.

    A batch counts as drawn ahead until its client reports that it was handed out. A saved state therefore contains it,
    and `Draws.take_back` cancels it. Draws can be cancelled only from the end of the sequence. So when a client's call
    saves or cancels (`keep_only`), batches of other clients and all batches before them count as handed out from then
    on.

    Not thread-safe: an actor executes one call at a time.

    Attributes:
        client: the client that gets the next batch.
        number: the number of the last batch sent.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.client = b""
        self.number = 0
        self._sent: list[_Sent] = []
        self._again = False  # whether the next batch is a repeated one, which gets no new number

    def take(self) -> tuple[PendingSample, Coming]:
        """Return the oldest draw and its deferred fetch, and register the draw as sent to `client`.

        A batch that `again` repeats isn't registered, so it counts as handed out.
        """
        ticket, coming = super().take()
        if self._again:
            return ticket, coming
        self.number += 1
        self._sent.append(_Sent(self.client, self.number, ticket))
        return ticket, coming

    def handed_out(self, client: bytes, last_consumed: int) -> None:
        """Forget the batches that a client has handed out: all up to the number `last_consumed`."""
        self._sent = [sent for sent in self._sent if sent.client != client or sent.number > last_consumed]

    def keep_only(self, client: bytes, last_consumed: int) -> None:
        """Count all batches as handed out that this client's call can't cancel.

        These are its own batches up to `last_consumed`, batches of other clients, and all batches drawn before one of
        the latter.
        """
        self.handed_out(client, last_consumed)
        foreign = [count for count, sent in enumerate(self._sent, 1) if sent.client != client]
        del self._sent[: max(foreign, default=0)]

    def at_end(self, client: bytes) -> bool:
        """Return whether the last batch sent to a client ends an epoch.

        The next epoch begins only after the client has handed that batch out.
        """
        own = [sent.ticket for sent in self._sent if sent.client == client]
        return bool(own) and own[-1].ran_out

    def gone(self, client: bytes) -> bool:
        """Return whether a batch sent to a client was drawn from an earlier content of the storage."""
        return any(sent.ticket.is_gone for sent in self._sent if sent.client == client)

    def overtaken(self, client: bytes) -> tuple[int, ...]:
        """Return the numbers of batches sent to a client whose records were overwritten.

        Batches of an earlier content aren't among them (see `gone`).
        """
        return tuple(sent.number for sent in self._sent if sent.client == client and _is_stale(sent.ticket))

    @contextmanager
    def again(self, number: int) -> Iterator[PendingSample | None]:
        """Make the buffer serve a batch again that was sent before, within the block.

        A local buffer checks and repairs a batch when its user takes it. Here the client requests that check for a
        stale batch. After the block the batch counts as handed out, even if serving it failed.

        Yields:
            The draw of that batch; None if it was cancelled, or already counts as handed out.
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

    # The buffer sees one queue: batches that were sent come before batches that weren't.

    def __len__(self) -> int:
        """Return the number of batches drawn and not handed out."""
        return len(self._sent) + super().__len__()

    def __iter__(self) -> Iterator[PendingSample]:
        """Yield the draws not handed out yet, the oldest first."""
        yield from (sent.ticket for sent in self._sent)
        yield from super().__iter__()

    @property
    def position(self) -> Any:
        """The sampler's position before the oldest batch not handed out."""
        return self._sent[0].ticket.position if self._sent else super().position

    def clear(self) -> None:
        """Forget every batch."""
        self._sent.clear()
        super().clear()

    def forget_gone(self) -> None:
        """Forget batches drawn from an earlier content."""
        self._sent = [sent for sent in self._sent if not sent.ticket.is_gone]
        super().forget_gone()

    def join(self, version: Version) -> None:
        """Raise `NotImplementedError`: an actor's buffer is never copied."""
        raise NotImplementedError

    def _start(self, ticket: PendingSample) -> None:
        """Start no fetch: the caller of `take` makes it at once, because the client's request is already waiting."""


def _is_stale(ticket: PendingSample) -> bool:
    storage, drawn = ticket.storage, ticket.drawn
    if ticket.is_gone or storage.version == ticket.version:
        return False
    return not torch.equal(storage.generation(drawn.slots), stamps(drawn))


_WRITES = frozenset(("add", "extend"))


class BufferHost:
    """Runs in the actor: holds the buffer, and tracks the batches on their way to clients.

    An actor executes one call at a time, and each client's calls in their order. So an only client gets the same
    batches as from a local buffer with the same `prefetch`.
    """

    def __init__(self) -> None:
        self._eras: dict[bytes, int] = {}
        self._shipping: Shipping | None = None
        self._depth = 0
        self._dumps: list[Dump] = []
        self._prepared: Callable[[], None] = _nothing
        self._num_prepared = 0
        # Arrived records are read-only views. They are copied into the storage and never written, so torch's warning
        # doesn't apply.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")

    def open(self, making: Arrived, seed: int) -> Opened:
        """Create the buffer from ``(class, arguments, keyword arguments)``.

        `seed` seeds torch's global generator of this process first, so unseeded generators of the buffer derive from
        it. A `ReplayBuffer` that prefetches gets a `Shipping` in place of its prefetcher.

        Raises:
            UnsupportedError: the buffer, or a member of an ensemble, has a rate limiter. A waiting call would block the
                actor.
        """
        torch.manual_seed(seed)
        kind, args, options = making.open()
        self._buffer: ReplayBuffer | ReplayBufferEnsemble = kind(*args, **options)
        buffer = self._buffer
        counters = (buffer.stats(),) if isinstance(buffer, ReplayBuffer) else buffer.stats()
        if any(each.rate_limiter is not None for each in counters):
            raise UnsupportedError(
                "rate_limiter: a waiting call would block the actor, so no other call could end the wait; pace the "
                "collectors by len() and write_count, or keep the buffer in this process"
            )
        if isinstance(buffer, ReplayBuffer):
            draws = buffer.server.draws
            if draws.prefetcher is not None:
                self._depth = draws.prefetcher.depth
                draws.prefetcher = self._shipping = Shipping()
        return Opened(self._ahead(), buffer.batch_size)

    def ahead(self, client: bytes, era: int, due: tuple[int, ...]) -> PickledBatch:
        """Return the next batches for a client, each with its number, one for each element of `due`.

        An element is None if no batch is available. Then the client has discarded its requests, an epoch has ended, or
        the buffer no longer draws ahead. An error of one batch is raised in place of all of them.

        Args:
            client: the client's name.
            era: see `Caller`.
            due: for each batch, the number of the last batch that the client had handed out when it requested this one.
        """
        return PickledBatch([self._next(Caller(client, era, last_consumed)) for last_consumed in due])

    def _next(self, caller: Caller) -> tuple[int, Served] | None:
        shipping = self._shipping
        assert shipping is not None
        self._listen(caller)
        if caller.era < self._eras[caller.client] or not self._ahead():
            return None
        shipping.handed_out(caller.client, caller.last_consumed)
        if shipping.at_end(caller.client):
            return None
        shipping.client = caller.client
        server = self._buffer.server
        served = server.as_user(server.size_of(None), None, True)
        return shipping.number, served

    def again(self, caller: Caller, number: int) -> BufferReply:
        """Return the batch of that number, with overwritten rows drawn again, for immediate use.

        The batch then counts as handed out. The value is None if it was cancelled or already counts as handed out.
        """
        shipping, buffer, served = self._shipping, self._buffer, None
        assert shipping is not None and isinstance(buffer, ReplayBuffer)
        self._listen(caller)
        shipping.handed_out(caller.client, caller.last_consumed)
        with warnings.catch_warnings(record=True) as said, shipping.again(number) as ticket:
            if ticket is not None:
                server = buffer.server
                server.draws.not_served(ticket)  # the batch was counted when it was first sent
                served = server.as_user(server.size_of(None), None, True)
        return self._reply(caller, None if served is None else PickledBatch(served), said)

    def serve(self, caller: Caller, size: int | None, keys: Any, wants_info: bool) -> BufferReply:
        """Return a batch that is drawn now, as `Served`; batches still drawn ahead are cancelled (see `Draws.now`)."""
        self._listen(caller)
        with warnings.catch_warnings(record=True) as said:
            server = self._buffer.server
            served = server.as_user(server.size_of(size), keys, wants_info)
        return self._reply(caller, PickledBatch(served), said)

    def new_epoch(self, caller: Caller) -> BufferReply:
        """Begin a new epoch with the next batch; batches still drawn ahead are cancelled."""
        self._listen(caller)
        self._buffer.server.new_epoch()
        return self._reply(caller, None, ())

    def call(
        self, caller: Caller, path: tuple[str, ...], arguments: Arrived, data: Arrived | None = None
    ) -> BufferReply:
        """Call a method of the buffer, or of one of its parts. `data`, if given, is its first argument.

        If the buffer only copies records (`copies_at_once`), the arguments of `add` and `extend` are read-only views of
        the message instead of copies. An error of the method is raised, without a reply.
        """
        name = path[-1] if len(path) == 1 else ""
        self._listen(caller)
        if self._shipping is not None:
            settle = self._shipping.keep_only if name in SAVES else self._shipping.handed_out
            settle(caller.client, caller.last_consumed)
        buffer = self._buffer
        lends = name in _WRITES and isinstance(buffer, ReplayBuffer) and copies_at_once(buffer)
        with warnings.catch_warnings(record=True) as said:
            opened = [
                argument.view() if lends else argument.open()
                for argument in (arguments, data)
                if argument is not None
            ]
            args, options = opened[0]
            args = (*opened[1:], *args)
            value = self._sendable(self._at(path)(*args, **options))
        return self._reply(caller, value, said)

    def prepare(self, caller: Caller, state: Arrived) -> BufferReply:
        """Check a state to load and return a number for `adopt`. A later call replaces an earlier state.

        Raises:
            SchemaError: the state doesn't fit. An earlier state can still be adopted.
        """
        self._listen(caller)
        self._prepared = self._buffer.loading(state.open())
        self._num_prepared += 1
        return self._reply(caller, self._num_prepared, ())

    def adopt(self, caller: Caller, number: int) -> BufferReply:
        """Load the state of that number. A second call, after an interrupt of the first, does nothing.

        Raises:
            UnsupportedError: `prepare` has replaced that state by another one.
        """
        if number != self._num_prepared:
            raise UnsupportedError(
                "loading: another state was checked since and replaced this one; load this one again"
            )
        prepared, self._prepared = self._prepared, _nothing
        prepared()
        return self._reply(caller, None, ())

    def get(self, path: tuple[str, ...]) -> Any:
        """Return an attribute of the buffer, or of one of its parts; a `Token` for a callable or a part."""
        value = self._at(path)
        return Token.METHOD if callable(value) else self._sendable(value)

    def set(self, path: tuple[str, ...], value: Arrived) -> None:
        """Set an attribute of the buffer, or of one of its parts."""
        setattr(self._at(path[:-1]), path[-1], value.open())

    def dump(self, dumping: Dumping, wait: bool) -> bool:
        """Return whether a checkpoint in the background has ended. With `wait`, whether it succeeded; raise its error.

        The call never blocks, because an actor executes one call at a time. Clients poll instead.
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

    def _ahead(self) -> int:
        """Return the number of batches to keep on their way to a client; 0 if the buffer doesn't draw ahead."""
        buffer = self._buffer
        return self._depth if isinstance(buffer, ReplayBuffer) and buffer.server.draws_ahead else 0

    def _listen(self, caller: Caller) -> None:
        """Cancel the batches that a client has discarded; batches of other clients still reach them.

        Discarded batches before another client's batch can't be cancelled and count as handed out.
        """
        if caller.era > self._eras.setdefault(caller.client, 0):
            self._eras[caller.client] = caller.era
            if self._shipping is not None and isinstance(self._buffer, ReplayBuffer):
                self._shipping.keep_only(caller.client, caller.last_consumed)
                self._shipping.forget_gone()
                self._buffer.server.draws.take_back()


def _nothing() -> None:
    """Do nothing."""
