"""Processes for workers: asked for here, forked by the launcher (see `launch_server`).

There is one launcher for a program, started with the first worker and kept for the next ones; it ends with the
program, however that ends. A worker asks the same launcher for workers of its own. Any thread may start workers;
a program that forks gets a launcher of its own in the child.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from gleanrl.system.clock import Deadline
from gleanrl.system.launch_server import MOST_BYTES

_CODE = "import sys; from gleanrl.system.launch_server import main; main(sys.argv[1:])"
_READY_S = 120.0  # importing torch from a cold disk
_ANSWER_S = 30.0


class LaunchError(OSError):
    """The launcher can't be started, or has ended."""


class Started(NamedTuple):
    """A process that was started."""

    pid: int
    descriptor: int
    """Its pidfd: readable once the process has ended; whoever asked for it closes it."""


class Launcher:
    """The way to one launcher process.

    Args:
        link: a socket to it.
        process: the launcher, if this process started it; None in a worker.
    """

    def __init__(self, link: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._link, self._process = link, process
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self.owner = os.getpid()
        self._end = weakref.finalize(self, _end, link, process, self.owner)

    def start(self, descriptors: Sequence[int]) -> Started:
        """Start a worker; it gets copies of `descriptors`.

        Raises:
            LaunchError: if the launcher has ended, or doesn't answer.
        """
        with self._lock:
            try:
                socket.send_fds(self._link, [b"start"], list(descriptors))
                words, received = self._packet(Deadline(_ANSWER_S))
            except OSError as cause:
                raise LaunchError(f"the process that starts workers has ended: {cause}") from cause
        return Started(int(words[1]), received[0])

    def exit_code(self, pid: int, deadline: Deadline) -> int | None:
        """Return the exit code of a process that was started here, negative for a signal; None if it's not known.

        Args:
            pid: the process, which has ended.
            deadline: how long to wait for the launcher's word.
        """
        with self._lock:
            with suppress(OSError):
                while pid not in self._codes:
                    self._packet(deadline, only_notices=True)
            return self._codes.pop(pid, None)

    @property
    def is_alive(self) -> bool:
        """Whether the launcher process lives, as far as this process can tell."""
        return self._process is None or self._process.poll() is None

    def close(self) -> None:
        """End the launcher and everything that it started."""
        self._end()

    def _packet(self, deadline: Deadline, only_notices: bool = False) -> tuple[list[str], list[int]]:
        """Return the next answer, keeping the notices that come before it, or after one notice if only those."""
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        while True:
            left = deadline.remaining()
            if not poller.poll(None if left is None else left * 1000):
                raise LaunchError("the process that starts workers doesn't answer")
            data, received, _, _ = socket.recv_fds(self._link, MOST_BYTES, 1)
            if not data:
                raise LaunchError("the connection to it was closed")
            words = data.decode().split()
            if words[0] != "exited":
                return words, received
            self._codes[int(words[1])] = int(words[2])
            if only_notices:
                return words, received


def _end(link: socket.socket, process: subprocess.Popen[bytes] | None, owner: int) -> None:
    link.close()
    if process is None:
        return
    if os.getpid() != owner:  # a fork of the program: the launcher isn't its own
        process.returncode = 0  # so that nobody complains that it's still running
    else:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_current: Launcher | None = None
_lock = threading.Lock()


def current(entry: str, preload: Sequence[str]) -> Launcher:
    """Return the program's launcher; it's started if there is none yet, or it has ended.

    Args:
        entry: ``module:function`` that workers run (see `launch_server.Entry`).
        preload: modules that the launcher imports before it forks anything.

    Raises:
        LaunchError: if it can't be started; the message holds what an import raised.
    """
    global _current
    with _lock:
        if _current is None or _current.owner != os.getpid() or not _current.is_alive:
            if _current is not None:
                _current.close()
            _current = _launch(entry, preload)
        return _current


def adopt(link: socket.socket) -> None:
    """Use the launcher at the other end of `link`, which forked this worker, for workers of its own."""
    global _current
    _current = Launcher(link, None)


def shut_down() -> None:
    """End the program's launcher, if there is one; the next worker gets a new one."""
    global _current
    with _lock:
        if _current is not None:
            _current.close()
        _current = None


def _launch(entry: str, preload: Sequence[str]) -> Launcher:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = {
        "control": theirs.fileno(),
        "owner": os.getpid(),
        "entry": entry,
        "preload": list(preload),
        "path": sys.path,
    }
    try:
        # A session of its own: Ctrl-C goes to the user's program alone, which ends the workers.
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(given)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # or its threads would be forked
        )
    finally:
        theirs.close()
    launcher = Launcher(mine, process)
    try:
        words = _first_words(mine)
    except BaseException:
        process.kill()
        launcher.close()
        raise
    if words != "ready":
        launcher.close()
        raise LaunchError(f"the process that starts workers couldn't be prepared: {words}")
    return launcher


def _first_words(link: socket.socket) -> str:
    poller = select.poll()
    poller.register(link, select.POLLIN)
    if not poller.poll(_READY_S * 1000):
        raise LaunchError(f"the process that starts workers wasn't ready after {_READY_S:.0f} s")
    return link.recv(MOST_BYTES).decode() or "it ended at once"
