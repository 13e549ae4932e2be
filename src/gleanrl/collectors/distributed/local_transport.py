"""Transport of batches, orders and answers between the owner process and its nodes.

A node on the owner's machine lends its memory: it collects into blocks that both processes map, and the owner copies
each batch once. Its orders and answers go through pipes, because a call of Ray takes ten times as long. All other nodes
use Ray calls and the object store.

A node *attends* its pipe during a Ray call, `CollectorActor.attend`. The call brings the weights, and its end reports
whether the node failed. The node carries out orders from the pipe until the owner tells it to leave, or until a second
has passed. Then other Ray calls of the actor can run.

Each Ray call with an order or request contains the number of pipe orders sent before it. The node first carries out
the pipe orders that are left. It therefore follows the order in which the owner sent everything.
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
"""Longest time of one `attend` call. Other Ray calls of the actor wait no longer than this, plus one batch."""
_LOOKS_S = 1.0
"""Interval of polling Ray references, in case Ray missed a notification."""


class Message(NamedTuple):
    """An order in a pipe, or its answer."""

    ticket: int
    """Number of the order; see `Line.give`."""
    value: Any


class PipeNames(NamedTuple):
    """The owner's ends of the pipes, as file descriptors in the node's process."""

    orders: int
    answers: int


class NodeEnd:
    """The node's side of the pipes."""

    def __init__(self) -> None:
        self._owned = Descriptors()
        orders, orders_far = self._owned.take(pipe())
        answers_far, answers = self._owned.take(pipe())
        self.names = PipeNames(orders_far, answers_far)
        self._end = WorkerEnd(orders, answers)
        self._poller = select.poll()
        self._poller.register(orders, select.POLLIN)
        self._left = 0
        self._pending: Message | None = None
        """An order that was read and has to wait for a Ray call."""

    def attend(self, attendance: int) -> Iterator[Message]:
        """Yield orders as they arrive, until told to leave, until a second has passed, or until the owner ended.

        Args:
            attendance: number of this call. If the owner has ended it already, nothing is yielded.
        """
        self._owned.close(*self.names)  # the owner has opened its own: the pipe ends with the owner
        deadline = Deadline(_ATTENDS_S)
        with suppress(ChannelClosed):
            while self._left < attendance:
                left = deadline.remaining()
                if not left or not (self._pending or self._poller.poll(math.ceil(left * 1000))):
                    return
                yield from self._next()

    def orders_before(self, count: int) -> Iterator[Message]:
        """Yield the orders that are left in the pipe, among the first `count` orders ever sent."""
        with suppress(ChannelClosed):
            while self._pending or self._poller.poll(0):
                for message in self._next():
                    if message.ticket >= count:
                        self._pending = message
                        return
                    yield message

    def _next(self) -> Iterator[Message]:
        """Yield the next message if it is an order. A number instead tells the node to leave that `attend` call."""
        found: Message | int | None = self._pending
        self._pending = None
        if found is None:
            self._end.next_code()
            found = pickle.loads(self._end.message())
        if isinstance(found, Message):
            yield found
        else:
            self._left = found

    def answer(self, answer: Message) -> None:
        """Send the answer of an order. No effect if the owner has ended.

        Raises:
            Exception: the answer can't be pickled. Nothing was sent.
        """
        with suppress(ChannelClosed):
            self._end.send(_dumped(answer))


class Line:
    """The owner's side of the pipes. Interrupts may come anywhere: repeated messages have no effect.

    Args:
        owned: owns the descriptors.
        process: process id of the node.
        names: descriptors of the pipes in the node's process.

    Raises:
        OSError: the process has no such pipes.
    """

    def __init__(self, owned: Descriptors, process: int, names: PipeNames) -> None:
        self._owned = owned
        (orders,) = owned.take(pipe_of(process, names.orders, os.O_WRONLY))
        (self.answers,) = owned.take(pipe_of(process, names.answers, os.O_RDONLY))
        self._end = OwnerEnd(self.answers, orders)
        self._num_sent = 0
        self._begun, self._left, self._noted = 0, 0, 0
        self._weights: Any = None
        self.attendance: Any = None
        """Ray's reference to the last `attend` call, until its end was recorded."""

    def attend(self, actor: Any, weights: Any = None) -> None:
        """Make a node attend its pipe, unless it does so already with the same weights.

        Args:
            actor: Ray handle of the node.
            weights: a `Published`; None for the weights of the last call.
        """
        weights = self._weights if weights is None else weights
        if self._noted == self._begun > self._left and weights == self._weights:
            return
        self.leave()
        self._begun += 1  # counted first: if an interrupt hides this call, the next one ends it
        self.attendance = actor.attend.remote(self._begun, weights)
        self._noted, self._weights = self._begun, weights

    def ended(self) -> None:
        """Record that the last `attend` call has ended."""
        self._left, self.attendance = max(self._left, self._noted), None

    def leave(self) -> int:
        """Tell the node to leave, so that the next Ray call need not wait for the end of its `attend` call.

        Returns:
            The number of orders sent through the pipe so far.
        """
        if self._begun > self._left:
            self._send(self._begun)
            self._left = self._begun
        else:
            self._finish()
        return self._num_sent

    def send_order(self, order: Any) -> int:
        """Send an order and return its ticket: orders are numbered from 0.

        An ended node raises no error here; the end of its `attend` call reports it.
        """
        ticket = self._num_sent
        self._num_sent += 1  # counted first: after an interrupt, no later order reuses the ticket
        self._send(Message(ticket, order))
        return ticket

    def _send(self, message: Any) -> None:
        self._finish()
        with suppress(ChannelClosed):  # the end of its `attend` call reports that the node ended
            self._end.send(_dumped(message))

    def _finish(self) -> None:
        with suppress(ChannelClosed):
            self._end.finish()

    def pull(self) -> None:
        """Read the available data of the pipe, which must be readable, for `first`."""
        self._end.pull()

    def first(self) -> Message | None:
        """Return the first answer that has arrived and was not dropped; None without one, or if the node has ended."""
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
    """Wait for lines and for Ray references at the same time.

    Callbacks of the references write to a pipe, which is polled together with the lines.

    Args:
        ray: the module `ray`.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._owned = Descriptors()
        self._reading, self._writing = self._owned.take(pipe())
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._watched: set[Any] = set()

    def wait(self, lines: Collection[Line], refs: Sequence[Any], seconds: float | None) -> list[Any]:
        """Wait until a line has data or a reference is ready. Return the ready references, perhaps none.

        With lines, the wait ends after at most one second.

        Args:
            lines: the lines. Their available data is read.
            refs: the references.
            seconds: how long to wait; None for no limit.
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
        """Register a callback for every new reference."""
        new = [ref for ref in refs if ref not in self._watched]
        self._watched = set(refs)
        for ref in new:
            ref.future().add_done_callback(self._ring)

    def _ring(self, _: Any = None) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the waiter wakes anyway
            os.write(self._writing, b".")

    def _there(self, refs: Sequence[Any]) -> list[Any]:
        """Return the ready references. If there are any, the next wait checks again at once."""
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
    """A received batch in foreign memory: read-only, and valid until the node's next order."""

    @abstractmethod
    def view(self) -> TensorDictBase:
        """Return the batch in its current memory, without a copy."""

    @abstractmethod
    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return a copy of the batch."""

    @abstractmethod
    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns in their current memory, and its ``device``."""


class StoredShare(NodeShare):
    """A batch in the object store.

    Args:
        arrived: the serialized batch.
    """

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived

    def view(self) -> TensorDictBase:
        """Return the batch in the object store's memory, without a copy."""
        batch: TensorDictBase = self._arrived.view()
        return batch

    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return a copy of the batch. `Arrived.open` provides its memory, so `pool` is not used."""
        batch: TensorDictBase = self._arrived.open()
        return batch

    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns in the object store's memory, and its ``device``."""
        batch = self.view()
        columns, size = [*flatten(batch).values()], batch.batch_size
        return Block(Schema.of(batch), size[:-1], size[-1], columns=columns, borrowed=True), batch.device


class SharedMemoryShare(NodeShare):
    """A batch in memory lent by its node.

    Args:
        block: the columns.
        device: the batch's ``device``.
    """

    def __init__(self, block: Block, device: torch.device | None) -> None:
        self._block, self._device = block, device

    def view(self) -> TensorDictBase:
        """Return the batch in the node's memory, without a copy."""
        batch: TensorDictBase = self._block.batch(None, self._device)
        return batch

    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return a copy of the batch."""
        batch: TensorDictBase = self._block.copied(pool).batch(None, self._device)
        return batch

    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns in the node's memory, and its ``device``."""
        return self._block, self._device


_MEMORY = "/memfd:gleanrl"
"""Prefix of the link target of a segment's descriptor in ``/proc``."""
_TOKEN_BYTES = 16


class Offer(NamedTuple):
    """The owner's offer to borrow memory, sent to a new node."""

    token: bytes
    """Random bytes, which the node writes into its memory. If the owner reads them back, both see the same memory."""
    num_blocks: int
    """How many batches the node may have lent at once."""

    @classmethod
    def of(cls, num_blocks: int) -> Offer:
        """Return an offer with a fresh token."""
        return cls(os.urandom(_TOKEN_BYTES), num_blocks)


class Name(NamedTuple):
    """Names of a node's lent memory and pipes, as process id and file descriptors."""

    process: int
    descriptor: int
    pipes: PipeNames


class MemoryLocation(NamedTuple):
    """Location of a batch in the memory of a node."""

    layout: bytes
    """The memory region and the batch's ``device``, pickled. Mostly equal to the last batch's, so the owner can skip
    the parsing."""
    block: int
    num_steps: int


class SharedBlockPool:
    """The node's side of lent memory: provides blocks to fill, as long as not all are lent.

    A block belongs to the owner from the answer that names it, until an order reports that its batch is no longer
    needed. No cleanup is needed: the kernel frees the memory when both processes have ended, even if they were killed.

    Args:
        offer: the owner's offer.

    Raises:
        CapacityError: the machine lacks the memory.
    """

    def __init__(self, offer: Offer) -> None:
        self._segment = SharedSegment(1)
        memoryview(self._segment.progress(0)).cast("B")[OWN * 8 : OWN * 8 + _TOKEN_BYTES] = offer.token
        self._num_blocks = offer.num_blocks
        self._region: Region | None = None
        self._blocks: list[Block] = []
        self._layout: bytes | None = None
        self._device: torch.device | None = None
        self._in_use: dict[int, int] = {}
        """Lent blocks, with the number of the order whose batch each one holds."""
        self._current = 0
        """The block that was last provided to be filled."""
        self.end = NodeEnd()
        """The node's side of the pipes."""

    @property
    def name(self) -> Name:
        """The names by which the owner opens the memory and the pipes."""
        return Name(os.getpid(), self._segment.descriptor, self.end.names)

    def reclaim(self, before: int) -> None:
        """Reclaim the blocks of all orders with numbers below `before`."""
        self._in_use = {block: number for block, number in self._in_use.items() if number >= before}

    def block(self, schema: Schema, batch_size: Sequence[int], num_steps: int) -> Block | None:
        """Return a block to fill. None if all are lent, memory is short, or the schema has object columns.

        Blocks of another layout can be made only while none is lent; until then the result is None. A block that is not
        lent is returned again by the next call.
        """
        free = next((number for number in range(self._num_blocks) if number not in self._in_use), None)
        if (
            free is None
            or schema.lists
            or not self._has_room(SharedRows(schema, torch.Size(batch_size), num_steps))
        ):
            return None
        self._current = free
        return self._blocks[free].leading(num_steps)

    def lend(self, order: int, batch: TensorDictBase) -> MemoryLocation | None:
        """Lend the block that holds a batch. A batch in other memory is copied into a block first.

        Args:
            order: number of the batch's order.
            batch: ``[*batch, T]``, on the CPU.

        Returns:
            The location; None if there is no block.
        """
        if not self._is_in_current_block(batch):
            leaves = flatten(batch)
            block = self.block(Schema.of(batch), batch.batch_size[:-1], batch.batch_size[-1])
            if block is None:
                return None
            copy_columns(block.columns, [*leaves.values()])
        self._in_use[self._current] = order
        if self._layout is None or self._device != batch.device:
            self._layout, self._device = pickle.dumps((self._region, batch.device)), batch.device
        return MemoryLocation(self._layout, self._current, batch.batch_size[-1])

    def _is_in_current_block(self, batch: TensorDictBase) -> bool:
        ids: torch.Tensor = batch.get(as_key(IDS))
        blocks = self._blocks
        return bool(blocks) and blocks[self._current].column(IDS).data_ptr() == ids.data_ptr()

    def _has_room(self, rows: SharedRows) -> bool:
        """Return whether the blocks fit such batches. If they don't and none is lent, they are laid out again."""
        now = self._region and self._region.rows
        if (
            now
            and (now.schema, now.batch_size) == (rows.schema, rows.batch_size)
            and now.num_steps >= rows.num_steps
        ):
            return True
        if self._in_use:
            return False
        try:
            self._region = region = self._segment.region("batches", rows, self._num_blocks)
        except CapacityError:
            return False
        self._blocks = [self._segment.block(region, number) for number in range(self._num_blocks)]
        self._layout = None
        return True


class NodeMemory:
    """The owner's side of lent memory: the memory of one node.

    Args:
        owned: owns the descriptor and closes it with this object. Borrowed batches stay readable.
        descriptor: the node's memory.
        line: the pipes to the node.
    """

    def __init__(self, owned: Descriptors, descriptor: int, line: Line) -> None:
        self._owned, self.line = owned, line
        self._segment = SharedSegment(1, descriptor)
        self._layout = b""
        self._blocks: list[Block] = []
        self._device: torch.device | None = None

    @classmethod
    def opened(cls, name: Name | None, offer: Offer) -> NodeMemory | None:
        """Open a node's memory. None if it has none, or if it is on another machine and can't be opened.

        The checks guard against another process with the node's process id. The node may run on another machine, or it
        may have ended and its id been reused.
        """
        if name is None:
            return None
        path = f"/proc/{name.process}/fd/{name.descriptor}"
        try:
            if not os.readlink(path).startswith(_MEMORY):
                return None
            owned = Descriptors()
            (descriptor,) = owned.take(memory_of(name.process, name.descriptor))
            if os.pread(descriptor, _TOKEN_BYTES, OWN * 8) != offer.token:
                return None  # another process with this id: the node is elsewhere, or has ended
            line = Line(owned, name.process, name.pipes)
            if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return None  # the node ended meanwhile, and another process got its id
            return cls(owned, descriptor, line)
        except (OSError, CapacityError):
            return None

    def share(self, location: MemoryLocation) -> SharedMemoryShare:
        """Return the batch at a location that the node reported."""
        if location.layout != self._layout:
            region, self._device = pickle.loads(location.layout)
            self._blocks = [self._segment.block(region, number) for number in range(region.num_blocks)]
            self._layout = location.layout
        return SharedMemoryShare(self._blocks[location.block].leading(location.num_steps), self._device)
