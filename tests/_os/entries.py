"""Entry point of the processes that tests of the fork server start. Orders arrive through a pipe."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Sequence

from gleanrl._os import fork_server
from gleanrl._os.files import Descriptors, pipe

ENTRY = "tests._os.entries:run"
READ, STAY, NEST, DIE, RAISE = b"r", b"s", b"n", b"d", b"e"


def run(link: socket.socket, descriptors: Sequence[int]) -> int:
    """Run the order that arrives as one byte through the first descriptor; a digit is the exit code."""
    orders, answers = descriptors
    order = os.read(orders, 1)
    if order == READ:
        found = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "own": [orders, answers, link.fileno()],
            "descriptors": open_descriptors(),
        }
        os.write(answers, json.dumps(found).encode())
        return 0
    if order == STAY:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    if order == NEST:
        fork_server.adopt(link)
        held = Descriptors()
        mine, theirs = held.take(pipe())
        started = fork_server.current(ENTRY, ()).start([mine, answers], held)
        os.write(theirs, STAY)
        os.write(answers, str(started.pid).encode())
        threading.Event().wait()
    if order == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == RAISE:
        raise SystemExit("no number")
    return int(order)


def open_descriptors() -> list[int]:
    """Return the open descriptors of this process."""
    folder = os.open("/proc/self/fd", os.O_RDONLY)
    found = [int(name) for name in os.listdir(folder)]
    os.close(folder)
    return [number for number in found if number != folder and exists(number)]


def exists(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
