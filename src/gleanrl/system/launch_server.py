"""The launcher's side of `launcher`: a process without threads that has imported what workers need and forks them.

Forked workers start in milliseconds, with nothing of the user's program in them: neither its main module nor its
threads. Everything that is started, workers of workers included, is a child of the launcher, which

- tells whoever asked for a process when and how it ended, so that nothing is left as a zombie,
- kills the processes of a worker that ended, and all of them when their owner has ended, however it ended: the
  kernel kills them should the launcher itself be killed.

Requests and notices are one packet each: ``start`` with the descriptors that the worker gets, answered by ``started
<pid>`` with a descriptor of the process; ``exited <pid> <code>`` whenever it ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

MOST_BYTES = 1 << 16
"""Size of the longest packet."""
MOST_DESCRIPTORS = 16
"""Descriptors that a request carries at most."""

_PR_SET_PDEATHSIG = 1

Entry = Callable[[socket.socket, Sequence[int]], int]
"""What a worker runs: gets a socket to the launcher and the descriptors; returns the exit code."""


def main(arguments: Sequence[str]) -> None:
    """Be the launcher, until its owner ends.

    Args:
        arguments: one JSON object: `control` (the descriptor of a socket to the owner), `owner` (its process
            number), `entry` (``module:function`` that a worker runs), `preload` (modules to import first) and
            `path` (`sys.path`).
    """
    given = json.loads(arguments[0])
    sys.path[:] = given["path"]
    control = socket.socket(fileno=given["control"])
    try:
        owner = os.pidfd_open(given["owner"])
        for name in given["preload"]:
            importlib.import_module(name)
        module, function = given["entry"].split(":")
        entry = getattr(importlib.import_module(module), function)
    except BaseException:
        control.send(b"failed " + traceback.format_exc().encode()[-MOST_BYTES // 2 :])
        return
    gc.collect()
    gc.freeze()  # what was imported is never garbage: collections would only copy its pages
    control.send(b"ready")
    _Launcher(control, owner, entry).serve()


class _Client:
    """Who may ask for processes: the owner, or a worker.

    Args:
        link: the socket to it.
        pid: its process number; None for the owner.
    """

    def __init__(self, link: socket.socket, pid: int | None) -> None:
        self.link, self.pid = link, pid
        self.children: set[int] = set()

    def tell(self, text: str, descriptors: Sequence[int] = ()) -> None:
        """Send a packet; one that nobody takes is lost: the launcher waits for nobody."""
        with suppress(OSError):
            socket.send_fds(self.link, [text.encode()], descriptors, socket.MSG_DONTWAIT)


class _Launcher:
    def __init__(self, control: socket.socket, owner: int, entry: Entry) -> None:
        self._owner, self._entry = owner, entry
        self._wake, wake = socket.socketpair()
        self._wake.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._own = [wake, self._wake]
        self._poller = select.poll()
        for descriptor in (owner, self._wake.fileno()):
            self._poller.register(descriptor, select.POLLIN)
        self._clients: dict[int, _Client] = {}
        self._add(_Client(control, None))

    def serve(self) -> None:
        try:
            self._serve()
        finally:  # workers that end from now on have nobody to tell, and the descriptor to wake up is about to go
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _serve(self) -> None:
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor == self._owner:
                    return
                if descriptor == self._wake.fileno():
                    with suppress(BlockingIOError):
                        self._wake.recv(4096)
                    self._reap()
                elif descriptor in self._clients and not self._answer(self._clients[descriptor]):
                    return

    def _add(self, client: _Client) -> None:
        self._clients[client.link.fileno()] = client
        self._poller.register(client.link, select.POLLIN)

    def _remove(self, client: _Client) -> None:
        self._poller.unregister(client.link)
        del self._clients[client.link.fileno()]
        client.link.close()

    def _answer(self, client: _Client) -> bool:
        """Take a request; return whether the launcher is still needed."""
        try:
            request, descriptors, _, _ = socket.recv_fds(
                client.link, MOST_BYTES, MOST_DESCRIPTORS, socket.MSG_DONTWAIT
            )
        except BlockingIOError:  # a number that was used again within one round
            return True
        except OSError:
            request, descriptors = b"", []
        if request == b"start":
            self._start(client, descriptors)
            return True
        self._kill_children(client)
        self._remove(client)
        return client.pid is not None

    def _start(self, client: _Client, descriptors: list[int]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_worker(parent, mine, theirs, descriptors)
        theirs.close()
        for descriptor in descriptors:
            os.close(descriptor)
        client.children.add(pid)
        self._add(_Client(mine, pid))
        process = os.pidfd_open(pid)
        client.tell(f"started {pid}", [process])
        os.close(process)

    def _be_worker(
        self, parent: int, mine: socket.socket, theirs: socket.socket, descriptors: Sequence[int]
    ) -> None:
        """Run the entry in a fresh child; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent)
            os.close(self._owner)
            mine.close()
            for link in [*self._own, *(client.link for client in self._clients.values())]:
                link.close()
            gc.enable()
            code = self._entry(theirs, descriptors)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for client in list(self._clients.values()):
                if client.pid == pid:
                    self._kill_children(client)
                    self._remove(client)
                elif pid in client.children:
                    client.children.discard(pid)
                    client.tell(f"exited {pid} {os.waitstatus_to_exitcode(status)}")

    def _kill_children(self, client: _Client) -> None:
        for pid in client.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, also in the middle of native code.

    Args:
        parent: its process number, known from before the fork: the child may run for the first time when the
            parent is gone.
    """
    library: Any = ctypes.CDLL(None)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def dump_stacks_into(descriptor: int) -> None:
    """Write the Python stacks of this process into `descriptor` at a native crash and at every SIGUSR1."""
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, descriptor)
