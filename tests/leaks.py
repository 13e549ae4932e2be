"""Resources that a test run holds: child processes, files in shared memory, open descriptors (Linux).

Only resources of this run count. Other programs make and remove files in shared memory meanwhile. A file is of this run
if its name has the number of a process of the run (`torch_<pid>_...`, `pym-<pid>-...`; `tests/__init__.py` sees to
`psm_<pid>_...`), or if this process created it by its name.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing.process
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleanrl._os.fork_server import Launcher

SHARED_MEMORY = Path("/dev/shm")
# Descriptors that come with a first use and stay, and those that pytest itself holds.
HARMLESS = ("/dev/null", "/dev/urandom", "/dev/tty")
# The standard library's heap of shared memory (gymnasium's AsyncVectorEnv uses it) keeps small pieces for later.
HEAP = f"{SHARED_MEMORY}/pym-{os.getpid()}-"
# multiprocessing's bookkeeper lives as long as the process that needed it once.
LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# What Ray's library keeps for the life of a process that used it once: the event loop of its clients, and logs.
LASTING_OF_RAY = ("anon_inode:", "socket:", "pipe:", "/tmp/ray/")

MAKER = re.compile(r"[a-z]+[_-](\d+)[_-]")
"""The beginning of a name that has the number of the process that made the file."""
OF_THIS_RUN = {os.getpid()}
"""Numbers of the processes of this run that were seen, ended ones included."""
CREATED: set[str] = set()
"""Names of files that this process opened to create them."""


@dataclass(frozen=True)
class Holdings:
    """What this process held at one moment."""

    children: frozenset[int]
    descriptors: Counter[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        OF_THIS_RUN.update(descendants())
        files = shared_memory(OF_THIS_RUN) | CREATED & set(os.listdir(SHARED_MEMORY))
        return cls(frozenset(children()), Counter(descriptors()), frozenset(files))

    def check(self) -> None:
        """Fail for everything that is there now and wasn't then."""
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
    """Return the processes that this one, or `parent`, started and didn't wait for, ended ones included."""
    process = Path(f"/proc/{parent or os.getpid()}")
    while process.exists():
        # Where a thread has ended meanwhile, another one has its children now.
        with suppress(FileNotFoundError, ProcessLookupError):
            lists = [(task / "children").read_text() for task in (process / "task").iterdir()]
            return [int(pid) for pids in lists for pid in pids.split()]
    return []


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() or "(ended)"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between open and read
        return "(ended)"


def descriptors() -> list[str]:
    """What each open descriptor of this process shows at; pytest's capture files (unlinked) left out."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if target not in HARMLESS and not target.startswith((f"/proc/{os.getpid()}/fd", HEAP)):
            found.append(target)
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
    """Return the files in shared memory whose names say that one of these processes made them."""
    named = {name: MAKER.match(name) for name in os.listdir(SHARED_MEMORY)}
    return {name for name, maker in named.items() if maker and int(maker[1]) in makers}


def _note_processes(owner: Any, name: str, pid_of: Callable[[tuple[Any, ...], Any], int]) -> None:
    """Let a function that starts a process put its number into `OF_THIS_RUN`.

    A process that has ended has no parent any more: its number has to be noted at its start.

    Args:
        owner: what has the function.
        name: the function.
        pid_of: gives the number of the process; gets the arguments and the result of a call.
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
