"""Resources that a test run holds: child processes, files in shared memory, open descriptors (Linux).

Only resources of this run count, because other programs create and remove files in shared memory at the same time. A
file belongs to this run if its name has the number of a process of the run (`torch_<pid>_...`, `pym-<pid>-...`, and
`psm_<pid>_...` by `tests/__init__.py`). A file that this process created by name belongs to it, too.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing.process
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleanrl._os.fork_server import Launcher

SHARED_MEMORY = Path("/dev/shm")
# Descriptors that a first use opens for the process's life, and descriptors of pytest itself.
HARMLESS = ("/dev/null", "/dev/urandom", "/dev/tty")
# The standard library's heap of shared memory keeps small pieces for reuse. gymnasium's AsyncVectorEnv uses it.
HEAP = f"{SHARED_MEMORY}/pym-{os.getpid()}-"
# multiprocessing's helper processes live until the process that started them ends.
LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Ray's client keeps its event loop and its logs open until the process ends.
LASTING_OF_RAY = ("anon_inode:", "socket:", "pipe:", f"{tempfile.gettempdir()}/ray/")

ENDED = "(ended)"
"""The command of a process that has ended, reaped or not."""

MAKER = re.compile(r"[a-z]+[_-](\d+)[_-]")
"""Matches the beginning of a name that has the number of the process that created the file."""
OF_THIS_RUN = {os.getpid()}
"""Numbers of all processes of this run so far, ended ones included."""
CREATED: set[str] = set()
"""Names of files that this process created."""


@dataclass(frozen=True)
class Holdings:
    """The resources that this process held at one moment."""

    children: frozenset[int]
    descriptors: Counter[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        running = {os.getpid(), *descendants()}
        OF_THIS_RUN.update(running)
        # A long run uses all numbers of processes, so another program can get the number of an ended process.
        reused = OF_THIS_RUN & {int(name) for name in os.listdir("/proc") if name.isdigit()} - running
        others = {pid for pid in reused if command(pid) != ENDED}
        files = shared_memory(OF_THIS_RUN - others) | CREATED & set(os.listdir(SHARED_MEMORY))
        return cls(frozenset(children()), Counter(descriptors()), frozenset(files))

    def check(self) -> None:
        """Fail for each resource that is held now and was not held then."""
        gc.collect()
        now = Holdings.now()
        lasting = {pid for pid in now.children if any(name in command(pid) for name in LASTING_CHILDREN)}
        processes = {pid: command(pid) for pid in now.children - self.children - lasting}
        assert not processes, f"child processes were left: {processes}"
        kept = (*(("pipe:", "socket:") if lasting else ()), *(LASTING_OF_RAY if "ray" in sys.modules else ()))
        opened = now.descriptors - self.descriptors
        opened = Counter({name: n for name, n in opened.items() if not name.startswith(kept)})
        assert not opened, f"descriptors were left open: {dict(opened)}"
        files = now.shared_memory - self.shared_memory
        assert not files, f"files were left in {SHARED_MEMORY}: {sorted(files)}"


def children(parent: int | None = None) -> list[int]:
    """Return the numbers of unreaped children of this process, or of `parent`, ended ones included."""
    process = Path(f"/proc/{parent or os.getpid()}")
    while process.exists():
        # A thread that ends passes its children to another thread, so its file can vanish here: read all files again.
        with suppress(FileNotFoundError, ProcessLookupError):
            lists = [(task / "children").read_text() for task in (process / "task").iterdir()]
            return [int(pid) for pids in lists for pid in pids.split()]
    return []


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() or ENDED
    # ProcessLookupError: the process ended between open and read
    except (FileNotFoundError, ProcessLookupError):
        return ENDED


def descriptors() -> list[str]:
    """Return the target of each open descriptor of this process, except pytest's unlinked capture files."""
    own = (f"/proc/{os.getpid()}/fd", HEAP)
    return [
        name for name in open_files(os.getpid()).values() if name not in HARMLESS and not name.startswith(own)
    ]


def open_files(pid: int) -> dict[int, str]:
    """Return the target of each open descriptor of a process, which may close some meanwhile."""
    found = {}
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found[int(descriptor)] = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    return found


def descendants() -> set[int]:
    """Return the numbers of the living processes below this one."""
    found, ahead = set(), children()
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children(pid)
    return found


def shared_memory(makers: Collection[int]) -> set[str]:
    """Return the files in shared memory whose names have the number of one of these processes."""
    named = {name: MAKER.match(name) for name in os.listdir(SHARED_MEMORY)}
    return {name for name, maker in named.items() if maker and int(maker[1]) in makers}


def _note_processes(owner: Any, name: str, pid_of: Callable[[tuple[Any, ...], Any], int]) -> None:
    """Make a function that starts a process add the process's number to `OF_THIS_RUN`.

    The number must be recorded at the start, because an ended process has no parent any more.

    Args:
        owner: the module or class of the function.
        name: name of the function.
        pid_of: returns the number of the process, given the arguments and the result of a call.
    """
    start = getattr(owner, name)

    @functools.wraps(start)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        result = start(*arguments, **keywords)
        OF_THIS_RUN.add(pid_of(arguments, result))
        return result

    setattr(owner, name, noted)


def _note_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str) and flags & os.O_CREAT and path.startswith(f"{SHARED_MEMORY}/"):
            CREATED.add(path.removeprefix(f"{SHARED_MEMORY}/"))


_note_processes(os, "fork", lambda _, pid: pid or os.getpid())
_note_processes(subprocess.Popen, "__init__", lambda arguments, _: arguments[0].pid)
_note_processes(multiprocessing.process.BaseProcess, "start", lambda arguments, _: arguments[0].pid)
_note_processes(Launcher, "start", lambda _, started: started.pid)
sys.addaudithook(_note_files)
