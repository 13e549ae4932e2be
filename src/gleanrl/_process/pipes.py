"""The protocol on the two pipes between an owner and a worker.

A signal is one byte, chosen by the sender, except for two reserved ones. `MESSAGE` is followed by a length and that
many bytes. `DONE` answers a signal. Nothing else is ever in a pipe, so that a reader can always parse the next bytes.

An interrupt (for example Ctrl-C) may come anywhere at the owner's end, and the owner can still parse the next bytes.
One call of C code moves bytes from the pipe into the inbox. They leave the inbox only as whole answers.
"""

from __future__ import annotations

import os
import pickle
import select
import struct

import cloudpickle

from gleanrl._os.clock import Deadline
from gleanrl.errors import WorkerError

MESSAGE = b"m"
DONE = b"."
_LENGTH = struct.Struct("<Q")
_HEAD = len(MESSAGE) + _LENGTH.size
PIECE = (1 << 16,)
"""The most bytes of one read, as a sequence for `map`."""

_UNPICKLABLE = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError, ImportError)
"""The errors of pickling. Other errors during pickling come from elsewhere, for example from a signal handler."""


class ChannelClosed(Exception):
    """The other side closed its end, or its process ended."""


class ChannelFull(Exception):
    """The worker didn't read a message in time."""


def encode(value: object) -> bytes:
    """Return the pickled bytes of `value`. Objects of the main module and lambdas are pickled by value.

    Raises:
        WorkerError: `value` can't be pickled.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except _UNPICKLABLE as cause:
        raise WorkerError(f"{value!r:.200} can't be sent between processes: {cause}") from cause
    return data


def decode(data: bytes) -> object:
    """Return the value that `encode` pickled."""
    value: object = cloudpickle.loads(data)
    return value


class WorkerEnd:
    """The worker's end. Its calls block in the kernel without a time limit.

    Args:
        reading: descriptor to read from.
        writing: descriptor to write to.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing

    def next_code(self) -> bytes:
        """Wait for the next byte and return it.

        Raises:
            ChannelClosed: the owner has ended, or closed the pipe.
        """
        code = os.read(self.reading, 1)
        if not code:
            raise ChannelClosed
        return code

    def message(self) -> bytes:
        """Return the message after a `MESSAGE` byte.

        Raises:
            ChannelClosed: the pipe was closed before the end of the message.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            received = os.readv(self.reading, [rest])
            if not received:
                raise ChannelClosed
            rest = rest[received:]
        return bytes(data)

    def send(self, data: bytes) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the owner has ended, or closed the pipe.
        """
        rest = memoryview(_framed(data))
        try:
            while rest:
                rest = rest[os.write(self.writing, rest) :]
        except BrokenPipeError as cause:
            raise ChannelClosed from cause


class OwnerEnd:
    """The owner's end. For one thread at a time. The constructor makes `writing` non-blocking.

    Args:
        reading: descriptor to read from.
        writing: descriptor to write to.

    Attributes:
        inbox: the bytes that were read and not yet taken, in pieces. An empty piece marks the end.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        os.set_blocking(writing, False)
        self.inbox: list[bytes] = []
        self._outgoing: tuple[memoryview, list[int]] = (memoryview(b""), [])

    def pull(self) -> None:
        """Move bytes from the pipe into the inbox. The pipe must be readable, or the call blocks."""
        self.inbox.extend(map(os.read, (self.reading,), PIECE))

    @property
    def has_ended(self) -> bool:
        """Whether the worker's end was found closed. Earlier answers may still be in the inbox."""
        return bool(self.inbox) and not self.inbox[-1]

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the next whole answer, and remove it from the inbox; see `first`, also for its error."""
        found = self.first()
        if found is not None:
            self.drop()
        return found

    def first(self) -> tuple[bytes, bytes] | None:
        """Return the next whole answer of the inbox as ``(code, message)``, or None if it hasn't arrived.

        Raises:
            ChannelClosed: the worker's end was closed, and no whole answer is left.
        """
        inbox = self.inbox
        start = self._start()
        size = _size(start)
        if not start or sum(map(len, inbox)) < size:
            if self.has_ended:
                raise ChannelClosed
            return None
        data = inbox[0] if len(inbox[0]) >= size else b"".join(inbox)
        return data[:1], data[_HEAD:size]

    def drop(self) -> None:
        """Remove the answer that `first` returned from the inbox; call it only after `first` has returned one."""
        inbox = self.inbox
        data = b"".join(inbox)
        end = [b""] if self.has_ended else []
        inbox[:] = [piece for piece in (data[_size(self._start()) :],) if piece] + end

    def _start(self) -> bytes:
        """Return the first bytes of the inbox, at most as many as a message's head has."""
        start = b""
        for piece in self.inbox:
            start += piece[:_HEAD]
            if len(start) >= _HEAD:
                break
        return start[:_HEAD]

    def send(self, data: bytes, deadline: Deadline | None = None) -> None:
        """Send a message. If an interrupt leaves a part of it in the pipe, the caller must call `finish` next.

        Args:
            data: its bytes.
            deadline: the time by which the worker must have read it; None for no limit.

        Raises:
            ChannelClosed: the worker has ended.
            ChannelFull: the deadline passed. A part of the message may be in the pipe then (see `is_midway`).
        """
        self._outgoing = memoryview(_framed(data)), []
        self._push(deadline)

    def finish(self, deadline: Deadline | None = None) -> None:
        """Send the rest of the last message if a part of it is in the pipe.

        No other bytes may follow the part, because the worker would read them as the message.

        Raises:
            ChannelClosed: the worker has ended.
            ChannelFull: the deadline passed; the rest is still missing.
        """
        if self._outgoing[1]:
            self._push(deadline)

    @property
    def is_midway(self) -> bool:
        """Whether the last message is in the pipe only in part."""
        message, written = self._outgoing
        return 0 < sum(written) < len(message)

    def _push(self, deadline: Deadline | None) -> None:
        message, written = self._outgoing
        while (done := sum(written)) < len(message):
            try:  # One call of C code writes and counts, so that an interrupt can't separate the two.
                written.extend(map(os.write, (self.writing,), (message[done:],)))
            except BlockingIOError:
                _wait_to_write(self.writing, deadline)
            except BrokenPipeError as cause:
                raise ChannelClosed from cause


def _framed(data: bytes) -> bytes:
    return MESSAGE + _LENGTH.pack(len(data)) + data


def _size(start: bytes) -> int:
    """Return the size of the answer that begins with `start`. If the head is incomplete, return the head's size."""
    if start[:1] != MESSAGE:
        return 1
    return _HEAD if len(start) < _HEAD else _HEAD + int(_LENGTH.unpack_from(start, 1)[0])


def _wait_to_write(descriptor: int, deadline: Deadline | None) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    left = None if deadline is None else deadline.remaining()
    if not poller.poll(None if left is None else left * 1000):
        raise ChannelFull
