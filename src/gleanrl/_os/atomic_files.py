"""Files that appear whole or not at all: creation, sync, atomic replacement, and removal of abandoned drafts.

Together with `files`, this is the only access to the file system for writing. Its fault points are `fs.create`,
`fs.write` and `fs.sync`.
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

# Only Linux has this call. On other systems, writeback starts with the sync.
_start_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)
_START, _START_BYTES = 2, 1 << 20  # SYNC_FILE_RANGE_WRITE, and the number of new bytes that is worth a call


class NewFile:
    """A file that is being written. Once `sync` has returned, the whole file is on the disk.

    Callers write several files one after the other and sync them at the same time. The disk then flushes its cache and
    commits its journal once for all of them.

    Args:
        path: Path of the new file; nothing may exist there.
        pieces: Objects with the buffer protocol; they are written in order.
        locked: Whether the file is locked while it is open, so that `remove_abandoned` keeps it.

    Raises:
        FileExistsError: A file or directory exists at `path`.
        OSError: The disk is full, or the operating system fails in another way. The file is removed then.
    """

    def __init__(self, path: Path | str, pieces: Iterable[Any], locked: bool = False) -> None:
        self._path, self._owned, self._file = path, Descriptors(), -1
        self._end = self._begun = 0  # Ends of the appended bytes, and of the bytes whose writeback has begun.
        fault_points.point("fs.create")
        self._open()
        try:
            # Another process may remove the file between its creation and its lock; then create it again.
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
        """Write more bytes; return their number.

        Raises:
            OSError: The disk is full, or the operating system fails in another way. The file is removed then.
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
        """Start writeback of the appended bytes. The call doesn't wait and reports no error; `sync` does both."""
        begun, more = self._begun, self._end - self._begun
        if more and _start_writing is not None:
            self._begun = self._end
            _start_writing(self._file, ctypes.c_int64(begun), ctypes.c_int64(more), _START)

    def cut(self, size: int) -> None:
        """Shorten the file to `size` bytes.

        Raises:
            OSError: The operating system fails. The file is removed then.
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
        """Let a function write the file, which is empty. The function may read and write at any position.

        Args:
            write: Receives the file.
            flushed: Called whenever `write` flushes the file; it may sleep, for example to slow down a background
                write.

        Raises:
            OSError: The disk is full, or the operating system fails in another way. The file is removed then.
            BaseException: Any error of `write`. The file is removed then.
        """
        stream = _Stream(self._file, flushed)
        try:
            write(stream)
        except BaseException:
            self.drop()
            # The library that wrote may have replaced the error by its own.
            if stream.failure is not None:
                raise stream.failure from None
            raise
        finally:
            stream.let_go()

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return files.size_of(self._file)

    def parts(self, size: int) -> Iterator[bytearray]:
        """Yield the written bytes in parts of `size` bytes; the last part may be shorter.

        Raises:
            OSError: The disk fails, or the file became shorter.
        """
        end = self.size
        for offset in range(0, end, size):
            part = bytearray(min(size, end - offset))
            if files.read_into(self._file, part, offset) != len(part):
                raise OSError(errno.EIO, "it became shorter", str(self._path))
            yield part

    def sync(self) -> None:
        """Return once the bytes are on the disk.

        A failed sync is final. It isn't repeated, because the kernel may have dropped the unwritten pages and would
        report success.

        Raises:
            OSError: The disk fails. The file is removed then.
        """
        try:
            fault_points.point("fs.sync")
            os.fsync(self._file)
        except BaseException:
            self.drop()
            raise

    def close(self) -> None:
        """Close the file, synced or not. Further calls have no effect."""
        self._file = -1
        files.close(self._owned)

    def drop(self) -> None:
        """Remove the file and close it. Further calls have no effect."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        finally:
            self.close()


class _Stream(io.RawIOBase, BinaryIO):
    """An open file for libraries that write themselves and may keep writing after an error.

    Attributes:
        failure: The first error of a write (of the operating system, or an interrupt), or None.
    """

    def __init__(self, file: int, flushed: Callable[[], object] | None) -> None:
        self._file, self._at = file, 0
        self.failure: BaseException | None = None
        self._flushed = flushed

    def let_go(self) -> None:
        """Ignore all later reads and writes, because the descriptor's number may soon belong to another file."""
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
        except BaseException as failure:
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
    """Lock a file; return whether it still has a name.

    `remove_abandoned` of another process may have removed it first.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
    return bool(os.fstat(file).st_nlink)


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file atomically: a reader finds the old file or the new one, and either is whole.

    The order makes this hold after a crash, too. The draft is synced before it is renamed, so that the name never
    refers to missing bytes. The folder is synced last, so that the new name is on the disk when this returns.

    Args:
        path: The file to create or replace.
        write: Writes the file; see `NewFile.fill`.

    Raises:
        OSError: The disk is full, or the operating system fails in another way. The old file is still there, unless
            only the sync of the folder failed.
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
    """Remove drafts that `replace_file` left in a folder because its process was killed.

    Drafts in use are locked and stay. So do drafts that this process has no permission to open or remove. An entry with
    such a name that isn't a plain file (a directory, a link, a pipe) was made by another program, and stays.

    Args:
        folder: The folder.
        names: The names of its entries.
        kind: The suffix of the files to be replaced, for example ``".h5"``.

    Raises:
        OSError: The operating system refuses for another reason than missing permission.
    """
    left = re.compile(rf".*{re.escape(kind)}\.tmp-[0-9a-f]{{32}}")
    for name in names:
        if left.fullmatch(name) and files.is_plain(folder / name):
            with (
                suppress(BlockingIOError, FileNotFoundError, PermissionError),
                files.opened(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file,
            ):
                # Raises `BlockingIOError` while the writer of the draft lives.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files.remove_file(folder / name)
