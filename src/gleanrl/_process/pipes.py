"""What crosses the two pipes between an owner and a worker.

A signal is one byte of the sender's choice, but for two: `MESSAGE` is followed by a length and so many bytes, and
`DONE` answers a signal. Nothing else is ever in a pipe, so that a reader always knows what comes next.

The owner's end may be interrupted anywhere, by Ctrl-C say, and still knows what comes next: bytes go from the
pipe into the inbox within one call of C code, and leave it as whole answers.
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
"""How many bytes are read at once, as a sequence to map over."""

_UNPICKLABLE = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError, ImportError)
"""What pickling raises; what else is raised meanwhile, by a signal handler say, isn't about the value."""


class ChannelClosed(Exception):
    """The other side closed its end, or ended."""


class ChannelFull(Exception):
    """The worker didn't take a message in time."""


def encode(value: object) -> bytes:
    """Return the bytes of `value`; objects of the main module and lambdas travel by value.

    Raises:
        WorkerError: if it can't be pickled.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except _UNPICKLABLE as cause:
        raise WorkerError(f"{value!r:.200} can't be sent between processes: {cause}") from cause
    return data


def decode(data: bytes) -> object:
    """Return what `encode` was given."""
    value: object = cloudpickle.loads(data)
    return value


class WorkerEnd:
    """The worker's end: it waits in the kernel, for as long as it takes.

    Args:
        reading: descriptor to read from.
        writing: descriptor to write to.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing

    def next_code(self) -> bytes:
        """Return the byte that comes next, waiting for it.

        Raises:
            ChannelClosed: if the owner is gone.
        """
        code = os.read(self.reading, 1)
        if not code:
            raise ChannelClosed
        return code

    def message(self) -> bytes:
        """Return the message whose code was read.

        Raises:
            ChannelClosed: if it breaks off.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            taken = os.readv(self.reading, [rest])
            if not taken:
                raise ChannelClosed
            rest = rest[taken:]
        return bytes(data)

    def send(self, data: bytes) -> None:
        """Send a message.

        Raises:
            ChannelClosed: if the owner is gone.
        """
        rest = memoryview(_framed(data))
        try:
            while rest:
                rest = rest[os.write(self.writing, rest) :]
        except BrokenPipeError as cause:
            raise ChannelClosed from cause


class OwnerEnd:
    """The owner's end: it never waits without a deadline. One thread at a time.

    Args:
        reading: descriptor to read from.
        writing: descriptor to write to.

    Attributes:
        inbox: what was read and isn't taken yet, in pieces; an empty piece is the end.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        os.set_blocking(writing, False)
        self.inbox: list[bytes] = []
        self._outgoing: tuple[memoryview, list[int]] = (memoryview(b""), [])

    def pull(self) -> None:
        """Move what stands in the pipe into the inbox; the pipe is readable."""
        self.inbox.extend(map(os.read, (self.reading,), PIECE))

    @property
    def has_ended(self) -> bool:
        """Whether the worker's end was found closed; what came before may still be taken."""
        return bool(self.inbox) and not self.inbox[-1]

    def take(self) -> tuple[bytes, bytes] | None:
        """Return `first`, and drop it."""
        found = self.first()
        if found is not None:
            self.drop()
        return found

    def first(self) -> tuple[bytes, bytes] | None:
        """Return the next whole answer of the inbox as ``(code, message)``, or None if there is none yet.

        Raises:
            ChannelClosed: if the worker's end was closed and nothing whole is left.
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
        """Take the answer that `first` returned out of the inbox."""
        inbox = self.inbox
        data = b"".join(inbox)
        end = [b""] if self.has_ended else []
        inbox[:] = [piece for piece in (data[_size(self._start()) :],) if piece] + end

    def _start(self) -> bytes:
        """Return the first bytes of the inbox, those of a message's head if they are there."""
        start = b""
        for piece in self.inbox:
            start += piece[:_HEAD]
            if len(start) >= _HEAD:
                break
        return start[:_HEAD]

    def send(self, data: bytes, deadline: Deadline | None = None) -> None:
        """Send a message. Where an interrupt leaves a part of it in the pipe, `finish` has to come next.

        Args:
            data: its bytes.
            deadline: by when the worker must have taken it; None for never.

        Raises:
            ChannelClosed: if the worker is gone.
            ChannelFull: if the deadline passed.
        """
        self._outgoing = memoryview(_framed(data)), []
        self._push(deadline)

    def finish(self, deadline: Deadline | None = None) -> None:
        """Send the rest of the last message if a part of it is in the pipe, where nothing else could follow it.

        Raises:
            ChannelClosed: if the worker is gone.
            ChannelFull: if the deadline passed.
        """
        if self._outgoing[1]:
            self._push(deadline)

    @property
    def is_midway(self) -> bool:
        """Whether a part of the last message is in the pipe, and not all of it."""
        message, written = self._outgoing
        return 0 < sum(written) < len(message)

    def _push(self, deadline: Deadline | None) -> None:
        message, written = self._outgoing
        while (done := sum(written)) < len(message):
            try:  # written and counted within one call of C code
                written.extend(map(os.write, (self.writing,), (message[done:],)))
            except BlockingIOError:
                _wait_to_write(self.writing, deadline)
            except BrokenPipeError as cause:
                raise ChannelClosed from cause


def _framed(data: bytes) -> bytes:
    return MESSAGE + _LENGTH.pack(len(data)) + data


def _size(start: bytes) -> int:
    """Return the size of the answer that begins with `start`; of its head if that isn't there yet."""
    if start[:1] != MESSAGE:
        return 1
    return _HEAD if len(start) < _HEAD else _HEAD + int(_LENGTH.unpack_from(start, 1)[0])


def _wait_to_write(descriptor: int, deadline: Deadline | None) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    left = None if deadline is None else deadline.remaining()
    if not poller.poll(None if left is None else left * 1000):
        raise ChannelFull
