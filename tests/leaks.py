"""What a process holds of the operating system's: children, files in shared memory, open descriptors
(Linux)."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Descriptors that come with a first use and stay, and those that pytest itself holds.
HARMLESS = ("/dev/null", "/dev/urandom", "/dev/tty")
# The standard library's heap of shared memory (gymnasium's AsyncVectorEnv uses it) keeps small pieces for later.
HEAP = f"{SHARED_MEMORY}/pym-{os.getpid()}-"
# multiprocessing's bookkeeper lives as long as the process that needed it once.
LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# What Ray's library keeps for the life of a process that used it once: the event loop of its clients, and logs.
LASTING_OF_RAY = ("anon_inode:", "socket:", "pipe:", "/tmp/ray/")


@dataclass(frozen=True)
class Holdings:
    """What this process held at one moment."""

    children: frozenset[int]
    descriptors: Counter[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(frozenset(children()), Counter(descriptors()), frozenset(shared_memory()))

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
        if files:  # other processes' files come and go meanwhile: what was left is still there afterwards
            files = (files - in_use()) & set(shared_memory())
        assert not files, f"files were left in {SHARED_MEMORY}: {sorted(files)}"


def children() -> list[int]:
    """The processes this one started and didn't wait for, ended ones included."""
    while True:
        # Where a thread has ended meanwhile, another one has its children now.
        with suppress(FileNotFoundError, ProcessLookupError):
            lists = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
            return [int(pid) for pids in lists for pid in pids.split()]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() or "(ended)"
    except FileNotFoundError:
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


def shared_memory() -> list[str]:
    """Files in shared memory; semaphores of multiprocessing, which other processes make and we never do, left out."""
    if not SHARED_MEMORY.is_dir():
        return []
    return [entry.name for entry in SHARED_MEMORY.iterdir() if not entry.name.startswith("sem.mp-")]


def in_use() -> set[str]:
    """The files of shared memory that a living process has mapped: other sessions', so not left behind."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
        except OSError:
            continue
        used |= {
            line.split(f"{SHARED_MEMORY}/")[1] for line in maps.splitlines() if f"{SHARED_MEMORY}/" in line
        }
    return used
