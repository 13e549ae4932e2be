"""Access to processes, and to the resources that the machine has left for them."""

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

# The root of `proc` and `sys`; tests pass another folder.
_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int | None:
    """Return how many bytes this process can still allocate before the system kills a process.

    The result is the smaller of two limits: the machine's available memory, and the room in each control group of this
    process. Both versions of control groups count. Page cache counts as available where the kernel reports it so.

    Args:
        root: The folder that contains `proc` and `sys`.

    Returns:
        Bytes, or `None` if the system doesn't report it (no `/proc/meminfo`).
    """
    memory = _text(root / "proc/meminfo")
    machine = _field(memory, "MemAvailable:")
    if machine is None:
        return None
    most = (_field(memory, "MemTotal:") or sys.maxsize) * 1024
    return max(0, min([machine * 1024, *_group_headrooms(root, most)]))


def _group_headrooms(root: Path, most: int) -> list[int]:
    """Return the remaining bytes of each control group of this process that has a limit below `most`."""
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
        # Inside a container, the group's path may not be visible. The base itself is the container's group then.
        for group in (base / inside, *(base / parent for parent in inside.parents)):
            limit = _number(group / limit_name)
            used = _number(group / used_name) if limit is not None and limit < most else None
            if limit is not None and used is not None:
                # The kernel counts inactive file pages as used, but frees them first.
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
    """Return the number in a file; `None` if there is no such file, or if it holds "max"."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _field(text: str | None, name: str) -> int | None:
    """Return the number after a name at the start of a line; `None` if there is no such line, or no text."""
    found = re.search(rf"^{name} +(\d+)", text or "", re.MULTILINE)
    return None if found is None else int(found[1])


def cpu_count() -> int:
    """Return how many processors this process may run on: its affinity, not the machine's size."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_on(cpus: Collection[int]) -> None:
    """Restrict the calling thread, and the threads and processes that it starts later, to some processors.

    Raises:
        OSError: the thread may run on none of them.
    """
    os.sched_setaffinity(0, cpus)


def identity() -> str:
    """Return a text that identifies this process uniquely: its number, its start time and the machine's boot id."""
    return _identity(os.getpid())


@cache
def _identity(process: int) -> str:
    start = (_text(_ROOT / "proc/self/stat") or "").rpartition(")")[2].split()
    boot = (_text(_ROOT / "proc/sys/kernel/random/boot_id") or "").strip()
    return f"process {process}, started at {start[19] if len(start) > 19 else '?'}, boot {boot or '?'}"


# A descendant may get the process number of an ancestor that has ended, and would find that one's entry.
os.register_at_fork(after_in_child=_identity.cache_clear)


def is_alive(pid: int) -> bool:
    """Return whether a process of that number exists. An ended process exists until its parent has waited for it.

    Raises:
        ValueError: `pid` isn't positive; 0 and negative numbers address groups of processes.
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
    """Send a signal to the process of a pidfd; return whether the process still existed."""
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int, root: Path = _ROOT) -> str:
    """Return the kernel's letter for a process's state (``R``, ``S``, ``T`` stopped, …); empty if it doesn't exist."""
    after_name = (_text(root / f"proc/{pid}/stat") or "").rpartition(")")[2]
    return after_name.split()[0] if after_name else ""


def describe_exit(code: int | None) -> str:
    """Return in words how a process ended: ``was killed by SIGKILL``, ``exited with code 3``."""
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
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def descriptors_left() -> int:
    """Return how many more files this process may open; `sys.maxsize` without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/proc/self/fd"))


def is_spawning() -> bool:
    """Return whether this thread is pickling the arguments of a new process (multiprocessing's "spawn")."""
    return multiprocessing.context.get_spawning_popen() is not None
