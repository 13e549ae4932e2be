"""Access to the file system: the library's calls that create, write, map, lock or remove files, and owned descriptors.

Each action has a fault point of its name, so that a test can make it fail.

- For files: `fs.create`, `fs.allocate`, `fs.open`, `fs.read`, `fs.write`, `fs.sync`, `fs.size`, `fs.map`, `fs.lock`.
- For names: `fs.link`, `fs.rename`, `fs.remove`, `fs.list`, `fs.make_dir`, `fs.sync_dir`.

Errors are the operating system's (`OSError`).

Each open descriptor has an owner (`Descriptors`). An interrupt at any point neither loses a descriptor nor closes one
twice. The reason: Python runs signal handlers between its instructions, but never inside a call of C code. One such
call opens a descriptor and hands it to its owner. Another takes it from its owner and closes it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice, repeat, starmap
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from gleanrl._os import fault_points

_ONE = socket.CMSG_SPACE(4)


class Descriptors:
    """Open descriptors of one owner, closed with it at the latest. For one thread at a time."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def take(self, opened: Iterator[int]) -> list[int]:
        """Own the descriptors that `opened` yields, and return them.

        The iterator consists of C code alone, so that no interrupt comes between opening and owning. The functions
        below return such iterators. They open or receive the descriptors only during the iteration.
        """
        before = len(self._open)
        self._open.extend(opened)
        return self._open[before:]

    @property
    def all(self) -> list[int]:
        """The open descriptors, in the order of opening."""
        return list(self._open)

    def close(self, *some: int) -> None:
        """Close some descriptors, or all. Descriptors that are already closed are ignored."""
        owned = self._open
        # From the last place to the first, because `pop` shifts all later places.
        positions = [owned.index(one) for one in some if one in owned] if some else range(len(owned))
        deque(map(os.close, map(owned.pop, sorted(positions, reverse=True))), 0)

    def __del__(self) -> None:
        """Close the descriptors that are still open."""
        if hasattr(self, "_open"):  # An interrupt may have come before `__init__` set it.
            self.close()


def file(path: Path | str, flags: int) -> Iterator[int]:
    """Yield an open file. The process's umask decides who else may access a new one."""
    return map(os.open, (path,), (flags | os.O_CLOEXEC,), (0o666,))


def pipe() -> Iterator[int]:
    """Yield the read end and the write end of a new pipe."""
    return chain.from_iterable(starmap(os.pipe, repeat((), 1)))


def memory(name: str) -> Iterator[int]:
    """Yield new anonymous memory. `name` appears among the process's open files in ``/proc``."""
    return map(os.memfd_create, (name,), (os.MFD_CLOEXEC,))


def memory_of(process: int, descriptor: int) -> Iterator[int]:
    """Yield memory that another process of this machine has open; `OSError` if it doesn't, or if access is denied."""
    return map(os.open, (f"/proc/{process}/fd/{descriptor}",), (os.O_RDWR | os.O_CLOEXEC,))


def pipe_of(process: int, descriptor: int, end: int) -> Iterator[int]:
    """Yield one end (`os.O_RDONLY` or `os.O_WRONLY`) of a pipe of another process; `OSError` if it isn't open there."""
    # Without O_NONBLOCK, the call would block while no process has the pipe's other end open.
    return map(os.open, (f"/proc/{process}/fd/{descriptor}",), (end | os.O_NONBLOCK | os.O_CLOEXEC,))


def sent_over(link: socket.socket, packet: bytearray) -> Iterator[int]:
    """Read one packet of `link` into `packet`, and yield the descriptor that was attached to it, if any."""
    received = starmap(link.recvmsg_into, [([packet], _ONE, socket.MSG_CMSG_CLOEXEC)])
    attached = chain.from_iterable(map(itemgetter(1), received))
    return map(int.from_bytes, map(itemgetter(2), attached), repeat(sys.byteorder))


Result = TypeVar("Result")

# Bytes of one write on systems that can't reserve space.
_ZEROS_BYTES = 1 << 20
_MOST_PIECES = 1024  # The usual limit of `writev` (IOV_MAX).
_OWNER_BYTES = 256  # more than the longest note of an owner
_NO_LINKS = (
    *(errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOENT),
    *(errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
)


class NotPlainError(OSError):
    """The path leads to something other than a plain file, for example a pipe, a directory or a device."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(errno.EINVAL, "not a plain file", str(path))


def create_file(path: Path, num_bytes: int) -> None:
    """Create a file of zeros, with its space reserved on the disk.

    A sparse file would not do: on a full disk, a later write through a map kills the process (SIGBUS). Reserved space
    makes the full disk an error here. A failed call leaves no file behind.

    Args:
        path: Path of the new file; nothing may exist there.
        num_bytes: Its size, >= 0.

    Raises:
        ValueError: `num_bytes` is negative.
        FileExistsError: A file or directory exists at `path`.
        OSError: The disk is full, or the operating system fails in another way.
    """
    if num_bytes < 0:
        raise ValueError(f"create_file: expected num_bytes >= 0, got {num_bytes} for {path}")
    fault_points.point("fs.create")
    owned = Descriptors()  # closes the file at the end of this call; a line for that could be interrupted
    try:
        (made,) = owned.take(file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        fault_points.point("fs.allocate")
        reserve(made, num_bytes)
    except BaseException:
        if owned._open:  # otherwise this call made no file, and a file at `path` is another's
            os.unlink(path)
            close(owned)
        raise


def nameless_file(folder: Path) -> int:
    """Return the descriptor of a new file without a name, which the caller closes.

    The operating system frees the file with its last user.

    Args:
        folder: A folder on the file system that shall hold the file.

    Raises:
        OSError: The folder doesn't exist, or writing there isn't permitted.
    """
    fault_points.point("fs.create")
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def reserve(file: int, num_bytes: int, start: int = 0) -> None:
    """Extend an open file to at least `num_bytes`, with their space reserved on the disk. New bytes are zeros.

    Args:
        file: The descriptor.
        num_bytes: The bytes from the beginning of the file.
        start: The first byte that isn't reserved yet. From there on, nothing may have been written.

    Raises:
        OSError: The disk is full.
    """
    if num_bytes <= start:
        return
    fault_points.point("fs.reserve")
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, num_bytes - start)
        return
    os.lseek(file, start, os.SEEK_SET)
    zeros = bytes(min(num_bytes - start, _ZEROS_BYTES))
    for begin in range(start, num_bytes, _ZEROS_BYTES):
        write_all(file, [zeros[: num_bytes - begin]])


def map_file(path: Path, *, writable: bool = True) -> mmap.mmap:
    """Map a whole file into memory, shared with all other maps of it.

    The map stays valid after the file is removed. It is released with its last view.

    Args:
        path: A file that isn't empty.
        writable: Whether the map can be written; writes reach the file.

    Raises:
        ValueError: The file is empty.
        OSError: The file doesn't exist, or the operating system refuses.
    """
    fault_points.point("fs.map")
    # O_NONBLOCK: opening a pipe would block otherwise.
    with opened(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK) as file:
        return mmap.mmap(file, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)


def map_sparse(path: Path, num_bytes: int) -> tuple[mmap.mmap, Descriptors]:
    """Extend a file to `num_bytes` without reserving space, and map it; see `map_file`.

    The result also holds the open file. `reserve` it before the first write to bytes behind its old end.

    Raises:
        OSError: The file doesn't exist, or the operating system refuses.
    """
    fault_points.point("fs.map")
    owned = Descriptors()
    (opened_file,) = owned.take(file(path, os.O_RDWR))
    os.ftruncate(opened_file, num_bytes)
    return mmap.mmap(opened_file, num_bytes), owned


def make_dir(path: Path, *, exist_ok: bool = True) -> None:
    """Make a directory and its missing parents.

    Raises:
        FileExistsError: A file is at `path`, or a directory and `exist_ok` is false.
        OSError: The operating system fails in another way.
    """
    fault_points.point("fs.make_dir")
    os.makedirs(path, exist_ok=exist_ok)


def make_lasting_dir(path: Path) -> None:
    """Make a directory and its missing parents, and return once their names are on the disk.

    Raises:
        OSError: As in `make_dir`, or a parent directory can't be synced. An existing parent without read permission is
            skipped: the process that made it is responsible for it.
    """
    fault_points.point("fs.make_dir")
    try:
        try:
            os.mkdir(path)
        except FileNotFoundError:
            # A relative path whose current directory was removed: the recursion would not end.
            if path == path.parent:
                raise
            make_lasting_dir(path.parent)
            os.mkdir(path)
    except FileExistsError:
        with suppress(PermissionError):
            sync_dir(path.parent)
    else:
        sync_dir(path.parent)


def names(path: Path) -> list[str]:
    """Return the names in a directory, in any order; an empty list if the directory doesn't exist.

    Raises:
        OSError: The path isn't a directory, or the operating system refuses.
    """
    fault_points.point("fs.list")
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file.

    Raises:
        FileNotFoundError: The file doesn't exist and `missing_ok` is false.
        OSError: The operating system fails in another way.
    """
    fault_points.point("fs.remove")
    try:
        os.unlink(path)
    except FileNotFoundError:
        if not missing_ok:
            raise


def link_file(path: Path | str, to: Path | str, num_bytes: int) -> bool:
    """Give a plain file of that size a second name, which survives the removal of the first.

    Returns:
        False if no such file exists, or if the file system can't make the link. The caller copies the file then.

    Raises:
        OSError: The operating system fails in another way.
    """
    try:
        fault_points.point("fs.link")
        state = os.lstat(path)
        if not stat.S_ISREG(state.st_mode) or state.st_size != num_bytes:
            return False
        os.link(path, to, follow_symlinks=False)
    except OSError as cause:
        if cause.errno in _NO_LINKS:
            return False
        raise
    return True


def sync_dir(path: Path) -> None:
    """Return once the names in a directory are on the disk.

    Raises:
        OSError: The operating system refuses.
    """
    fault_points.point("fs.sync_dir")
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as directory:
        os.fsync(directory)


def rename(path: Path, to: Path) -> None:
    """Rename a file or a directory within its file system, atomically; a file at `to` is replaced.

    Raises:
        OSError: The operating system refuses.
    """
    fault_points.point("fs.rename")
    os.rename(path, to)


@contextmanager
def reading(path: Path | str) -> Iterator[int]:
    """Open a plain file for reading within a ``with`` block. Symbolic links, devices and pipes are refused.

    Raises:
        OSError: The file doesn't exist, or it isn't a plain file.
    """
    fault_points.point("fs.open")
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotPlainError(path)
        yield file


def size_at(path: Path | str) -> int:
    """Return the size of a plain file in bytes.

    Raises:
        OSError: The file doesn't exist, or it isn't a plain file.
    """
    fault_points.point("fs.size")
    state = os.lstat(path)
    if not stat.S_ISREG(state.st_mode):
        raise NotPlainError(path)
    return state.st_size


def is_dir(path: Path) -> bool:
    """Return whether the path is a directory, and not a link to one.

    Raises:
        OSError: The path doesn't exist.
    """
    return stat.S_ISDIR(os.lstat(path).st_mode)


def is_plain(path: Path) -> bool:
    """Return whether the path is a plain file, and not a link to one; False if it doesn't exist."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def size_of(file: int) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file).st_size


def read_into(file: int, buffer: Any, offset: int) -> int:
    """Fill a buffer with the bytes of an open file from `offset` on; return how many were read.

    The number is smaller than the buffer only at the end of the file.

    Raises:
        OSError: The disk fails.
    """
    rest, total = memoryview(buffer).cast("B"), 0
    while rest:
        fault_points.point("fs.read")
        count = os.preadv(file, [rest], offset + total)
        if not count:
            break
        total, rest = total + count, rest[count:]
    return total


def while_locked(path: Path, owner: bytes, call: Callable[[], Result]) -> Result:
    """Hold a file's lock during a call, and return the call's result.

    The kernel releases the lock when the process ends, for any reason. This isn't a context manager: a second interrupt
    at the start of its `__exit__` would skip the unlock. The traceback would then keep the descriptor open. Python
    checks for signals at no point between `finally` and a C function.

    Args:
        path: The lock file. It is created if it doesn't exist, and it stays.
        owner: A note on the holder, for the error of other processes.
        call: The function to call.

    Raises:
        BlockingIOError: Another process holds the lock; the message is the note of that process.
        OSError: The operating system fails in another way, or the path isn't a plain file.
    """
    fault_points.point("fs.lock")
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # A pipe, for example, has no positions to write to.
            raise NotPlainError(path)
        unlock = partial(
            fcntl.flock, file, fcntl.LOCK_UN
        )  # Closing would not unlock: a child that was forked during the call has the file open, too.
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(os.pread(file, 1 << 10, 0).decode(errors="replace").rstrip()) from None
            os.pwrite(
                file, owner.ljust(_OWNER_BYTES), 0
            )  # Padding overwrites a longer note. Truncating the file instead would cost as much as a sync.
            return call()
        finally:
            unlock()


def remove_tree(path: Path) -> None:
    """Remove a directory with its content, or a file. Symbolic links are removed and never followed.

    Raises:
        OSError: The operating system refuses.
    """
    fault_points.point("fs.remove")
    if is_dir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def system_temp_dir() -> Path:
    """Return the system's folder for temporary files."""
    return Path(tempfile.gettempdir())


def temporary_dir(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make an empty directory in the system's folder for temporary files.

    `cleanup()` or the end of a `with` block removes it. At the latest, it is removed when the object is collected or
    the interpreter exits.

    Args:
        prefix: The start of its name.
    """
    fault_points.point("fs.make_dir")
    return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)


def write_all(file: int, pieces: Iterable[Any]) -> int:
    """Write all pieces at the file's current position, with as few calls as possible.

    Each call releases the interpreter's lock and has to wait for it again.

    Returns:
        The number of bytes written.
    """
    left = deque(view for piece in pieces if (view := memoryview(piece).cast("B")))
    total = sum(map(len, left))
    while left:
        count = os.writev(file, list(islice(left, _MOST_PIECES)))
        while count:
            if count < len(left[0]):
                left[0] = left[0][count:]
                break
            count -= len(left.popleft())
    return total


@contextmanager
def opened(path: Path | str, flags: int) -> Iterator[int]:
    """Open a file within a ``with`` block; only for the `_os` package."""
    owned = Descriptors()
    try:
        yield owned.take(file(path, flags))[0]
    finally:
        close(owned)


def close(owned: Descriptors) -> None:
    """Close descriptors and ignore errors; only for the `_os` package."""
    # Bytes that must be on the disk were synced before, so a failed close loses nothing.
    with suppress(OSError):
        owned.close()


def free_bytes(path: Path) -> int:
    """Return how many bytes an ordinary user can still write on the file system of `path`.

    Raises:
        OSError: The path doesn't exist.
    """
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize
