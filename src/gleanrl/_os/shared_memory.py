"""Memory that processes share by name, with a lock that a dying process can't keep.

It is anonymous memory (Linux's memfd), or a file without a name: nothing is left behind, whatever dies. Its own name
is that of a descriptor of a process that has it open, so that it can be pickled by any means; it is opened while that
process lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
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
    """A piece of memory that every copy of this object, in whatever process, sees.

    Copies are made by pickle or deepcopy. `alone` excludes other processes and other copies; it belongs to one thread
    of each copy at a time. The kernel releases it when its holder dies.

    Args:
        num_bytes: its size, positive; it begins with zeros.
        folder: where it is a file, its space reserved on the disk; None for memory.

    Raises:
        OSError: if the system has no memory, no memfd, or no space in `folder`.
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
        """Return how many bytes more there may be, about; None if that isn't known."""
        return proc.available_memory() if self.folder is None else files.free_bytes(self.folder)

    def _take(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor, self._num_bytes = descriptor, num_bytes
        self.map = mmap.mmap(descriptor, num_bytes)
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Open a descriptor of the child's own: with its parent's it would share the lock, and outlive it with it."""
        inherited = self._descriptor
        self._descriptor = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
        os.close(inherited)

    def resize(self, num_bytes: int) -> None:
        """Map so many bytes from now on, the same ones at the beginning; earlier maps stay. It doesn't shrink.

        Raises:
            OSError: if there is no space for them.
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
                f"shared memory of process {pid}: it has ended, or let go of it; unpickle while it lives"
            ) from cause
        new._take(opened, num_bytes)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name: whoever unpickles it must do so while this process lives."""
        return type(self)._open, (os.getpid(), self._descriptor, self._num_bytes, self.folder)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMemory:
        """Return another handle of the same memory."""
        return self._open(os.getpid(), self._descriptor, self._num_bytes, self.folder)

    def acquiring(self) -> Iterator[tuple[int, int]]:
        """Yield what `releasing` takes once others are kept out; made of C code alone (see `descriptors`)."""
        release = {None: (self._descriptor, fcntl.LOCK_UN)}
        return map(release.__getitem__, starmap(fcntl.flock, [(self._descriptor, fcntl.LOCK_EX)]))

    def releasing(self, held: list[tuple[int, int]]) -> Iterator[None]:
        """Let others in for each item that `acquiring` yielded, and take it off; made of C code alone."""
        return starmap(fcntl.flock, map(held.pop, repeat(-1, len(held))))

    def alone(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns; it keeps other processes and copies out.

        No context manager: a second interrupt at the begin of its `__exit__` would leave them out for as long as the
        traceback lives. Python looks for no signal between `finally` and a function of C.
        """
        let_in = partial(fcntl.flock, self._descriptor, fcntl.LOCK_UN)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            return call()
        finally:
            let_in()

    def __del__(self) -> None:
        """Close the descriptor; the memory lives as long as somebody has it mapped."""
        descriptor = self.__dict__.pop("_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)
