"""The fork server (the launcher): a process without threads that has imported the workers' modules and forks workers.

Forked workers start in milliseconds. They contain nothing of the user's program: neither its main module nor its
threads. All workers are children of the launcher, including the workers of workers. The launcher

- reaps ended processes, and reports their exit codes on request,
- kills the children of a worker that ended,
- kills all workers when the owner has ended, for any reason. If the launcher itself is killed, the kernel kills them.

A request and an answer are one packet each. The client numbers its requests, so that an answer whose reader was
interrupted is never taken for the next one. A request to start a process carries the worker's descriptors; its answer
is the process's number and a pidfd. A request with the number of an ended process is answered by its exit code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

REQUEST = struct.Struct("<QQ")
"""A request: its number, from 1, and `START` or the number of a process."""
START = 0
ANSWER = struct.Struct("<Qq")
"""An answer: the number of its request, and the number or the exit code of a process."""
UNKNOWN = 1 << 32
"""The answer for an unknown exit code."""
MOST_BYTES = 1 << 16
"""Size of the longest packet: the error that kept the launcher from starting."""
MOST_DESCRIPTORS = 16
"""Most descriptors of a request."""

_PR_SET_PDEATHSIG = 1
_MOST_CODES = 1024

Entry = Callable[[socket.socket, Sequence[int]], int]
"""The function that a worker runs. It receives a socket to the launcher and the descriptors, and returns the exit
code.
"""


def main(arguments: Sequence[str]) -> None:
    """Run the launcher until its owner ends.

    Args:
        arguments: one JSON object with the following keys.
            `control`: the descriptor of a socket to the owner.
            `owner`: the owner's process number.
            `entry`: ``module:function`` that a worker runs.
            `preload`: the modules to import first.
    """
    config = json.loads(arguments[0])
    control = socket.socket(fileno=config["control"])
    if not _ends_with(control, True):
        return
    try:
        owner = os.pidfd_open(config["owner"])
        for name in config["preload"]:
            importlib.import_module(name)
        module, function = config["entry"].split(":")
        entry = getattr(importlib.import_module(module), function)
    except BaseException:
        _ends_with(control, False)
        with suppress(BrokenPipeError):
            control.send(b"failed " + traceback.format_exc().encode()[-MOST_BYTES // 2 :])
        return
    gc.collect()
    # Imported objects are never garbage. A collection in a worker would write to their pages, and so copy them.
    gc.freeze()
    _ends_with(control, False)
    try:
        control.send(b"ready")
    except BrokenPipeError:  # the start was interrupted at this moment
        return
    _Launcher(control, owner, entry).serve()


def _ends_with(control: socket.socket, wanted: bool) -> bool:
    """Set whether the kernel ends this process, in any line, when the owner closes its socket; return if it is open.

    The owner closes it if its start of the launcher is interrupted (Ctrl-C). The imports, which take seconds, would
    otherwise continue, and write to the terminal of a program that has ended.
    """
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    # The kernel sends SIGIO, which ends a process without a handler. The owner sends nothing before it has an answer.
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC if wanted else flags & ~os.O_ASYNC)
    poller = select.poll()
    poller.register(control, 0)  # a poll always reports POLLHUP
    return not poller.poll(0)


class _Client:
    """A process that may request workers: the owner, or a worker.

    Args:
        link: the socket to the process.
        pid: its process number; None for the owner.
    """

    def __init__(self, link: socket.socket, pid: int | None) -> None:
        self.link, self.pid = link, pid
        self.children: set[int] = set()
        self.codes: dict[int, int] = {}

    def ended(self, pid: int, code: int) -> None:
        """Record how a child ended. The last 1,024 exit codes are kept."""
        self.children.discard(pid)
        self.codes[pid] = code
        if len(self.codes) > _MOST_CODES:
            del self.codes[next(iter(self.codes))]

    def answer(self, number: int, value: int, descriptors: Sequence[int] = ()) -> None:
        """Send an answer. It is lost if the client doesn't read: the launcher never blocks on one client."""
        with suppress(OSError):
            socket.send_fds(self.link, [ANSWER.pack(number, value)], descriptors)


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
        """Serve requests until the owner ends or closes its socket."""
        try:
            self._serve()
        finally:  # The wakeup descriptor is about to be closed, so signals must not write to it any more.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._close_links()

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
        # On the socket itself, because Python 3.11 ignores the flags of recv_fds and send_fds.
        client.link.setblocking(False)
        self._clients[client.link.fileno()] = client
        self._poller.register(client.link, select.POLLIN)

    def _remove(self, client: _Client) -> None:
        self._poller.unregister(client.link)
        del self._clients[client.link.fileno()]
        client.link.close()

    def _answer(self, client: _Client) -> bool:
        """Serve one request; return whether the launcher is still needed.

        An empty packet means that the client has closed its socket, so its children are killed. The launcher ends with
        its owner.
        """
        try:
            request, descriptors, _, _ = socket.recv_fds(client.link, REQUEST.size, MOST_DESCRIPTORS)
        except BlockingIOError:  # The poll result was for an earlier client with the same descriptor number.
            return True
        except OSError:
            request, descriptors = b"", []
        if request:
            number, command = REQUEST.unpack(request)
            if command == START:
                self._start(client, number, descriptors)
            else:
                self._reap()
                # After `_reap`, because the process may have ended after the last signal was handled.
                client.answer(number, client.codes.get(command, UNKNOWN))
            return True
        self._kill_children(client)
        self._remove(client)
        return client.pid is not None

    def _start(self, client: _Client, number: int, descriptors: list[int]) -> None:
        own_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_worker(parent, own_end, worker_end, descriptors)
        worker_end.close()
        for descriptor in descriptors:
            os.close(descriptor)
        client.children.add(pid)
        # The number may belong to an earlier child, whose exit code is obsolete.
        client.codes.pop(pid, None)
        self._add(_Client(own_end, pid))
        process = os.pidfd_open(pid)
        client.answer(number, pid, [process])
        os.close(process)

    def _run_worker(
        self, parent: int, own_end: socket.socket, worker_end: socket.socket, descriptors: Sequence[int]
    ) -> None:
        """Run the entry in a forked child; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent)
            os.close(self._owner)
            own_end.close()
            self._close_links()
            gc.enable()
            code = self._entry(worker_end, descriptors)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _close_links(self) -> None:
        for link in [*self._own, *(client.link for client in self._clients.values())]:
            link.close()

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
                    client.ended(pid, os.waitstatus_to_exitcode(status))

    def _kill_children(self, client: _Client) -> None:
        for pid in client.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, even in the middle of native code.

    Args:
        parent: the parent's process number, taken before the fork, because the parent may end before the child first
            runs.
    """
    library: Any = ctypes.CDLL(None)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent ended before the kernel accepted the request.
        os._exit(1)


def dump_stacks_into(descriptor: int) -> None:
    """Write the Python stacks of this process to `descriptor` at a native crash and at each SIGUSR1."""
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, descriptor)
