"""The seam to the file system: every create, write, map and removal of the library is here.

Each act has a fault point of its name (`fs.create`, `fs.allocate`, `fs.write`, `fs.sync`, `fs.sync_dir`, `fs.rename`,
`fs.link`, `fs.size`, `fs.open`, `fs.read`, `fs.map`, `fs.lock`, `fs.list`, `fs.remove`, `fs.make_dir`), so that a test
can fail any one of them. Errors are the operating system's own (`OSError`).

Open descriptors with an owner: none is lost, and none is closed twice, wherever an interrupt comes.

Python runs signal handlers between its instructions, never inside a call of C code. So a descriptor goes within one
such call from what opens it to its owner, and within another from its owner to what closes it.
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
    """Descriptors that one owner opened; they are closed with it at the latest. One thread at a time."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def take(self, opened: Iterator[int]) -> list[int]:
        """Own what `opened` yields, which is made of C code alone (see the functions below); return it."""
        before = len(self._open)
        self._open.extend(opened)
        return self._open[before:]

    def close(self, *some: int) -> None:
        """Close some of them, or all; those that were closed already are left alone."""
        owned = self._open
        places = [owned.index(one) for one in some if one in owned] if some else range(len(owned))
        deque(map(os.close, map(owned.pop, sorted(places, reverse=True))), 0)

    def __del__(self) -> None:
        """Close what is still open."""
        if hasattr(self, "_open"):  # an interrupt may have come before there was anything
            self.close()


def file(path: Path | str, flags: int) -> Iterator[int]:
    """Yield an open file; a new one may be read and written by everybody that the process's mask lets."""
    return map(os.open, (path,), (flags | os.O_CLOEXEC,), (0o666,))


def pipe() -> Iterator[int]:
    """Yield the end to read from and the end to write to of a new pipe."""
    return chain.from_iterable(starmap(os.pipe, repeat((), 1)))


def memory(name: str) -> Iterator[int]:
    """Yield new anonymous memory; `name` is shown among the open files of a process."""
    return map(os.memfd_create, (name,), (os.MFD_CLOEXEC,))


def memory_of(process: int, descriptor: int) -> Iterator[int]:
    """Yield memory that another process of this machine has open; `OSError` if it hasn't, or doesn't let us."""
    return map(os.open, (f"/proc/{process}/fd/{descriptor}",), (os.O_RDWR | os.O_CLOEXEC,))


def pipe_of(process: int, descriptor: int, end: int) -> Iterator[int]:
    """Yield an end, `os.O_RDONLY` or `os.O_WRONLY`, of a pipe that another process has open; `OSError` if it hasn't."""
    # A pipe whose other end nobody has would be waited for.
    return map(os.open, (f"/proc/{process}/fd/{descriptor}",), (end | os.O_NONBLOCK | os.O_CLOEXEC,))


def sent_over(link: socket.socket, packet: bytearray) -> Iterator[int]:
    """Read one packet of `link` into `packet`; yield the descriptor that came with it, if one did."""
    received = starmap(link.recvmsg_into, [([packet], _ONE, socket.MSG_CMSG_CLOEXEC)])
    attached = chain.from_iterable(map(itemgetter(1), received))
    return map(int.from_bytes, map(itemgetter(2), attached), repeat(sys.byteorder))


Result = TypeVar("Result")

# What is written at once where the system can't reserve space.
_ZEROS_BYTES = 1 << 20
_MOST_PIECES = 1024  # what systems write at once; together less than the 2 GiB that they do at once
_OWNER_BYTES = 256  # more than an owner says of itself
_NO_LINKS = (
    *(errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOENT),
    *(errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
)


class NotPlainError(OSError):
    """Something else than a plain file is there: a pipe, a directory, a device."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(errno.EINVAL, "not a plain file", str(path))


def create_file(path: Path, num_bytes: int) -> None:
    """Create a file of zeros whose space is reserved on the disk.

    A sparse file would be created as well, but then a full disk kills the process (SIGBUS) at some later
    write through a map; here it's an error at once. Nothing is left behind when the call fails.

    Args:
        path: Where; nothing may be there yet.
        num_bytes: Its size, >= 0.

    Raises:
        ValueError: `num_bytes` is negative.
        FileExistsError: Something is at `path`.
        OSError: The disk is full, or any other failure of the operating system.
    """
    if num_bytes < 0:
        raise ValueError(f"create_file: expected num_bytes >= 0, got {num_bytes} for {path}")
    fault_points.point("fs.create")
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
        try:
            fault_points.point("fs.allocate")
            reserve(file, num_bytes)
        except BaseException:
            os.unlink(path)
            raise


def nameless_file(folder: Path) -> int:
    """Return the descriptor of a new file that has no name; the operating system frees it with its last user.

    Args:
        folder: Which file system it is on.

    Raises:
        OSError: No such folder, or no right to write there.
    """
    fault_points.point("fs.create")
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def reserve(file: int, num_bytes: int) -> None:
    """Let an open file have so many bytes at least, their space reserved on the disk; new ones are zeros.

    Raises:
        OSError: The disk is full.
    """
    if num_bytes == 0:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
        return
    zeros = bytes(min(num_bytes, _ZEROS_BYTES))
    for begin in range(0, num_bytes, _ZEROS_BYTES):
        write_all(file, [zeros[: num_bytes - begin]])


def map_file(path: Path, *, writable: bool = True) -> mmap.mmap:
    """Map a whole file into memory, shared with everybody who maps it.

    The map stays valid when the file is removed, and is released when the last view of it is gone.

    Args:
        path: A file that isn't empty.
        writable: Whether the map can be written; what is written reaches the file.

    Raises:
        ValueError: The file is empty.
        OSError: There is no such file, or the operating system refuses.
    """
    fault_points.point("fs.map")
    with opened(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK) as file:  # a pipe would wait
        return mmap.mmap(file, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)


def make_dir(path: Path, *, exist_ok: bool = True) -> None:
    """Make a directory and the missing ones above it.

    Raises:
        FileExistsError: Something that isn't a directory is at `path`, or a directory and `exist_ok` is
            false.
        OSError: Any other failure of the operating system.
    """
    fault_points.point("fs.make_dir")
    os.makedirs(path, exist_ok=exist_ok)


def make_lasting_dir(path: Path) -> None:
    """Make a directory and the missing ones above it, and return once their names are on the disk.

    Raises:
        OSError: As `make_dir`; or a directory above it can't be synced. One that was there and can't be read is left
            to whoever made it.
    """
    fault_points.point("fs.make_dir")
    try:
        try:
            os.mkdir(path)
        except FileNotFoundError:
            if path == path.parent:  # the current directory was removed
                raise
            make_lasting_dir(path.parent)
            os.mkdir(path)
    except FileExistsError:
        with suppress(PermissionError):
            sync_dir(path.parent)
    else:
        sync_dir(path.parent)


def names(path: Path) -> list[str]:
    """Return what is in a directory, in any order; nothing if it isn't there.

    Raises:
        OSError: It isn't a directory, or the operating system refuses.
    """
    fault_points.point("fs.list")
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file.

    Raises:
        FileNotFoundError: It isn't there and `missing_ok` is false.
        OSError: Any other failure of the operating system.
    """
    fault_points.point("fs.remove")
    try:
        os.unlink(path)
    except FileNotFoundError:
        if not missing_ok:
            raise


def link_file(path: Path | str, to: Path | str, num_bytes: int) -> bool:
    """Give a plain file of that size another name, which stays when the first one goes.

    Returns:
        False if there is no such file, or the file system, or its state, allows no link.

    Raises:
        OSError: any other failure of the operating system.
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
    """Give a file or a directory another name on the same file system, at once or not at all.

    Raises:
        OSError: The operating system refuses.
    """
    fault_points.point("fs.rename")
    os.rename(path, to)


@contextmanager
def reading(path: Path | str) -> Iterator[int]:
    """Open a plain file for reading within a ``with`` block; symbolic links, devices and pipes are refused.

    Raises:
        OSError: There is no such file, or it isn't a plain one.
    """
    fault_points.point("fs.open")
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotPlainError(path)
        yield file


def size_at(path: Path | str) -> int:
    """Return how many bytes a plain file has.

    Raises:
        OSError: There is no such file, or it isn't a plain one.
    """
    fault_points.point("fs.size")
    state = os.lstat(path)
    if not stat.S_ISREG(state.st_mode):
        raise NotPlainError(path)
    return state.st_size


def is_dir(path: Path) -> bool:
    """Return whether a directory is there, and no link to one.

    Raises:
        OSError: There is nothing.
    """
    return stat.S_ISDIR(os.lstat(path).st_mode)


def is_plain(path: Path) -> bool:
    """Return whether a plain file is there, and no link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def size_of(file: int) -> int:
    """Return how many bytes an open file has."""
    return os.fstat(file).st_size


def read_into(file: int, buffer: Any, offset: int) -> int:
    """Fill a buffer with what stands in an open file from `offset` on; return how many bytes there were.

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
    """Return what a call returns, and hold a file's lock meanwhile; it ends with the process, whatever ends that.

    No context manager: a second interrupt at the begin of its `__exit__` would keep the lock for as long as the
    traceback lives. Python looks for no signal between `finally` and a function of C.

    Args:
        path: The file, which is made if need be and stays.
        owner: What it says of who holds it.
        call: What is done meanwhile.

    Raises:
        BlockingIOError: Somebody else holds it; its message is what that one wrote.
        OSError: Any other failure of the operating system; or it isn't a plain file.
    """
    fault_points.point("fs.lock")
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a pipe, for example, which has no position
            raise NotPlainError(path)
        unlock = partial(
            fcntl.flock, file, fcntl.LOCK_UN
        )  # a child that was forked meanwhile has the file open, too
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(os.pread(file, 1 << 10, 0).decode(errors="replace").rstrip()) from None
            os.pwrite(
                file, owner.ljust(_OWNER_BYTES), 0
            )  # to cut the file first would cost what a sync costs
            return call()
        finally:
            unlock()


def remove_tree(path: Path) -> None:
    """Remove a directory and all that is in it, or a file; symbolic links are removed, never followed.

    Raises:
        OSError: The operating system refuses.
    """
    fault_points.point("fs.remove")
    if is_dir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def temporary_place() -> Path:
    """Return the system's place for temporary files."""
    return Path(tempfile.gettempdir())


def temporary_dir(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make an empty directory in the system's place for temporary files.

    It's removed by `cleanup()`, at the end of a `with`, or at the latest when the object is collected or the
    interpreter exits.

    Args:
        prefix: How its name starts.
    """
    fault_points.point("fs.make_dir")
    return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)


def write_all(file: int, pieces: Iterable[Any]) -> int:
    """Write pieces with as few calls as there can be: each lets go of the interpreter's lock, and waits for it.

    Returns:
        How many bytes they have.
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
    """Open a file within a ``with`` block; for this package."""
    owned = Descriptors()
    try:
        yield owned.take(file(path, flags))[0]
    finally:
        close(owned)


def close(owned: Descriptors) -> None:
    """Let go of open files; for this package."""
    with suppress(OSError):  # what has to be on the disk was synced, and there is nothing else to be done
        owned.close()


def free_bytes(path: Path) -> int:
    """Return how many bytes an ordinary user can still write on the file system that holds `path`.

    Raises:
        OSError: There is no such path.
    """
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize
