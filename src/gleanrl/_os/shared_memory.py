"""Memory shared between processes, with a lock that the kernel releases when its holder dies.

The memory is anonymous (Linux's memfd), or a file without a name. So nothing is left behind when processes die. A
pickle contains the number of a descriptor and of a process that has it open. It can be loaded while that process lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat, starmap
from pathlib import Path
from typing import Any, TypeVar

from gleanrl._os import fault_points, files, proc
from gleanrl._os.files import memory_of
from gleanrl._os.interrupts import renew_in_child

Result = TypeVar("Result")


class SharedMemory:
    """A piece of memory that all copies of this object share, in any process.

    Pickle and deepcopy make copies. `alone` excludes other processes and other copies; within one copy, one thread at a
    time may use it. The kernel releases the lock when its holder dies.

    Args:
        num_bytes: its size, positive; it begins with zeros.
        folder: the folder of a file with reserved space; None for anonymous memory.

    Raises:
        OSError: the system has no memory, no memfd, or no space in `folder`.
    """

    def __init__(self, num_bytes: int, folder: Path | None = None) -> None:
        fault_points.point("memory.create")
        self.folder = folder
        if folder is None:
            descriptor = os.memfd_create("gleanrl-shared", os.MFD_CLOEXEC)
        else:
            descriptor = files.nameless_file(folder)
        try:
            self._grow(descriptor, num_bytes)
            self._take(descriptor, num_bytes)
        except BaseException:
            self.__dict__.pop("_descriptor", None)
            os.close(descriptor)
            raise

    def _grow(self, descriptor: int, num_bytes: int) -> None:
        if self.folder is None:
            os.ftruncate(descriptor, num_bytes)
        else:
            files.reserve(descriptor, num_bytes)

    def free_bytes(self) -> int | None:
        """Return about how many bytes can still be allocated; None if unknown."""
        return proc.available_memory() if self.folder is None else files.free_bytes(self.folder)

    def _take(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self._num_bytes = descriptor, num_bytes
        self.map = mmap.mmap(descriptor, num_bytes)
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Open a private descriptor in the child.

        The inherited descriptor would share the parent's lock. The lock would also stay held after the parent's death
        while the child lives.
        """
        inherited = self._descriptor
        self._descriptor = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        os.close(inherited)

    def resize(self, num_bytes: int) -> None:
        """Map `num_bytes` from now on. The memory keeps its content and never shrinks, and earlier maps stay valid.

        Raises:
            OSError: there is no space.
        """
        if os.fstat(self._descriptor).st_size < num_bytes:
            self._grow(self._descriptor, num_bytes)
        self.map, self._num_bytes = mmap.mmap(self._descriptor, num_bytes), num_bytes

    @classmethod
    def _open(cls, pid: int, descriptor: int, num_bytes: int, folder: Path | None) -> SharedMemory:
        new = cls.__new__(cls)
        new.folder = folder
        fault_points.point("memory.open")
        try:
            opened = next(memory_of(pid, descriptor))
        except FileNotFoundError as cause:
            raise FileNotFoundError(
                f"shared memory of process {pid}: the process has ended or closed it; unpickle it before that"
            ) from cause
        new._take(opened, num_bytes)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the process and descriptor for pickle. The pickle must be loaded while this process lives."""
        return type(self)._open, (os.getpid(), self._descriptor, self._num_bytes, self.folder)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMemory:
        """Return another handle of the same memory."""
        return self._open(os.getpid(), self._descriptor, self._num_bytes, self.folder)

    def acquiring(self) -> Iterator[tuple[int, int]]:
        """Take the lock, and yield the argument of `releasing`. Consists of C code alone (see `files`)."""
        release = {None: (self._descriptor, fcntl.LOCK_UN)}
        return map(release.__getitem__, starmap(fcntl.flock, [(self._descriptor, fcntl.LOCK_EX)]))

    def releasing(self, acquired: list[tuple[int, int]]) -> Iterator[None]:
        """Release the lock for each item that `acquiring` yielded, and remove the item. Consists of C code alone."""
        return starmap(fcntl.flock, map(acquired.pop, repeat(-1, len(acquired))))

    def alone(self, call: Callable[[], Result]) -> Result:
        """Hold the lock during a call, and return the call's result. Other processes and copies wait.

        This isn't a context manager: a second interrupt at the start of its `__exit__` would skip the unlock for as
        long as the traceback lives. Python checks for signals at no point between `finally` and a C function.
        """
        unlock = partial(fcntl.flock, self._descriptor, fcntl.LOCK_UN)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            return call()
        finally:
            unlock()

    def __del__(self) -> None:
        """Close the descriptor. The memory lives until its last map is gone."""
        descriptor = self.__dict__.pop("_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def fence() -> None:
    """Order the memory accesses before the call ahead of those after it, as other processes see them.

    A process that publishes data calls it between the data and the counter that says that the data are complete. The
    reader calls it between the counter and the data. On x86 the processor keeps these orders itself, on ARM it doesn't.
    """
    # A new lock: no thread waits for it, and an interrupt can't leave it held for other callers.
    lock = threading.Lock()
    lock.acquire()
    # No earlier access moves behind a release, no later one ahead of an acquisition, and the processor keeps this
    # order of both. An acquisition followed by a release would let accesses from both sides in between.
    lock.release()
    lock.acquire()
