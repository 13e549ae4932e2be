"""Data files that are being written: packs, to which extents are appended, and links to earlier ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gleanrl.checkpoint.earlier import Earlier
from gleanrl.checkpoint.extents import Extent
from gleanrl.checkpoint.manifest import DataFile, file_name
from gleanrl.system import fs
from gleanrl.system.new_files import NewFile
from gleanrl.system.threads import for_each

_SYNCS = 16  # files that are synced at the same time: the disk empties its cache once for those that wait
_FEW, _FEW_BYTES = 4, 1 << 23  # files that one thread syncs in less time than it takes to start others
_UNSYNCED = 64  # files in a batch; while one is synced, another one is written
_UNSYNCED_BYTES = 1 << 28  # about as many in a batch


class Pack:
    """A file to which extents are appended, by one thread at a time.

    Args:
        number: of the file.
        path: where; its name is the file's.
    """

    def __init__(self, number: int, path: str) -> None:
        self.number, self.name, self.size = number, path.rpartition("/")[2], 0
        self.file = NewFile(path, ())

    def append(self, pieces: Iterable[Any]) -> None:
        """Write more.

        Args:
            pieces: anything with the buffer protocol.
        """
        self.size += self.file.append(pieces)

    def cut(self, size: int) -> None:
        """Let only so many bytes be there."""
        self.file.cut(size)
        self.size = size


class Packs:
    """All data files of a folder, and others that belong to it.

    Any thread may use `pack`, `link`, `refuses` and `sync_some`; the others are its owner's, while nobody does.

    Args:
        folder: where.
        earlier: another checkpoint on the same file system; None for no links.
    """

    def __init__(self, folder: Path, earlier: Earlier | None) -> None:
        self._folder, self._earlier = folder, earlier
        self._files: list[Pack | DataFile] = []
        self._links: dict[int, int | None] = {}
        # Of the two above, and of what is unsynced where not only the owner is at it.
        self._lock = threading.Lock()
        self._begun: deque[Pack] = deque()  # nobody writes these now
        self._unsynced: deque[NewFile] = deque()
        self._unsynced_bytes = 0

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The data files, by their numbers."""
        return tuple(DataFile(file.name, file.size) for file in self._files)

    def close(self) -> None:
        """Let go of files that weren't synced because of an error."""
        while self._begun:
            self._begun.pop().file.close()
        while self._unsynced:
            self._unsynced.pop().close()

    @contextmanager
    def pack(self, room: int) -> Iterator[Pack]:
        """Give a pack which nobody else has within the ``with`` block; once it has `room` bytes, it is full."""
        try:
            pack = self._begun.pop()
        except IndexError:
            pack = self._new(file_name)
        try:
            yield pack
        except BaseException:
            pack.file.close()
            raise
        if pack.size < room:
            self._begun.append(pack)
        else:
            self._end(pack)

    def own(self, name: str, fill: Callable[[NewFile], tuple[int, ...]]) -> Extent:
        """Give an extent a file of its own.

        Args:
            name: of the file; its number stands before it if there is one of that name already.
            fill: writes it, and returns its checksums.
        """
        taken = any(file.name == name for file in self._files)
        pack = self._new(lambda number: f"{number:06d}-{name}" if taken else name)
        try:
            checksums = fill(pack.file)
        except BaseException:
            pack.file.close()
            raise
        pack.size = pack.file.size
        self._end(pack)
        return Extent(pack.number, 0, pack.size, checksums)

    def _new(self, name: Callable[[int], str]) -> Pack:
        with self._lock:
            number = len(self._files)
            pack = Pack(number, f"{self._folder}/{name(number)}")
            self._files.append(pack)
        return pack

    def _end(self, pack: Pack) -> None:
        with self._lock:
            self._unsynced.append(pack.file)
            self._unsynced_bytes += pack.size

    def link(self, file: int) -> int | None:
        """Return the number of a link to a file of the earlier checkpoint, by that one's number; None for no links."""
        if self._earlier is None:
            return None
        with self._lock:
            if file not in self._links:
                self._links[file] = self._linked(self._earlier, file)
            return self._links[file]

    def _linked(self, earlier: Earlier, file: int) -> int | None:
        number, size = len(self._files), earlier.files[file].size
        name = file_name(number)
        if not fs.link_file(earlier.place(file), f"{self._folder}/{name}", size):
            return None
        self._files.append(DataFile(name, size))
        return number

    def refuses(self, file: int) -> bool:
        """Return whether a link to a file of the earlier checkpoint was tried in vain."""
        return self._links.get(file, file) is None

    def add(self, name: str, data: bytes) -> None:
        """Write one more file of that name, which is no data file."""
        self._unsynced.append(NewFile(f"{self._folder}/{name}", [data]))

    def start(self) -> None:
        """Let what stands in files that aren't full be on its way to the disk; what stands in others is."""
        for pack in self._begun:
            pack.file.start()

    def sync_some(self, unhurried: bool) -> None:
        """Sync what has been ended, if that is much.

        Args:
            unhurried: whether one file is synced after the other.
        """
        if len(self._unsynced) >= _UNSYNCED or self._unsynced_bytes >= _UNSYNCED_BYTES:
            self._sync_batch(unhurried)

    def sync(self, unhurried: bool) -> None:
        """Return once all that was written until now is on the disk, with its names."""
        while self._begun:
            self._end(self._begun.pop())
        while len(self._unsynced) > _UNSYNCED:
            self._sync_batch(unhurried)
        # Together: each waits for the disk once.
        self._sync_batch(unhurried, partial(fs.sync_dir, self._folder))

    def _sync_batch(self, unhurried: bool, *others: Callable[[], object]) -> None:
        """Sync files, many at a time, and make other calls beside."""
        with self._lock:
            files = [self._unsynced.popleft() for _ in range(min(_UNSYNCED, len(self._unsynced)))]
            self._unsynced_bytes = 0
        calls = [*(file.sync for file in files), *others]
        try:
            few = len(files) <= _FEW and sum(file.size for file in files) <= _FEW_BYTES
            for_each(lambda call: call(), calls, 1 if unhurried or few else _SYNCS)
        finally:
            for file in files:
                file.close()
