"""Incremental checkpoints: the earlier checkpoint that data can be linked from, and the data files being written."""

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

_GARBAGE = 0.5  # The most unneeded bytes in linked files, as a share of the checkpoint's size.
# The most linked files. Larger checkpoints may link one for each `_BYTES_A_FILE`.
_MOST_FILES, _BYTES_A_FILE = 32, 1 << 25
_MERGED = 3  # The fewest files whose content is rewritten once there are too many.


@dataclass(frozen=True)
class SegmentTable:
    """Rows of an earlier checkpoint.

    Attributes:
        layout: their layout.
        identity: the identity of the rows, see `Segmented`.
        extents: one extent for each segment.
    """

    layout: SegmentLayout
    identity: str
    extents: Extents

    def common(self, layout: SegmentLayout) -> int:
        """Return how many of the first segments have the same rows in a layout with the same step."""
        rows = min(layout.rows, self.layout.rows)
        return layout.count if layout.rows == self.layout.rows else rows // layout.step


@dataclass(frozen=True)
class Earlier:
    """A checkpoint that may contain some of the bytes to write.

    Attributes:
        path: its folder.
        kind: the kind of the state's owner.
        files: its data files.
        arrays: the extents of each large array, in the order of the tree.
        tables: all rows in segments, in the order of the tree.
    """

    path: Path
    kind: str
    files: tuple[DataFile, ...]
    arrays: Sequence[Extents]
    tables: Sequence[SegmentTable]

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Earlier:
        """Return the checkpoint that a manifest describes.

        Malformed entries are skipped, and so are entries whose extents belong to another entry. Skipped data are
        written again.
        """
        contents = _Contents(manifest.extents)
        for node in stored_in(manifest.state):
            if "$rows" in node:
                contents.note_rows(node)
            elif "$tensor" in node:
                contents.note_array(node["$tensor"])
        return cls(path, manifest.kind, manifest.files, contents.arrays, contents.tables)

    def table(self, number: int, layout: SegmentLayout) -> SegmentTable | None:
        """Return the `number`-th rows of this checkpoint if their fields and step match `layout`, or None."""
        if number >= len(self.tables):
            return None
        table = self.tables[number]
        alike = (table.layout.fields, table.layout.step) == (layout.fields, layout.step)
        return table if alike else None

    def file_path(self, file: int) -> str:
        """Return the path of a data file, by its number."""
        return f"{self.path}/{self.files[file].name}"

    def worth_keeping(self, needed: Mapping[int, int], total: int) -> set[int]:
        """Return the files that are worth a link.

        Needed data in all other files are rewritten, so that files with garbage can be dropped. Garbage stays below
        half of the checkpoint's size. Files with the largest share of garbage are dropped first. If there are too many
        files, the data of a few small ones are rewritten together.

        Args:
            needed: for each file, how many of its bytes the new checkpoint may need. The later comparison may find some
                of them changed. The next checkpoint then counts them as garbage.
            total: the bytes of the new checkpoint.
        """
        sizes = {number: self.files[number].size for number in needed}
        retained = sorted(needed, key=lambda number: needed[number] / sizes[number], reverse=True)
        garbage = sum(sizes[number] - needed[number] for number in retained)
        while garbage > _GARBAGE * total:
            number = retained.pop()
            garbage -= sizes[number] - needed[number]
        most = max(_MOST_FILES, total // _BYTES_A_FILE)
        if len(retained) >= most:
            retained.sort(key=lambda number: needed[number], reverse=True)
            del retained[min(most, len(retained) - _MERGED) :]
        return set(retained)


class _Contents:
    """Collects the arrays and rows that a manifest's extents hold."""

    def __init__(self, extents: Extents) -> None:
        self.arrays: list[Extents] = []
        self.tables: list[SegmentTable] = []
        self._extents, self._claimed = extents, np.zeros(len(extents), bool)

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
        """Return whether these extents are distinct and belong to no earlier entry, and mark them as taken."""
        free = not self._claimed[numbers].any() and len(set(numbers.tolist())) == len(numbers)
        self._claimed[numbers] = True
        return free


_SYNCS = 16  # Files that are synced at the same time. One flush of the disk's cache serves all waiting syncs.
_FEW, _FEW_BYTES = 4, 1 << 23  # For fewer files or bytes, starting threads takes longer than the syncs.
_UNSYNCED = 64  # The most unsynced files. One thread syncs a batch of them while another writes.
_UNSYNCED_BYTES = 1 << 28  # the same limit in bytes


class Pack:
    """A data file to which one thread at a time appends extents. The constructor creates the file.

    Args:
        number: the number of the file.
        path: its path; the last part is its name in the manifest.
    """

    def __init__(self, number: int, path: str) -> None:
        self.number, self.name, self.size = number, path.rpartition("/")[2], 0
        self.file = NewFile(path, ())

    def append(self, pieces: Iterable[Any]) -> None:
        """Append bytes.

        Args:
            pieces: objects with the buffer protocol.
        """
        self.size += self.file.append(pieces)

    def cut(self, size: int) -> None:
        """Shorten the file to `size` bytes."""
        self.file.cut(size)
        self.size = size


class Packs:
    """All data files of a checkpoint that is being written, and its other files.

    Any thread may call `pack`, `link`, `refuses` and `sync_some`. Only the owner may call the other methods, and only
    while no other thread uses this object.

    Args:
        folder: the folder of the new checkpoint.
        earlier: another checkpoint on the same file system; None for no links.
    """

    def __init__(self, folder: Path, earlier: Earlier | None) -> None:
        self._folder, self._earlier = folder, earlier
        self._files: list[Pack | DataFile] = []
        self._links: dict[int, int | None] = {}
        # Protects the two fields above. While several threads write, it also protects the unsynced files.
        self._lock = threading.Lock()
        # Packs that aren't full and that no thread uses. `pop` and `append` are atomic, so they need no lock.
        self._begun: deque[Pack] = deque()
        self._unsynced: deque[NewFile] = deque()
        self._unsynced_bytes = 0

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The data files, in the order of their numbers."""
        return tuple(DataFile(file.name, file.size) for file in self._files)

    def close(self) -> None:
        """Close the files that an error has left unsynced."""
        while self._begun:
            self._begun.pop().file.close()
        while self._unsynced:
            self._unsynced.pop().close()

    @contextmanager
    def pack(self, room: int) -> Iterator[Pack]:
        """Provide a pack that only this ``with`` block uses.

        A pack of `room` bytes or more is full and isn't provided again. After an error in the block, its file is
        closed, and the checkpoint can't be completed.
        """
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
        """Write a separate file with one extent; return the extent, which is empty if the file is.

        Args:
            name: the name of the file. If it is taken, the file's number is put before it.
            fill: writes the file, and returns its checksums.
        """
        exists = any(file.name == name for file in self._files)
        pack = self._new(lambda number: f"{number:06d}-{name}" if exists else name)
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
        """Link a file of the earlier checkpoint; return the number of the link, or None if it can't be linked.

        Later calls for the same file return the same number, and make no further link.

        Args:
            file: the number of the file in the earlier checkpoint.
        """
        if self._earlier is None:
            return None
        with self._lock:
            if file not in self._links:
                self._links[file] = self._linked(self._earlier, file)
            return self._links[file]

    def _linked(self, earlier: Earlier, file: int) -> int | None:
        number, size = len(self._files), earlier.files[file].size
        name = file_name(number)
        if not fs.link_file(earlier.file_path(file), f"{self._folder}/{name}", size):
            return None
        self._files.append(DataFile(name, size))
        return number

    def refuses(self, file: int) -> bool:
        """Return whether linking this file of the earlier checkpoint has failed before."""
        return self._links.get(file, file) is None

    def add(self, name: str, data: bytes) -> None:
        """Write a further file that isn't a data file, such as the manifest; `sync` syncs it."""
        self._unsynced.append(NewFile(f"{self._folder}/{name}", [data]))

    def start(self) -> None:
        """Start writeback of files that aren't full. Full files are already in writeback."""
        for pack in self._begun:
            pack.file.start()

    def sync_some(self, unhurried: bool) -> None:
        """Sync full files if many are unsynced.

        Args:
            unhurried: whether to sync one file after the other.
        """
        if len(self._unsynced) >= _UNSYNCED or self._unsynced_bytes >= _UNSYNCED_BYTES:
            self._sync_batch(unhurried)

    def sync(self, unhurried: bool) -> None:
        """Sync all files, full or not, and return once they are on the disk with their names.

        A file that can't be synced is removed, and the call raises `OSError`.
        """
        while self._begun:
            self._end(self._begun.pop())
        while len(self._unsynced) > _UNSYNCED:
            self._sync_batch(unhurried)
        # Files and folder together, because one flush of the disk can serve all of them.
        self._sync_batch(unhurried, partial(fs.sync_dir, self._folder))

    def _sync_batch(self, unhurried: bool, *extra: Callable[[], object]) -> None:
        """Sync one batch of files, several at a time, and make other calls at the same time."""
        with self._lock:
            files = [self._unsynced.popleft() for _ in range(min(_UNSYNCED, len(self._unsynced)))]
            self._unsynced_bytes = 0
        calls = [*(file.sync for file in files), *extra]
        try:
            few = len(files) <= _FEW and sum(file.size for file in files) <= _FEW_BYTES
            for_each(lambda call: call(), calls, 1 if unhurried or few else _SYNCS)
        finally:
            for file in files:
                file.close()
