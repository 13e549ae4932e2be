"""Files that are made: written, synced, put in the place of older ones; and what is left where that was cut short.

A part of the seam to the file system, see `fs`; the fault points are `fs.create`, `fs.write`, `fs.sync`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from gleanrl._os import fault_points, files
from gleanrl._os.files import Descriptors

# Linux alone has it; elsewhere the bytes are on their way from the sync on.
_start_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)
_START, _START_BYTES = 2, 1 << 20  # SYNC_FILE_RANGE_WRITE; as many as are worth a call


class NewFile:
    """A file that is being written; it's on the disk, and whole, once `sync` has returned.

    Several of them are written one after the other, and synced at the same time: the disk has one queue to work off
    then, and empties its cache, and closes its journal, once for many.

    Args:
        path: Where; nothing may be there yet.
        pieces: Anything with the buffer protocol; they are written one after the other.
        locked: Whether it's locked while it is open, so that `remove_abandoned` spares it.

    Raises:
        FileExistsError: Something is at `path`.
        OSError: The disk is full, or any other failure of the operating system; nothing is left behind.
    """

    def __init__(self, path: Path | str, pieces: Iterable[Any], locked: bool = False) -> None:
        self._path, self._owned, self._file = path, Descriptors(), -1
        self._end = self._begun = 0  # of what was appended, and of what is on its way to the disk
        fault_points.point("fs.create")
        self._open()
        try:
            while locked and not _lock_named(self._file):
                self.close()
                self._open()
        except BaseException:
            self.drop()
            raise
        self.append(pieces)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = self._owned.take(files.file(self._path, flags))[0]

    def append(self, pieces: Iterable[Any]) -> int:
        """Write more; return how many bytes that were.

        Raises:
            OSError: The disk is full, or any other failure of the operating system; nothing is left behind.
        """
        try:
            fault_points.point("fs.write")
            count = files.write_all(self._file, pieces)
            self._end += count
            if self._end - self._begun >= _START_BYTES:
                self.start()
        except BaseException:
            self.drop()
            raise
        return count

    def start(self) -> None:
        """Let what was appended be on its way to the disk. Nobody waits, or learns how it ends: `sync` does."""
        begun, more = self._begun, self._end - self._begun
        if more and _start_writing is not None:
            self._begun = self._end
            _start_writing(self._file, ctypes.c_int64(begun), ctypes.c_int64(more), _START)

    def cut(self, size: int) -> None:
        """Let only the first bytes of what was appended be there.

        Raises:
            OSError: Any failure of the operating system; nothing is left behind.
        """
        try:
            fault_points.point("fs.write")
            os.ftruncate(self._file, size)
            os.lseek(self._file, size, os.SEEK_SET)
        except BaseException:
            self.drop()
            raise
        self._end, self._begun = size, min(self._begun, size)

    def fill(self, write: Callable[[BinaryIO], object], flushed: Callable[[], object] | None = None) -> None:
        """Have somebody write it who reads and writes anywhere in it; it is empty.

        Args:
            write: gets the file.
            flushed: is called whenever `write` flushes it: there he bears to be held up.

        Raises:
            OSError: The disk is full, or any other failure of the operating system; nothing is left behind.
            BaseException: What `write` raised; nothing is left behind.
        """
        stream = _Stream(self._file, flushed)
        try:
            write(stream)
        except BaseException:
            self.drop()
            if stream.failure is not None:  # who wrote may have made something else of it
                raise stream.failure from None
            raise
        finally:
            stream.let_go()

    @property
    def size(self) -> int:
        """The bytes that it has."""
        return files.size_of(self._file)

    def parts(self, size: int) -> Iterator[bytearray]:
        """Yield what was written, in parts of that size.

        Raises:
            OSError: The disk fails.
        """
        end = self.size
        for offset in range(0, end, size):
            part = bytearray(min(size, end - offset))
            if files.read_into(self._file, part, offset) != len(part):
                raise OSError(errno.EIO, "it became shorter", str(self._path))
            yield part

    def sync(self) -> None:
        """Return once the bytes are on the disk. A sync that failed is final: it's never tried again.

        Raises:
            OSError: The disk fails; nothing is left behind.
        """
        try:
            fault_points.point("fs.sync")
            os.fsync(self._file)
        except BaseException:
            self.drop()
            raise

    def close(self) -> None:
        """Let go of the file, be it synced or not; may be done twice."""
        self._file = -1
        files.close(self._owned)

    def drop(self) -> None:
        """Remove the file; may be done twice."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        finally:
            self.close()


class _Stream(io.RawIOBase, BinaryIO):
    """An open file for libraries that write by themselves, and may be late to notice that they were broken off.

    Attributes:
        failure: What the operating system refused.
    """

    def __init__(self, file: int, flushed: Callable[[], object] | None) -> None:
        self._file, self._at = file, 0
        self.failure: OSError | None = None
        self._flushed = flushed

    def let_go(self) -> None:
        """Do nothing more, whatever is asked for: the descriptor may soon be another file's."""
        self._file, self._flushed = -1, None

    def flush(self) -> None:
        if self._flushed is not None:
            self._flushed()

    def readinto(self, buffer: Any) -> int:
        count = files.read_into(self._file, buffer, self._at) if self._file >= 0 else 0
        self._at += count
        return count

    def write(self, data: Any) -> int:
        try:
            fault_points.point("fs.write")
            left = memoryview(data).cast("B")
            count = len(left)
            while left and self._file >= 0:
                done = os.pwrite(self._file, left, self._at)
                self._at, left = self._at + done, left[done:]
        except OSError as failure:
            self.failure = self.failure or failure
            raise
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        end = files.size_of(self._file) if self._file >= 0 else 0
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: end}[whence]
        self._at = start + offset
        return self._at

    def truncate(self, size: int | None = None) -> int:
        size = self._at if size is None else size
        if self._file >= 0:
            os.ftruncate(self._file, size)
        return size

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _lock_named(file: int) -> bool:
    """Lock a file; return whether it still has a name: who collects what is abandoned may have been faster."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return bool(os.fstat(file).st_nlink)


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Put a file where another one may be: at any moment there is the old one or the new one, whole.

    Args:
        path: Where.
        write: Writes it; see `NewFile.fill`.

    Raises:
        OSError: The disk is full, or any other failure of the operating system; the old file is still there.
    """
    draft = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    file = NewFile(draft, (), locked=True)
    try:
        file.fill(write)
        file.sync()
        files.rename(draft, path)
    except BaseException:
        file.drop()
        raise
    finally:
        file.close()
    files.sync_dir(path.parent)


def remove_abandoned(folder: Path, names: Iterable[str], kind: str) -> None:
    """Remove what processes that were killed in `replace_file` left in a folder; what is being written stays.

    What has such a name and isn't a plain file (a directory, a link, a pipe) was made by another program, and stays.

    Args:
        folder: Where.
        names: What is in it.
        kind: The suffix of the files that were to be replaced, ``".h5"`` say.

    Raises:
        OSError: The operating system refuses, other than for want of permission.
    """
    left = re.compile(rf".*{re.escape(kind)}\.tmp-[0-9a-f]{{32}}")
    for name in names:
        if left.fullmatch(name) and files.is_plain(folder / name):
            with (
                suppress(BlockingIOError, FileNotFoundError, PermissionError),
                files.opened(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file,
            ):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files.remove_file(folder / name)
