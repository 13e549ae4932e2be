"""Writing of a checkpoint's data files: arrays and row segments with checksums, or links to an earlier checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from typing_extensions import Self

from gleanrl._arrays.native import crc32
from gleanrl._checkpoint.incremental import Earlier, Pack, Packs, SegmentTable
from gleanrl._checkpoint.manifest import BLOCK_BYTES, DataFile, Extent, Extents
from gleanrl._checkpoint.row_segments import ALIGNMENT, Array, SavedRows
from gleanrl._checkpoint.tree_codec import ATTACHED, LARGE_BYTES, ArrayPieces, Attachment
from gleanrl._os import files
from gleanrl._os.atomic_files import NewFile
from gleanrl._os.clock import Pace
from gleanrl._os.threads import for_each
from gleanrl.errors import CheckpointError

FILE_BYTES = 1 << 26
"""A file of this size is full, and so is an extent of small arrays."""
# The data are divided into about 8 files, each between the next number and `FILE_BYTES`. A link keeps a whole file, so
# several files leave less garbage. Few files need few syncs.
_FILES, _LEAST_FILE_BYTES = 8, 1 << 22
_COARSE_BYTES = 1 << 26  # A larger array is cut into larger pieces.
_PIECE_BYTES = 1 << 18  # bytes of one comparison
# Up to this size one thread writes; two would mostly wait for each other's interpreter lock.
_FEW_BYTES = 1 << 22
_THREADS = 2  # Threads that write; two keep a disk busy.
_SHARE_ASIDE = 0.15  # share of a processor for a background write
# Bytes written between two rests of a background write. Other threads wait no longer than one such write.
_STINT_BYTES = 1 << 18


@dataclass(slots=True)
class _Job:
    """An extent to write, unless an earlier checkpoint has the same bytes."""

    number: int
    size: int
    pieces: list[Array]
    """Its bytes; empty if they come from `make` or `source`."""
    make: Callable[[], Array] | None = None
    """Returns its bytes."""
    source: SavedRows | None = None
    segment: int = 0
    earlier: Extent | None = None
    """The extent of an earlier checkpoint that may have the same bytes."""


@dataclass(slots=True)
class _Rows:
    """Rows whose segments belong to the checkpoint."""

    source: SavedRows
    first: int
    """The number of the extent of the first segment."""
    table: SegmentTable | None
    """The rows of the earlier checkpoint at the same position, if they have the same layout."""
    same: Array
    """Which segments are known to be the same there, ``(n,)`` bool."""
    alike: Array
    """Which segments may be the same there and must be compared, ``(n,)`` bool."""

    @property
    def jobs(self) -> Iterator[_Job]:
        """The jobs of all segments that aren't known to be the same."""
        layout = self.source.layout
        for segment in np.flatnonzero(~self.same).tolist():
            job = _Job(self.first + segment, layout.size(segment), [], None, self.source, segment)
            if self.table is not None and self.alike[segment]:
                job.earlier = self.table.extents[segment]
            yield job

    def within(self, extents: Extents) -> SegmentTable:
        """Return the rows with their extents, selected from all extents."""
        layout = self.source.layout
        return SegmentTable(layout, self.source.identity, extents.take(self.first + np.arange(layout.count)))


class FileWriter:
    """Collects data, and writes them to data files of a folder. Used in a ``with`` block.

    Data that an earlier checkpoint has aren't written; its file is linked instead. Changes are known from the rows'
    source or found by comparing bytes. All other data are written one after the other into few files, by several
    threads if there are many.

    Args:
        folder: the new folder, which is empty.
        earlier: another checkpoint on the same file system; None for no links.
        aside: an event, for a background write. Until it is set, one thread writes and rests most of the time, so that
            other threads are hardly delayed. None for full speed from the start.
    """

    def __init__(self, folder: Path, earlier: Earlier | None = None, aside: Event | None = None) -> None:
        self._earlier, self._packs = earlier, Packs(folder, earlier)
        self._aside, self._pace = aside, Pace(_SHARE_ASIDE)
        self._jobs: list[_Job] = []
        self._rows: list[_Rows] = []
        self._large: list[Array] = []  # the numbers of the extents of each large array
        self._shared: _Job | None = None  # the extent for small arrays
        self._count = self._room = 0  # the number of extents so far, and the size at which a file is full
        self._linked: list[tuple[Array, Extents]] = []  # linked segments, with the numbers of their extents
        self._extents: dict[int, Extent] = {}  # all other extents that are written or linked
        self._all = Extents.of(())

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close files that an error has left unsynced."""
        self._packs.close()

    def store(self, data: Array) -> list[list[int]]:
        """Add the bytes of an array; return their future position. The caller must not change them until `write` ends.

        Returns:
            ``[extent, offset, bytes]`` for each piece, in order.
        """
        if data.size >= LARGE_BYTES:
            return self._store_large(data)
        if not data.size:
            return []
        job = self._shared
        if job is None or job.size >= FILE_BYTES:
            job = self._shared = self._add(0, [])
        piece = [job.number, job.size, data.size]
        padding = -data.size % ALIGNMENT
        job.pieces += [data] + ([np.zeros(padding, np.uint8)] if padding else [])
        job.size += data.size + padding
        return [piece]

    def _store_large(self, data: Array) -> list[list[int]]:
        """Cut a large array into extents. Unchanged ones can be linked separately."""
        step = _step(data.size)
        pieces = [data[begin : begin + step] for begin in range(0, data.size, step)]
        return self._places([self._add(piece.size, [piece]) for piece in pieces])

    def pieces(self, value: ArrayPieces) -> list[list[int]]:
        """Add a tensor of at least `LARGE_BYTES`, which `write` will make; return its position as `store` does."""
        jobs = []
        for start, stop in value.cut(_step(value.width * value.shape[0])):
            jobs.append(self._add((stop - start) * value.width, []))
            jobs[-1].make = partial(value.make, start, stop)
        return self._places(jobs)

    def _places(self, jobs: list[_Job]) -> list[list[int]]:
        """Return the future position of a large array, and find the extents of the earlier one to compare it with."""
        position = len(self._large)
        before = [] if self._earlier is None else self._earlier.arrays[position : position + 1]
        self._large.append(np.array([job.number for job in jobs]))
        for job, earlier in zip(jobs, before[0] if before else (), strict=False):
            if job.size == earlier.size:
                job.earlier = earlier
        return [[job.number, 0, job.size] for job in jobs]

    def attach(self, attachment: Attachment) -> list[list[int]]:
        """Write an attachment to a separate file now; return its position, as `store` does. `sync` syncs the file.

        Raises:
            CheckpointError: its name isn't valid for an attachment.
        """
        name, content = attachment.name, attachment.content
        if not ATTACHED.fullmatch(name):
            raise CheckpointError(
                f"attachment: expected a name that matches {ATTACHED.pattern}, got {name!r:.200}"
            )

        def fill(file: NewFile) -> tuple[int, ...]:
            if callable(content):
                file.fill(content, self._rest)
            else:
                file.append([content])
            return checksums(file.parts(BLOCK_BYTES))

        found = self._packs.own(name, fill)
        self._packs.sync_some(self._unhurried)
        if not found.size:
            return []
        number = self._reserve(1)
        self._extents[number] = found
        return [[number, 0, found.size]]

    def segments(self, source: SavedRows) -> int:
        """Add rows; return the number of the extent of their first segment.

        The other segments have the numbers after it.
        """
        layout = source.layout
        first = self._reserve(layout.count)
        table = None if self._earlier is None else self._earlier.table(len(self._rows), layout)
        same, alike = np.zeros(layout.count, bool), np.zeros(layout.count, bool)
        if table is not None:
            known, common = source.unchanged(table.identity), table.common(layout)
            if known is None:
                alike[:common] = True
            else:  # The source knows all changes, so the other segments need no comparison.
                same[:common] = known[:common]
        self._rows.append(_Rows(source, first, table, same, alike))
        return first

    def _reserve(self, count: int) -> int:
        """Reserve `count` extent numbers; return the first one."""
        first = self._count
        self._count += count
        return first

    def _add(self, size: int, pieces: list[Array]) -> _Job:
        job = _Job(self._reserve(1), size, pieces)
        self._jobs.append(job)
        return job

    def write(self) -> tuple[tuple[DataFile, ...], Extents]:
        """Write the data that the earlier checkpoint lacks, link the rest, and return files and extents.

        New files are on the disk only after `sync`. All rows are closed at the end, also after an error.

        Raises:
            OSError: the disk is full, or fails.
        """
        total = sum(job.size for job in self._jobs) + sum(extent.size for extent in self._extents.values())
        total += sum(rows.source.layout.total for rows in self._rows)
        self._room = min(max(total // _FILES, _LEAST_FILE_BYTES), FILE_BYTES)
        if self._earlier is not None:
            self._choose(self._earlier, total)
        try:
            for rows in self._rows:
                rows.source.begin()
            for rows in self._rows:  # First, so that writers to the buffer don't have to copy these segments.
                self._link(rows)
            jobs = self._in_order()
            left = sum(job.size for job in jobs)
            for_each(self._put, jobs, 1 if self._aside is not None or left <= _FEW_BYTES else _THREADS)
        finally:
            for rows in self._rows:
                rows.source.close()
        self._packs.start()
        numbers = np.fromiter(self._extents.keys(), np.int64)
        parts = [*self._linked, (numbers, Extents.of(self._extents.values()))]
        self._all = Extents.together(parts, self._count)
        return self._packs.files, self._all

    def _choose(self, earlier: Earlier, total: int) -> None:
        """Decide which files of the earlier checkpoint may be linked. Data in its other files are written again.

        A linked file keeps all of its bytes on the disk, so files with much garbage aren't linked; see
        `Earlier.worth_keeping`.
        """
        needed = Counter[int]()
        for job in self._jobs:
            if job.earlier is not None:
                needed[job.earlier.file] += job.size
        tables = [
            (rows, rows.table.extents, np.flatnonzero(rows.same | rows.alike))
            for rows in self._rows
            if rows.table is not None
        ]
        for _, extents, numbers in tables:
            sizes = np.bincount(extents.files[numbers], extents.sizes[numbers])
            needed.update({int(file): int(sizes[file]) for file in np.flatnonzero(sizes)})
        linkable = earlier.worth_keeping(needed, total)
        if len(linkable) < len(needed):
            for job in self._jobs:
                if job.earlier is not None and job.earlier.file not in linkable:
                    job.earlier = None
            stays = np.zeros(len(earlier.files), bool)
            stays[np.array([*linkable], np.int64)] = True
            for rows, extents, numbers in tables:
                gone = numbers[~stays[extents.files[numbers]]]
                rows.same[gone] = rows.alike[gone] = False

    def _link(self, rows: _Rows) -> None:
        """Link segments that are known to be the same. If a file can't be linked, its segments are written."""
        if self._earlier is None or rows.table is None or not rows.same.any():
            return
        numbers, found = np.flatnonzero(rows.same), rows.table.extents
        to = np.full(len(self._earlier.files), -1)
        for file in set(found.files[numbers].tolist()):
            link = self._packs.link(file)
            to[file] = -1 if link is None else link
        linked = to[found.files[numbers]] >= 0
        rows.same[numbers[~linked]] = False
        numbers = numbers[linked]
        self._linked.append((rows.first + numbers, found.take(numbers).within(to)))
        rows.source.skip(numbers.tolist())

    def _in_order(self) -> list[_Job]:
        """Return the jobs in the best order: arrays first, then segments by the order of their source."""
        jobs = [*self._jobs, *(job for rows in self._rows for job in rows.jobs)]

        def order(job: _Job) -> int:
            return -1 if job.source is None else job.source.position(job.segment)

        return sorted(jobs, key=order)

    def as_earlier(self, path: Path, kind: str) -> Earlier:
        """Return the written checkpoint as the earlier one of the next commit.

        Args:
            path: the final path of the folder.
            kind: the kind of the state's owner.
        """
        arrays = [self._all.take(numbers) for numbers in self._large]
        tables = [rows.within(self._all) for rows in self._rows]
        return Earlier(path, kind, self._packs.files, arrays, tables)

    def add(self, name: str, data: bytes) -> None:
        """Write a further file that isn't a data file; `sync` syncs it."""
        self._packs.add(name, data)

    def sync(self) -> None:
        """Return once all written files are on the disk, with their names."""
        self._packs.sync(self._unhurried)

    def _put(self, job: _Job) -> None:
        """Write an extent, or link it if an earlier checkpoint has the same bytes."""
        found = self._stored(job) if job.source is None else self._stored_segment(job.source, job)
        self._extents[job.number] = found
        self._packs.sync_some(self._unhurried)
        self._rest()

    def _stored(self, job: _Job) -> Extent:
        pieces = job.pieces if job.make is None else [job.make().reshape(-1)]
        found = self._same(job, pieces)
        if found is None:
            with self._packs.pack(self._room) as pack:
                found = self._appended(pack, pieces)
        return found

    def _stored_segment(self, source: SavedRows, job: _Job) -> Extent:
        """Write a segment directly from live memory. If another thread changed it meanwhile, write a copy instead."""
        number = job.segment
        live = source.look(number)
        same = None if live is None else self._same(job, live)
        if same is not None and source.settled(number):
            return same
        with self._packs.pack(self._room) as pack:
            if live is not None and same is None:
                found = self._appended(pack, live)
                if source.settled(number):
                    return found
                pack.cut(found.offset)  # The bytes are torn: a write of another thread came in between.
            data = source.take(number)
            try:
                return self._appended(pack, [data])
            finally:
                source.give(data)

    def _appended(self, pack: Pack, pieces: Sequence[Any]) -> Extent:
        start, found = pack.size, checksums(pieces)
        if self._unhurried:
            for part in (part for piece in pieces for part in _cut(memoryview(piece), _STINT_BYTES)):
                pack.append([part])
                self._rest()
        else:
            pack.append(pieces)
        return Extent(pack.number, start, pack.size - start, found)

    def _rest(self) -> None:
        """Rest, if this is a background write that no caller waits for."""
        if self._unhurried:
            self._pace.keep()

    @property
    def _unhurried(self) -> bool:
        return self._aside is not None and not self._aside.is_set()

    def _same(self, job: _Job, pieces: list[Array]) -> Extent | None:
        """Link and return the earlier extent if it has exactly these bytes; otherwise return None."""
        if job.earlier is None or self._earlier is None:
            return None
        before = job.earlier.file
        if self._packs.refuses(before) or not _has(self._earlier.file_path(before), job.earlier, pieces):
            return None
        # The bytes are equal but the checksums aren't, so the earlier manifest is wrong.
        if checksums(pieces) != job.earlier.checksums:
            return None
        file = self._packs.link(before)
        return None if file is None else job.earlier.within(file)


def _has(path: str, extent: Extent, pieces: list[Array]) -> bool:
    """Return whether an extent of a file has exactly these bytes; False if the file can't be read."""
    try:
        with files.reading(path) as file:
            at, buffer = extent.offset, np.empty(_PIECE_BYTES, np.uint8)
            for piece in pieces:
                for part in _cut(piece, _PIECE_BYTES):
                    block = buffer[: part.size]
                    if files.read_into(file, block, at) != part.size or not np.array_equal(block, part):
                        return False
                    at += part.size
            return at == extent.stop
    except OSError:  # An unreadable file has no usable bytes; the caller writes them.
        return False


def checksums(pieces: Iterable[Any]) -> tuple[int, ...]:
    """Return the crc32 of each block of the concatenated pieces. The last block may be short."""
    found: list[int] = []
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest) >= room:
            found.append(crc32([*block, rest[:room]]))
            block, rest, room = [], rest[room:], BLOCK_BYTES
        if rest:
            block.append(rest)
            room -= len(rest)
    return (*found, crc32(block)) if block else tuple(found)


def _step(size: int) -> int:
    """Return the piece size for a large array of `size` bytes."""
    return LARGE_BYTES // 2 if size <= _COARSE_BYTES else BLOCK_BYTES


def _cut(data: Any, size: int) -> Iterator[Any]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))
