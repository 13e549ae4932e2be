"""The client of the fork server (the launcher), which starts all worker processes; see `fork_server_main`.

A program has one launcher. It starts with the first worker, serves all later ones, and ends with the program in any
case. A worker asks the same launcher for its own workers. Any thread may start workers. A forked child of the program
gets a new launcher.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import site
import socket
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gleanrl._os.clock import Deadline
from gleanrl._os.files import Descriptors, sent_over
from gleanrl._os.fork_server_main import ANSWER, MOST_BYTES, REQUEST, START, UNKNOWN
from gleanrl._os.interrupts import ForkSafeLock

# `-c` puts the current directory first on the path. Only the built-in `sys` is imported before that is undone.
_CODE = "import sys; sys.path[:] = sys.argv[2:]; from gleanrl._os.fork_server_main import main; main(sys.argv[1:2])"
_READY_S = 120.0  # enough to import torch from a cold disk
_ANSWER_S = 30.0
_CODE_S = (
    # The exit code only completes an error message, so the error of a lost worker waits no longer for it.
    5.0
)


class LaunchError(OSError):
    """The launcher can't be started, or it has ended."""


class Started(NamedTuple):
    """A process that the launcher has started."""

    pid: int
    descriptor: int
    """The pidfd; it becomes readable when the process ends."""


class Launcher:
    """The connection to a launcher process. Any thread may use it; a lock lets one request at a time pass.

    Args:
        link: a socket to the launcher.
        process: the launcher, if this process started it; None in a worker.
    """

    def __init__(self, link: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._link, self._process = link, process
        # Held from the request to its answer: otherwise a thread could read and drop the answer to another one.
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.owner = os.getpid()
        self._end = weakref.finalize(self, _end, link, process, self.owner)

    def start(self, descriptors_to_send: Sequence[int], owned: Descriptors) -> Started:
        """Start a worker.

        Args:
            descriptors_to_send: descriptors; the worker receives copies.
            owned: receives the worker's pidfd.

        Raises:
            LaunchError: the launcher has ended, or doesn't answer within 30 s.
        """
        try:
            pid, descriptors = self._ask(START, Deadline(_ANSWER_S), owned, descriptors_to_send)
        except OSError as cause:
            raise LaunchError(f"no worker can be started: {cause}") from cause
        return Started(pid, descriptors[0])

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of an ended process that this connection started; negative for a signal.

        Return None if the launcher doesn't know the code, or doesn't answer within 5 s.
        """
        try:
            code, _ = self._ask(pid, Deadline(_CODE_S), Descriptors())
        except OSError:
            return None
        return None if code == UNKNOWN else code

    @property
    def is_alive(self) -> bool:
        """Whether the launcher process lives. A worker can't check this, and always gets True."""
        return self._process is None or self._process.poll() is None

    def close(self) -> None:
        """End the connection, and with it the launcher and all processes that it started.

        In a worker, only the processes that the worker requested end. In a forked child of the program, none ends.
        """
        self._end()

    def _ask(
        self, command: int, deadline: Deadline, owned: Descriptors, descriptors_to_send: Sequence[int] = ()
    ) -> tuple[int, list[int]]:
        """Send a request; return the answer and its descriptors.

        Each request has a number. Answers with other numbers belong to earlier requests, whose caller was interrupted
        before it read them. They are dropped, and their descriptors are closed.
        """
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        with self._lock:
            number = next(self._numbers)
            socket.send_fds(self._link, [REQUEST.pack(number, command)], list(descriptors_to_send))
            while True:
                left = deadline.remaining()
                if not poller.poll(None if left is None else left * 1000):
                    raise LaunchError("the process that starts workers doesn't answer")
                packet = bytearray(ANSWER.size)
                descriptors = owned.take(sent_over(self._link, packet))
                answered, value = ANSWER.unpack(packet)
                if answered == number:
                    return value, descriptors
                if not answered:
                    raise LaunchError("the process that starts workers has ended")
                if descriptors:
                    owned.close(*descriptors)


def _end(link: socket.socket, process: subprocess.Popen[bytes] | None, owner: int) -> None:
    """Close the connection, which makes the launcher end, and wait for it. After 5 s, kill it."""
    link.close()
    if process is None:
        return
    if os.getpid() != owner:  # This is a forked child of the program; its parent owns the launcher.
        process.returncode = 0  # prevents the warning of `Popen` that the process still runs
    else:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_preloaded: list[str] = []


def preload(module: str) -> None:
    """Make launchers that this process starts from now on import a module before they fork."""
    _preloaded.append(module)


_current: Launcher | None = None
# Keeps two threads from starting two launchers. A thread may hold it for seconds while another one forks.
_starting = ForkSafeLock()


def current(entry: str, preload: Sequence[str]) -> Launcher:
    """Return the program's launcher. Start one if there is none, or if it has ended.

    The arguments count only at a start; a launcher that runs keeps its own.

    Args:
        entry: ``module:function`` that workers run (see `fork_server_main.Entry`).
        preload: modules that the launcher imports before it forks.

    Raises:
        LaunchError: the launcher can't be started; the message holds the error of an import.
    """
    global _current
    with _starting.lock:
        if _current is None or _current.owner != os.getpid() or not _current.is_alive:
            former, _current = _current, None
            if former is not None:
                former.close()
            _current = _launch(entry, preload)
        return _current


def adopt(link: socket.socket) -> None:
    """Use the launcher that forked this worker, at the other end of `link`, for the worker's own workers."""
    global _current
    _current = Launcher(link, None)


def shut_down() -> None:
    """End the program's launcher, if there is one. The next worker gets a new one."""
    global _current
    with _starting.lock:
        if _current is not None:
            _current.close()
        _current = None


def _launch(entry: str, preload: Sequence[str]) -> Launcher:
    """Start a launcher process, and return once it is ready to fork.

    Raises:
        LaunchError: it isn't ready after 120 s, or reports an error. The process is killed then.
    """
    links: list[socket.socket] = []
    process: subprocess.Popen[bytes] | None = None
    try:
        links.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        own_end, launcher_end = links
        modules = [*preload, *_preloaded]
        arguments = {
            "control": launcher_end.fileno(),
            "owner": os.getpid(),
            "entry": entry,
            "preload": modules,
        }
        # The options of this interpreter, such as -O and -W, as multiprocessing passes them on.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # A separate session: Ctrl-C reaches only the user's program, which then ends the workers.
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _CODE, json.dumps(arguments), *_path([__name__, entry, *modules])],
            pass_fds=[launcher_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # OpenBLAS would start threads otherwise, and a fork copies none of them.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        launcher_end.close()
        status = _first_message(own_end)
        if status != "ready":
            raise LaunchError(f"the process that starts workers couldn't be prepared: {status}")
        return Launcher(own_end, process)
    except BaseException:
        for link in links:
            link.close()
        if process is not None:
            process.kill()
            process.wait()
        raise


def _path(modules: Iterable[str]) -> list[str]:
    """Return the launcher's `sys.path`: the program's path without the current directory.

    A file in the current directory may have the name of a library's module, and must not run in the launcher. The
    directory comes last if the program itself imported the package of one of `modules` from there, for example from a
    source tree. Workers receive the program's whole path before they import modules of the program.
    """
    here = os.path.realpath(os.curdir)
    # If the current directory is one of installed packages, the launcher still needs it.
    installed = {
        os.path.realpath(entry) for entry in (*sysconfig.get_paths().values(), *site.getsitepackages())
    }
    path = [
        entry
        for entry in sys.path
        if isinstance(entry, str) and (os.path.realpath(entry) != here or (entry and here in installed))
    ]
    packages = (sys.modules.get(name.partition(":")[0].partition(".")[0]) for name in modules)
    files = (getattr(package, "__file__", None) for package in packages)
    if any(file and os.path.realpath(os.path.dirname(os.path.dirname(file))) == here for file in files):
        path.append(here)
    return path


def _first_message(link: socket.socket) -> str:
    """Return the launcher's first message: "ready", or the reason why it can't start; `LaunchError` after 120 s."""
    poller = select.poll()
    poller.register(link, select.POLLIN)
    if not poller.poll(_READY_S * 1000):
        raise LaunchError(f"the process that starts workers wasn't ready after {_READY_S:.0f} s")
    return link.recv(MOST_BYTES).decode() or "it ended at once"
