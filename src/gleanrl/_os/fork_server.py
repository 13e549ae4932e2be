"""Processes for workers: asked for here, forked by the launcher (see `launch_server`).

There is one launcher for a program, started with the first worker and kept for the next ones; it ends with the
program, however that ends. A worker asks the same launcher for workers of its own. Any thread may start workers;
a program that forks gets a launcher of its own in the child.
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

# `-c` puts the current directory first on the path: nothing but the built-in `sys` is imported before that is undone.
_CODE = "import sys; sys.path[:] = sys.argv[2:]; from gleanrl._os.fork_server_main import main; main(sys.argv[1:2])"
_READY_S = 120.0  # importing torch from a cold disk
_ANSWER_S = 30.0
_CODE_S = (
    5.0  # how a process ended is only told in a message: the error of a lost worker waits for it no longer
)


class LaunchError(OSError):
    """The launcher can't be started, or has ended."""


class Started(NamedTuple):
    """A process that was started."""

    pid: int
    descriptor: int
    """Its pidfd: readable once the process has ended."""


class Launcher:
    """The way to one launcher process. Any thread may use it; they take turns.

    Args:
        link: a socket to it.
        process: the launcher, if this process started it; None in a worker.
    """

    def __init__(self, link: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._link, self._process = link, process
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.owner = os.getpid()
        self._end = weakref.finalize(self, _end, link, process, self.owner)

    def start(self, given: Sequence[int], held: Descriptors) -> Started:
        """Start a worker.

        Args:
            given: descriptors that it gets copies of.
            held: gets the worker's pidfd.

        Raises:
            LaunchError: if the launcher has ended, or doesn't answer.
        """
        try:
            pid, descriptors = self._ask(START, Deadline(_ANSWER_S), held, given)
        except OSError as cause:
            raise LaunchError(f"the process that starts workers has ended: {cause}") from cause
        return Started(pid, descriptors[0])

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a process that was started here and has ended, negative for a signal.

        It's None if the launcher doesn't know it (any more), or doesn't answer within 5 s.
        """
        try:
            code, _ = self._ask(pid, Deadline(_CODE_S), Descriptors())
        except OSError:
            return None
        return None if code == UNKNOWN else code

    @property
    def is_alive(self) -> bool:
        """Whether the launcher process lives, as far as this process can tell."""
        return self._process is None or self._process.poll() is None

    def close(self) -> None:
        """End the launcher and everything that it started."""
        self._end()

    def _ask(
        self, what: int, deadline: Deadline, held: Descriptors, given: Sequence[int] = ()
    ) -> tuple[int, list[int]]:
        """Return the answer to a question, and the descriptors that came with it.

        Answers to earlier questions, which an interrupt kept from being read, are dropped.
        """
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        with self._lock:
            number = next(self._numbers)
            socket.send_fds(self._link, [REQUEST.pack(number, what)], list(given))
            while True:
                left = deadline.remaining()
                if not poller.poll(None if left is None else left * 1000):
                    raise LaunchError("the process that starts workers doesn't answer")
                packet = bytearray(ANSWER.size)
                descriptors = held.take(sent_over(self._link, packet))
                asked, value = ANSWER.unpack(packet)
                if asked == number:
                    return value, descriptors
                if not asked:
                    raise LaunchError("the connection to it was closed")
                if descriptors:
                    held.close(*descriptors)


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


_preloaded: list[str] = []


def preload(module: str) -> None:
    """Let launchers that this process starts from now on import a module before they fork anything."""
    _preloaded.append(module)


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
            former, _current = _current, None
            if former is not None:
                former.close()
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
    links: list[socket.socket] = []
    process: subprocess.Popen[bytes] | None = None
    try:
        links.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        mine, theirs = links
        modules = [*preload, *_preloaded]
        given = {"control": theirs.fileno(), "owner": os.getpid(), "entry": entry, "preload": modules}
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        # A session of its own: Ctrl-C goes to the user's program alone, which ends the workers.
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _CODE, json.dumps(given), *_path([__name__, entry, *modules])],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # or its threads would be forked
        )
        theirs.close()
        words = _first_words(mine)
        if words != "ready":
            raise LaunchError(f"the process that starts workers couldn't be prepared: {words}")
        return Launcher(mine, process)
    except BaseException:
        for link in links:
            link.close()
        if process is not None:
            process.kill()
            process.wait()
        raise


def _path(modules: Iterable[str]) -> list[str]:
    """Return the launcher's `sys.path`: this program's, without the current directory.

    A file there that is called like a module of some library must not run in the launcher. Where the program itself has
    imported the package of one of `modules` from there, a source tree for example, the directory comes last. Workers
    get the program's whole path before they import anything of the program.
    """
    here = os.path.realpath(os.curdir)
    # A program that runs in a directory of installed packages still needs these.
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


def _first_words(link: socket.socket) -> str:
    poller = select.poll()
    poller.register(link, select.POLLIN)
    if not poller.poll(_READY_S * 1000):
        raise LaunchError(f"the process that starts workers wasn't ready after {_READY_S:.0f} s")
    return link.recv(MOST_BYTES).decode() or "it ended at once"
