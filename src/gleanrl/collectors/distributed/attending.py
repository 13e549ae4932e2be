"""Orders and answers through pipes, for nodes on their owner's machine: a call of Ray takes ten times as long.

A node *attends* in a call of Ray, which brings it the weights, and whose end tells what became of it. Meanwhile it
carries out what comes through its pipe, until it's told to leave or a while has passed: other calls have their turn
then. Each says how many orders were given before it, and those that are left in the pipe come first: whichever way they
take, a node carries out its owner's orders and requests in their sequence.
"""

from __future__ import annotations

import math
import os
import pickle
import select
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle

from gleanrl.system.clock import Deadline
from gleanrl.system.descriptors import Descriptors, pipe, pipe_of
from gleanrl.workers.channel import ChannelClosed, OwnerEnd, WorkerEnd

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
