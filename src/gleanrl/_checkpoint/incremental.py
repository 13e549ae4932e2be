"""Data files that are being written: packs, to which extents are appended, and links to earlier ones.

An earlier checkpoint, as one that is being written sees it: what it has, and which of its files are worth a link.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl._checkpoint.manifest import DataFile, Extent, Extents, Manifest, file_name, stored_in
from gleanrl._checkpoint.row_segments import Array, SegmentLayout
from gleanrl._checkpoint.tree_codec import LARGE_BYTES, layout_of
from gleanrl._os import files as fs
from gleanrl._os.atomic_files import NewFile
from gleanrl._os.threads import for_each
from gleanrl.errors import CorruptCheckpointError

_GARBAGE = 0.5  # of the bytes that are needed: so many that aren't may lie beside them in linked files
_MOST_FILES, _BYTES_A_FILE = 32, 1 << 25  # that are linked; more where each has so many bytes
_MERGED = 3  # files that are written anew, at least, once there are too many


@dataclass(frozen=True)
class SegmentTable:
    """Rows of an earlier checkpoint.

    Attributes:
        layout: how they lie.
        identity: their name.
        extents: one for each segment.
    """

    layout: SegmentLayout
    identity: str
    extents: Extents

    def common(self, layout: SegmentLayout) -> int:
        """Return how many segments, the first ones, are cut like those of a layout of the same step."""
        rows = min(layout.rows, self.layout.rows)
        return layout.count if layout.rows == self.layout.rows else rows // layout.step


@dataclass(frozen=True)
class Earlier:
    """A checkpoint that may hold some of the same bytes.

    Attributes:
        path: its folder.
        kind: what it is a state of.
        files: its data files.
        arrays: the extents of each large array, in the order of the tree.
        tables: all rows, likewise.
    """

    path: Path
    kind: str
    files: tuple[DataFile, ...]
    arrays: Sequence[Extents]
    tables: Sequence[SegmentTable]

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Earlier:
        """Return a checkpoint by what is noted of it.

        What isn't as it should be is none, what stands where others do included.
        """
        contents = _Contents(manifest.extents)
        for node in stored_in(manifest.state):
            if "$rows" in node:
                contents.note_rows(node)
            elif "$tensor" in node:
                contents.note_array(node["$tensor"])
        return cls(path, manifest.kind, manifest.files, contents.arrays, contents.tables)

    def table(self, number: int, layout: SegmentLayout) -> SegmentTable | None:
        """Return the rows that stand where the `number`-th ones of the new checkpoint do, if they lie alike."""
        if number >= len(self.tables):
            return None
        table = self.tables[number]
        alike = (table.layout.fields, table.layout.step) == (layout.fields, layout.step)
        return table if alike else None

    def place(self, file: int) -> str:
        """Return where a file is, by its number."""
        return f"{self.path}/{self.files[file].name}"

    def worth_keeping(self, needed: Mapping[int, int], total: int) -> set[int]:
        """Return the files that are worth a link.

        What else is needed is written anew, so that what nobody needs any more goes with its file, and there is no more
        of that than half of what the checkpoint has. Files with the largest share of it go first; so do small ones
        where there are many, of which a few become one.

        Args:
            needed: by the number of a file, how many of its bytes the new checkpoint needs, or may: what turns out
                to be otherwise, once it's compared, is left to the next checkpoint.
            total: how many it has.
        """
        sizes = {number: self.files[number].size for number in needed}
        kept = sorted(needed, key=lambda number: needed[number] / sizes[number], reverse=True)
        garbage = sum(sizes[number] - needed[number] for number in kept)
        while garbage > _GARBAGE * total:
            number = kept.pop()
            garbage -= sizes[number] - needed[number]
        most = max(_MOST_FILES, total // _BYTES_A_FILE)
        if len(kept) >= most:
            kept.sort(key=lambda number: needed[number], reverse=True)
            del kept[min(most, len(kept) - _MERGED) :]
        return set(kept)


class _Contents:
    """What is found in extents."""

    def __init__(self, extents: Extents) -> None:
        self.arrays: list[Extents] = []
        self.tables: list[SegmentTable] = []
        self._extents, self._taken = extents, np.zeros(len(extents), bool)

    def note_rows(self, tree: dict[str, Any]) -> None:
        try:
            layout, first, identity = layout_of(tree)
        except (CorruptCheckpointError, LookupError, TypeError, ValueError):
            return
        if layout.count > len(self._extents) - first:
            return
        numbers = np.arange(first, first + layout.count)
        found = self._extents.take(numbers)
        if np.array_equal(found.sizes, layout.sizes()) and self._new(numbers):
            self.tables.append(SegmentTable(layout, identity, found))

    def note_array(self, pieces: Any) -> None:
        try:
            size, numbers = sum(size for _, _, size in pieces), [number for number, _, _ in pieces]
        except (TypeError, ValueError):
            return
        if size < LARGE_BYTES:
            return
        there = all(type(number) is int and 0 <= number < len(self._extents) for number in numbers)
        places = np.array(numbers if there else (), np.int64)
        self.arrays.append(self._extents.take(places if self._new(places) else places[:0]))

    def _new(self, numbers: Array) -> bool:
        """Return whether nothing else stands in any of these extents."""
        free = not self._taken[numbers].any() and len(set(numbers.tolist())) == len(numbers)
        self._taken[numbers] = True
        return free


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
