"""The seam to processes and to what the machine has left for them."""

from __future__ import annotations

import multiprocessing.context
import os
import re
import resource
import signal
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

# Where Linux says what it has; tests read a tree of their own.
_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int | None:
    """Return how many bytes this process can still take before the system kills something.

    The smaller of what the machine has available and what each control group around this process leaves, both
    versions of them. Page cache counts as available where the kernel says so.

    Args:
        root: The root of the file system to read `proc` and `sys` from.

    Returns:
        Bytes, or `None` where the system doesn't say (no `/proc/meminfo`).
    """
    memory = _text(root / "proc/meminfo")
    machine = _field(memory, "MemAvailable:")
    if machine is None:
        return None
    most = (_field(memory, "MemTotal:") or sys.maxsize) * 1024
    return max(0, min([machine * 1024, *_group_headrooms(root, most)]))


def _group_headrooms(root: Path, most: int) -> list[int]:
    """What is left below each limit, of fewer bytes than `most`, of a control group that this process is in."""
    headrooms = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, used_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, used_name = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        inside = Path(path.lstrip("/"))
        # Inside a container the group's path may not be visible: the container's own group is then the base
        # itself.
        for group in (base / inside, *(base / parent for parent in inside.parents)):
            limit = _number(group / limit_name)
            used = _number(group / used_name) if limit is not None and limit < most else None
            if limit is not None and used is not None:
                # File pages that nobody used lately are given back first: the kernel counts them as used.
                unused = _field(_text(group / "memory.stat"), "inactive_file") or 0
                headrooms.append(limit - used + unused)
    return headrooms


def _text(path: Path) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """The number a file holds; `None` for no file or for "max"."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _field(text: str | None, name: str) -> int | None:
    """The number that stands behind a name at the beginning of a line; `None` for no such line, or no text."""
    found = re.search(rf"^{name} +(\d+)", text or "", re.MULTILINE)
    return None if found is None else int(found[1])


def cpu_count() -> int:
    """Return how many processors this process may run on (its affinity, not the machine's size)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_on(cpus: Collection[int]) -> None:
    """Let this process, and what it starts from now on, run on those processors only.

    Raises:
        OSError: if it may run on none of them.
    """
    os.sched_setaffinity(0, cpus)


def identity() -> str:
    """Return this process's number, when it started and since when the machine runs: together nobody else's, ever."""
    return _identity(os.getpid())


@cache
def _identity(process: int) -> str:
    start = (_text(_ROOT / "proc/self/stat") or "").rpartition(")")[2].split()
    boot = (_text(_ROOT / "proc/sys/kernel/random/boot_id") or "").strip()
    return f"process {process}, started at {start[19] if len(start) > 19 else '?'}, boot {boot or '?'}"


# A descendant may get the number of an ancestor that has ended.
os.register_at_fork(after_in_child=_identity.cache_clear)


def is_alive(pid: int) -> bool:
    """Return whether a process of that number exists; one that ended and wasn't waited for still does.

    Raises:
        ValueError: `pid` isn't positive (0 and below address groups of processes).
    """
    if pid <= 0:
        raise ValueError(f"is_alive: expected a positive process number, got {pid}")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def signal_process(process: int, number: int) -> bool:
    """Send a signal to the process of a pidfd; return whether it still was there."""
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int, root: Path = _ROOT) -> str:
    """Return the kernel's letter for what a process is doing (``R``, ``S``, ``T`` stopped, …); empty if it's gone."""
    after_name = (_text(root / f"proc/{pid}/stat") or "").rpartition(")")[2]
    return after_name.split()[0] if after_name else ""


def describe_exit(code: int | None) -> str:
    """Return how a process ended, in words: ``was killed by SIGKILL``, ``exited with code 3``."""
    if code is None:
        return "ended for an unknown reason"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def peak_memory() -> int:
    """Return the most bytes of memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def descriptors_left() -> int:
    """Return how many more files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/proc/self/fd"))


def is_spawning() -> bool:
    """Return whether this thread pickles what another process is started with (multiprocessing's "spawn")."""
    return multiprocessing.context.get_spawning_popen() is not None
