"""Open descriptors with an owner: none is lost, and none is closed twice, wherever an interrupt comes.

Python runs signal handlers between its instructions, never inside a call of C code. So a descriptor goes within one
such call from what opens it to its owner, and within another from its owner to what closes it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat, starmap
from operator import itemgetter
from pathlib import Path

_ONE = socket.CMSG_SPACE(4)


class Descriptors:
    """Descriptors that one owner opened; they are closed with it at the latest. One thread at a time."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def take(self, opened: Iterator[int]) -> list[int]:
        """Own what `opened` yields, which is made of C code alone (see the functions below); return it."""
        before = len(self._open)
        self._open.extend(opened)
        return self._open[before:]

    def close(self, *some: int) -> None:
        """Close some of them, or all; those that were closed already are left alone."""
        owned = self._open
        places = [owned.index(one) for one in some if one in owned] if some else range(len(owned))
        deque(map(os.close, map(owned.pop, sorted(places, reverse=True))), 0)

    def __del__(self) -> None:
        """Close what is still open."""
        if hasattr(self, "_open"):  # an interrupt may have come before there was anything
            self.close()


def file(path: Path | str, flags: int) -> Iterator[int]:
    """Yield an open file; a new one may be read and written by everybody that the process's mask lets."""
    return map(os.open, (path,), (flags | os.O_CLOEXEC,), (0o666,))


def pipe() -> Iterator[int]:
    """Yield the end to read from and the end to write to of a new pipe."""
    return chain.from_iterable(starmap(os.pipe, repeat((), 1)))


def memory(name: str) -> Iterator[int]:
    """Yield new anonymous memory; `name` is shown among the open files of a process."""
    return map(os.memfd_create, (name,), (os.MFD_CLOEXEC,))


def memory_of(process: int, descriptor: int) -> Iterator[int]:
    """Yield memory that another process of this machine has open; `OSError` if it hasn't, or doesn't let us."""
    return map(os.open, (f"/proc/{process}/fd/{descriptor}",), (os.O_RDWR | os.O_CLOEXEC,))


def pipe_of(process: int, descriptor: int, end: int) -> Iterator[int]:
    """Yield an end, `os.O_RDONLY` or `os.O_WRONLY`, of a pipe that another process has open; `OSError` if it hasn't."""
    # A pipe whose other end nobody has would be waited for.
    return map(os.open, (f"/proc/{process}/fd/{descriptor}",), (end | os.O_NONBLOCK | os.O_CLOEXEC,))


def sent_over(link: socket.socket, packet: bytearray) -> Iterator[int]:
    """Read one packet of `link` into `packet`; yield the descriptor that came with it, if one did."""
    received = starmap(link.recvmsg_into, [([packet], _ONE, socket.MSG_CMSG_CLOEXEC)])
    attached = chain.from_iterable(map(itemgetter(1), received))
    return map(int.from_bytes, map(itemgetter(2), attached), repeat(sys.byteorder))
