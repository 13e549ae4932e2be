"""Memory that a node lends to its owner: where both are on one machine, batches stand in blocks that both map.

Orders and answers through pipes, for nodes on their owner's machine: a call of Ray takes ten times as long.

A node *attends* in a call of Ray, which brings it the weights, and whose end tells what became of it. Meanwhile it
carries out what comes through its pipe, until it's told to leave or a while has passed: other calls have their turn
then. Each says how many orders were given before it, and those that are left in the pipe come first: whichever way they
take, a node carries out its owner's orders and requests in their sequence.

How batches travel from a node to its owner: lent, or through the object store. Nobody else has to know which.
"""

from __future__ import annotations

import math
import os
import pickle
import select
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle
import torch
from tensordict import TensorDictBase

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block, copy_columns
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import as_key, flatten
from gleanrl._os.clock import Deadline
from gleanrl._os.files import Descriptors, memory_of, pipe, pipe_of
from gleanrl._process.pipes import ChannelClosed, OwnerEnd, WorkerEnd
from gleanrl._process.serialization import Arrived
from gleanrl._process.shared_columns import OWN, Region, SharedRows, SharedSegment
from gleanrl.collectors.batch_columns import IDS
from gleanrl.errors import CapacityError

_ATTENDS_S = 1.0
"""How long a node attends: what else asks something of its actor waits no longer than that, and a batch."""
_LOOKS_S = 1.0
"""How often references are looked at, should Ray not have told that one is there."""


class Message(NamedTuple):
    """An order that goes through a pipe, or what came of it."""

    ticket: int
    """Of the order; see `Line.give`."""
    value: Any


class PipeNames(NamedTuple):
    """What a node calls its owner's ends of the pipes."""

    orders: int
    answers: int


class NodeEnd:
    """The node's side."""

    def __init__(self) -> None:
        self._held = Descriptors()
        orders, orders_far = self._held.take(pipe())
        answers_far, answers = self._held.take(pipe())
        self.names = PipeNames(orders_far, answers_far)
        self._end = WorkerEnd(orders, answers)
        self._poller = select.poll()
        self._poller.register(orders, select.POLLIN)
        self._left = 0
        self._kept: Message | None = None
        """An order that was read and is to wait for a call of Ray."""

    def attend(self, attendance: int) -> Iterator[Message]:
        """Yield orders as they come, until told to leave or a while has passed, or the owner ended.

        Args:
            attendance: its number; one that the owner has ended already yields nothing.
        """
        self._held.close(*self.names)  # the owner has opened them: the pipe ends with it
        deadline = Deadline(_ATTENDS_S)
        with suppress(ChannelClosed):
            while self._left < attendance:
                left = deadline.remaining()
                if not left or not (self._kept or self._poller.poll(math.ceil(left * 1000))):
                    return
                yield from self._next()

    def given_before(self, count: int) -> Iterator[Message]:
        """Yield the first so many orders that were ever given, those of them that are left in the pipe."""
        with suppress(ChannelClosed):
            while self._kept or self._poller.poll(0):
                for message in self._next():
                    if message.ticket >= count:
                        self._kept = message
                        return
                    yield message

    def _next(self) -> Iterator[Message]:
        """Yield the order that comes next, if that is one."""
        found: Message | int | None = self._kept
        self._kept = None
        if found is None:
            self._end.next_code()
            found = pickle.loads(self._end.message())
        if isinstance(found, Message):
            yield found
        else:
            self._left = found

    def answer(self, answer: Message) -> None:
        """Send what came of an order.

        Raises:
            Exception: it can't be pickled; nothing was sent then.
        """
        with suppress(ChannelClosed):
            self._end.send(_dumped(answer))


class Line:
    """The owner's side. Interrupts may come anywhere: what is sent twice does no harm.

    Args:
        held: takes the descriptors.
        process: the node's.
        names: what it calls its pipes.

    Raises:
        OSError: it hasn't such pipes.
    """

    def __init__(self, held: Descriptors, process: int, names: PipeNames) -> None:
        self._held = held
        (orders,) = held.take(pipe_of(process, names.orders, os.O_WRONLY))
        (self.answers,) = held.take(pipe_of(process, names.answers, os.O_RDONLY))
        self._end = OwnerEnd(self.answers, orders)
        self._given = 0
        self._begun, self._left, self._noted = 0, 0, 0
        self._weights: Any = None
        self.attendance: Any = None
        """Ray's reference to the last attendance, unless its end was noted."""

    def attend(self, actor: Any, weights: Any = None) -> None:
        """Have a node attend that doesn't, or has other weights.

        Args:
            actor: the node's.
            weights: `Published`; None for those that it was given last.
        """
        weights = self._weights if weights is None else weights
        if self._noted == self._begun > self._left and weights == self._weights:
            return
        self.leave()
        self._begun += 1  # first: one whose call was made and not noted is ended by the next one
        self.attendance = actor.attend.remote(self._begun, weights)
        self._noted, self._weights = self._begun, weights

    def ended(self) -> None:
        """Note that the last attendance has ended."""
        self._left, self.attendance = max(self._left, self._noted), None

    def leave(self) -> int:
        """Have the node leave, so that what Ray brings next needn't wait; return how many orders come before that."""
        if self._begun > self._left:
            self._send(self._begun)
            self._left = self._begun
        else:
            self._finish()
        return self._given

    def give(self, order: Any) -> int:
        """Send an order; return its ticket: orders are counted from 0."""
        ticket = self._given
        self._given += 1  # first: no two have the same one
        self._send(Message(ticket, order))
        return ticket

    def _send(self, message: Any) -> None:
        self._finish()
        with suppress(ChannelClosed):  # that it ended is seen by its attendance
            self._end.send(_dumped(message))

    def _finish(self) -> None:
        with suppress(ChannelClosed):
            self._end.finish()

    def pull(self) -> None:
        """Take what stands in the pipe, which is readable."""
        self._end.pull()

    def first(self) -> Message | None:
        """Return the first answer that has come and wasn't dropped."""
        try:
            found = self._end.first()
        except ChannelClosed:
            return None
        answer: Message | None = found and pickle.loads(found[1])
        return answer

    def drop(self) -> None:
        """Drop the first answer."""
        self._end.drop()


class Arrivals:
    """Waits for lines and for references of Ray at once.

    Args:
        ray: the module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._held = Descriptors()
        self._reading, self._writing = self._held.take(pipe())
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._watched: set[Any] = set()

    def wait(self, lines: Collection[Line], refs: Sequence[Any], seconds: float | None) -> list[Any]:
        """Wait until something came over a line, or a reference is there; return the references that are.

        Args:
            lines: what comes over them is pulled.
            refs: the others.
            seconds: how long at most; None for ever.
        """
        if not lines:
            found: list[Any] = self._ray.wait(refs, num_returns=1, timeout=seconds)[0]
            return found
        self._watch(refs)
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        for line in lines:
            poller.register(line.answers, select.POLLIN)
        seconds = _LOOKS_S if seconds is None else min(seconds, _LOOKS_S)
        ready = dict(poller.poll(math.ceil(seconds * 1000)))
        for line in lines:
            if ready.get(line.answers, 0) & select.POLLIN:
                line.pull()
        return self._there(refs) if self._reading in ready or not ready else []

    def _watch(self, refs: Sequence[Any]) -> None:
        """Have Ray ring when one of them is there."""
        new = [ref for ref in refs if ref not in self._watched]
        self._watched = set(refs)
        for ref in new:
            ref.future().add_done_callback(self._ring)

    def _ring(self, _: Any = None) -> None:
        with suppress(BlockingIOError):  # it has rung already
            os.write(self._writing, b".")

    def _there(self, refs: Sequence[Any]) -> list[Any]:
        """Return those of the references that are there; if there are any they are looked for again next time."""
        with suppress(BlockingIOError):
            os.read(self._reading, 1 << 12)
        found: list[Any] = self._ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        if found:
            self._ring()
        return found


def _dumped(message: Any) -> bytes:
    data: bytes = cloudpickle.dumps(message)
    return data


class NodeShare(ABC):
    """A batch that is here, in memory that isn't its owner's: only to be read, and only until the node's next order."""

    @abstractmethod
    def view(self) -> TensorDictBase:
        """Return the batch where it stands."""

    @abstractmethod
    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return the batch in memory of its own."""

    @abstractmethod
    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns where they stand, and what it says of its device."""


class StoredShare(NodeShare):
    """A batch in the object store.

    Args:
        parcel: it.
    """

    def __init__(self, parcel: Arrived) -> None:
        self._parcel = parcel

    def view(self) -> TensorDictBase:
        """Return the batch where it stands."""
        batch: TensorDictBase = self._parcel.view()
        return batch

    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return the batch in memory of its own, that of the parcels' own pool."""
        batch: TensorDictBase = self._parcel.open()
        return batch

    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns where they stand, and what it says of its device."""
        batch = self.view()
        columns, size = [*flatten(batch).values()], batch.batch_size
        return Block(Schema.of(batch), size[:-1], size[-1], columns=columns, borrowed=True), batch.device


class LentShare(NodeShare):
    """A batch in memory that its node has lent.

    Args:
        block: it.
        device: what it says of its device.
    """

    def __init__(self, block: Block, device: torch.device | None) -> None:
        self._block, self._device = block, device

    def view(self) -> TensorDictBase:
        """Return the batch where it stands."""
        batch: TensorDictBase = self._block.batch(None, self._device)
        return batch

    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return the batch in memory of its own."""
        batch: TensorDictBase = self._block.copied(pool).batch(None, self._device)
        return batch

    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns where they stand, and what it says of its device."""
        return self._block, self._device


_MEMORY = "/memfd:gleanrl"
"""What descriptors of segments show at."""
_TOKEN_BYTES = 16


class Offer(NamedTuple):
    """What an owner says to a node that is made."""

    token: bytes
    """Random bytes, which the node writes into its memory: whoever reads them there sees the same memory."""
    num_blocks: int
    """Batches that the node may have lent at once."""

    @classmethod
    def of(cls, num_blocks: int) -> Offer:
        """Return one that was never made before."""
        return cls(os.urandom(_TOKEN_BYTES), num_blocks)


class Name(NamedTuple):
    """What a process calls memory of its own, and the pipes through which its owner talks to it."""

    process: int
    descriptor: int
    pipes: PipeNames


class MemoryLocation(NamedTuple):
    """Where a batch stands in the memory of a node."""

    layout: bytes
    """The region and the device that batches say, pickled: they are mostly those of the last batch."""
    block: int
    num_steps: int


class Lender:
    """The node's side: gives blocks to fill, as long as there are any that aren't lent.

    A block belongs to the owner from the answer that names it until an order says that its batch isn't needed any
    more. Nobody else has to see to the memory: the kernel frees it when neither process has it any longer, however
    they end.

    Args:
        offer: the owner's.

    Raises:
        CapacityError: the machine hasn't the memory.
    """

    def __init__(self, offer: Offer) -> None:
        self._segment = SharedSegment(1)
        memoryview(self._segment.progress(0)).cast("B")[OWN * 8 : OWN * 8 + _TOKEN_BYTES] = offer.token
        self._num_blocks = offer.num_blocks
        self._region: Region | None = None
        self._blocks: list[Block] = []
        self._layout: bytes | None = None
        self._device: torch.device | None = None
        self._lent: dict[int, int] = {}
        """The orders whose batches stand in blocks, by block."""
        self._given = 0
        """The block that was given to fill last."""
        self.end = NodeEnd()
        """Of the pipes."""

    @property
    def name(self) -> Name:
        """What the memory and the pipes are called."""
        return Name(os.getpid(), self._segment.descriptor, self.end.names)

    def take_back(self, before: int) -> None:
        """Have the blocks of orders with numbers below that again."""
        self._lent = {block: number for block, number in self._lent.items() if number >= before}

    def block(self, schema: Schema, batch_size: Sequence[int], num_steps: int) -> Block | None:
        """Return a block to fill; None if there is none: all are lent, memory is short, or it would have lists."""
        free = next((number for number in range(self._num_blocks) if number not in self._lent), None)
        if (
            free is None
            or schema.lists
            or not self._has_room(SharedRows(schema, torch.Size(batch_size), num_steps))
        ):
            return None
        self._given = free
        return self._blocks[free].leading(num_steps)

    def lend(self, order: int, batch: TensorDictBase) -> MemoryLocation | None:
        """Lend the block that a batch stands in, or one that it is copied into; None if there is none.

        Args:
            order: the number of the order that it was collected for.
            batch: ``[*batch, T]``, on the CPU.
        """
        if not self._stands_in_given(batch):
            leaves = flatten(batch)
            block = self.block(Schema.of(batch), batch.batch_size[:-1], batch.batch_size[-1])
            if block is None:
                return None
            copy_columns(block.columns, [*leaves.values()])
        self._lent[self._given] = order
        if self._layout is None or self._device != batch.device:
            self._layout, self._device = pickle.dumps((self._region, batch.device)), batch.device
        return MemoryLocation(self._layout, self._given, batch.batch_size[-1])

    def _stands_in_given(self, batch: TensorDictBase) -> bool:
        ids: torch.Tensor = batch.get(as_key(IDS))
        blocks = self._blocks
        return bool(blocks) and blocks[self._given].column(IDS).data_ptr() == ids.data_ptr()

    def _has_room(self, rows: SharedRows) -> bool:
        """Return whether blocks hold such batches; they are laid out anew where that disturbs nobody."""
        now = self._region and self._region.rows
        if (
            now
            and (now.schema, now.batch_size) == (rows.schema, rows.batch_size)
            and now.num_steps >= rows.num_steps
        ):
            return True
        if self._lent:
            return False
        try:
            self._region = region = self._segment.region("batches", rows, self._num_blocks)
        except CapacityError:
            return False
        self._blocks = [self._segment.block(region, number) for number in range(self._num_blocks)]
        self._layout = None
        return True


class Borrowed:
    """The owner's side: the memory of one node, seen from here.

    Args:
        held: its descriptor; it is closed with this object, and what was borrowed stays readable.
        line: to the node.
    """

    def __init__(self, held: Descriptors, descriptor: int, line: Line) -> None:
        self._held, self.line = held, line
        self._segment = SharedSegment(1, descriptor)
        self._layout = b""
        self._blocks: list[Block] = []
        self._device: torch.device | None = None

    @classmethod
    def opened(cls, name: Name | None, offer: Offer) -> Borrowed | None:
        """Return a node's memory; None if it has none, or it can't be seen from here, as that of another machine."""
        if name is None:
            return None
        shown = f"/proc/{name.process}/fd/{name.descriptor}"
        try:
            if not os.readlink(shown).startswith(_MEMORY):
                return None
            held = Descriptors()
            (descriptor,) = held.take(memory_of(name.process, name.descriptor))
            if os.pread(descriptor, _TOKEN_BYTES, OWN * 8) != offer.token:
                return None  # another machine's process of that number
            line = Line(held, name.process, name.pipes)
            if not os.path.samestat(os.stat(shown), os.fstat(descriptor)):
                return None  # it ended meanwhile, and another one has its number
            return cls(held, descriptor, line)
        except (OSError, CapacityError):
            return None

    def share(self, place: MemoryLocation) -> LentShare:
        """Return a batch of which the node has told."""
        if place.layout != self._layout:
            region, self._device = pickle.loads(place.layout)
            self._blocks = [self._segment.block(region, number) for number in range(region.num_blocks)]
            self._layout = place.layout
        return LentShare(self._blocks[place.block].leading(place.num_steps), self._device)
