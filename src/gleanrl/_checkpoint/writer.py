"""What a checkpoint's data files get: arrays and segments of rows with checksums, or what an earlier checkpoint has."""

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
"""With so many a file is full, and so is an extent of small arrays."""
_FILES, _LEAST_FILE_BYTES = 8, 1 << 22  # that all is divided into, where each gets so many
_COARSE_BYTES = 1 << 26  # of an array that is cut into few pieces
_PIECE_BYTES = 1 << 18  # compared at once
_FEW_BYTES = 1 << 22  # written by one thread: two would mostly hand the interpreter to each other
_THREADS = 2  # that write: as many as keep a disk busy
_SHARE_ASIDE = 0.15  # of a processor
_STINT_BYTES = 1 << 18  # written between two rests: nobody who has to run waits longer than that takes


@dataclass(slots=True)
class _Job:
    """An extent that is to be written, unless it's found to be the same."""

    number: int
    size: int
    pieces: list[Array]
    """Its bytes; empty where they are a segment's, or made."""
    make: Callable[[], Array] | None = None
    """Returns its bytes."""
    source: SavedRows | None = None
    segment: int = 0
    earlier: Extent | None = None
    """What may be the same in an earlier checkpoint."""


@dataclass(slots=True)
class _Rows:
    """Rows whose segments are to be there."""

    source: SavedRows
    first: int
    """The number of the extent of the first segment."""
    table: SegmentTable | None
    """What an earlier checkpoint has of them."""
    same: Array
    """Which segments are the same there, for sure, ``(n,)`` bool."""
    alike: Array
    """Which others may be, as nothing is known of them."""

    @property
    def jobs(self) -> Iterator[_Job]:
        """What is to be done of the segments that aren't the same."""
        layout = self.source.layout
        for segment in np.flatnonzero(~self.same).tolist():
            job = _Job(self.first + segment, layout.size(segment), [], None, self.source, segment)
            if self.table is not None and self.alike[segment]:
                job.earlier = self.table.extents[segment]
            yield job

    def within(self, extents: Extents) -> SegmentTable:
        """Return the rows as they stand in all extents."""
        layout = self.source.layout
        return SegmentTable(layout, self.source.identity, extents.take(self.first + np.arange(layout.count)))


class FileWriter:
    """Collects what is to be written, and writes it into data files of a folder; used in a ``with`` block.

    What an earlier checkpoint has, be it known or found by comparing bytes, isn't written: its file gets a link. All
    else stands one after the other in few files. Much is written by several threads.

    Args:
        folder: where; nothing else is in it.
        earlier: another checkpoint on the same file system; None for no links.
        aside: so that others are held up as little as can be: one thread writes, and rests most of the time until this
            is set; None for all haste from the beginning.
    """

    def __init__(self, folder: Path, earlier: Earlier | None = None, aside: Event | None = None) -> None:
        self._earlier, self._packs = earlier, Packs(folder, earlier)
        self._aside, self._pace = aside, Pace(_SHARE_ASIDE)
        self._jobs: list[_Job] = []
        self._rows: list[_Rows] = []
        self._large: list[Array] = []  # the extents of each large array
        self._shared: _Job | None = None  # the extent that takes small arrays
        self._count = self._room = 0  # how many extents there are to be
        self._linked: list[tuple[Array, Extents]] = []  # segments that are there, with their numbers
        self._extents: dict[int, Extent] = {}  # the others that are there
        self._all = Extents.of(())

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of files that weren't synced because of an error."""
        self._packs.close()

    def store(self, data: Array) -> list[list[int]]:
        """Take the bytes of an array, which aren't changed until `write`; return where they will stand.

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
        place = [job.number, job.size, data.size]
        padding = -data.size % ALIGNMENT
        job.pieces += [data] + ([np.zeros(padding, np.uint8)] if padding else [])
        job.size += data.size + padding
        return [place]

    def _store_large(self, data: Array) -> list[list[int]]:
        """Cut an array into extents, each of which may be as it was."""
        step = _step(data.size)
        pieces = [data[begin : begin + step] for begin in range(0, data.size, step)]
        return self._places([self._add(piece.size, [piece]) for piece in pieces])

    def pieces(self, value: ArrayPieces) -> list[list[int]]:
        """Take a tensor of `LARGE_BYTES` or more that `write` makes; return where it will stand, as `store` does."""
        jobs = []
        for start, stop in value.cut(_step(value.width * value.shape[0])):
            jobs.append(self._add((stop - start) * value.width, []))
            jobs[-1].make = partial(value.make, start, stop)
        return self._places(jobs)

    def _places(self, jobs: list[_Job]) -> list[list[int]]:
        """Return where the pieces of one more large array will stand, each of which may be as it was."""
        position = len(self._large)
        before = [] if self._earlier is None else self._earlier.arrays[position : position + 1]
        self._large.append(np.array([job.number for job in jobs]))
        for job, earlier in zip(jobs, before[0] if before else (), strict=False):
            if job.size == earlier.size:
                job.earlier = earlier
        return [[job.number, 0, job.size] for job in jobs]

    def attach(self, attachment: Attachment) -> list[list[int]]:
        """Take what gets a file of its own, which is written here and now.

        Returns:
            Where it stands, as `store` says.

        Raises:
            CheckpointError: its name isn't one of an attachment.
        """
        name, content = attachment.name, attachment.content
        if not ATTACHED.fullmatch(name):
            raise CheckpointError(f"{name!r} isn't a name of a file: expected {ATTACHED.pattern}")

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
        """Take rows; return the number of the extent of their first segment, which those of the others follow."""
        layout = source.layout
        first = self._reserve(layout.count)
        table = None if self._earlier is None else self._earlier.table(len(self._rows), layout)
        same, alike = np.zeros(layout.count, bool), np.zeros(layout.count, bool)
        if table is not None:
            known, common = source.unchanged(table.identity), table.common(layout)
            if known is None:
                alike[:common] = True
            else:  # what changed would be compared in vain
                same[:common] = known[:common]
        self._rows.append(_Rows(source, first, table, same, alike))
        return first

    def _reserve(self, count: int) -> int:
        """Return the number of the first one of so many more extents."""
        first = self._count
        self._count += count
        return first

    def _add(self, size: int, pieces: list[Array]) -> _Job:
        job = _Job(self._reserve(1), size, pieces)
        self._jobs.append(job)
        return job

    def write(self) -> tuple[tuple[DataFile, ...], Extents]:
        """Write everything; return files and extents, which aren't surely on the disk before `sync`."""
        total = sum(job.size for job in self._jobs) + sum(extent.size for extent in self._extents.values())
        total += sum(rows.source.layout.total for rows in self._rows)
        self._room = min(max(total // _FILES, _LEAST_FILE_BYTES), FILE_BYTES)
        if self._earlier is not None:
            self._choose(self._earlier, total)
        try:
            for rows in self._rows:
                rows.source.begin()
            for rows in self._rows:  # first: nobody has to keep for long what isn't needed
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
        """Write anew what stands in files of which little is needed, or of which there are too many."""
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
        kept = earlier.worth_keeping(needed, total)
        if len(kept) < len(needed):
            for job in self._jobs:
                if job.earlier is not None and job.earlier.file not in kept:
                    job.earlier = None
            stays = np.zeros(len(earlier.files), bool)
            stays[np.array([*kept], np.int64)] = True
            for rows, extents, numbers in tables:
                gone = numbers[~stays[extents.files[numbers]]]
                rows.same[gone] = rows.alike[gone] = False

    def _link(self, rows: _Rows) -> None:
        """Have segments that are known to be the same in links, as far as there can be any."""
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
        """Return what is to be written in the order in which it is best taken."""
        jobs = [*self._jobs, *(job for rows in self._rows for job in rows.jobs)]

        def place(job: _Job) -> int:
            return -1 if job.source is None else job.source.position(job.segment)

        return sorted(jobs, key=place)

    def as_earlier(self, path: Path, kind: str) -> Earlier:
        """Return what `write` has written, for the next one.

        Args:
            path: where the folder is then.
            kind: what it is a state of.
        """
        arrays = [self._all.take(numbers) for numbers in self._large]
        tables = [rows.within(self._all) for rows in self._rows]
        return Earlier(path, kind, self._packs.files, arrays, tables)

    def add(self, name: str, data: bytes) -> None:
        """Write one more file of that name."""
        self._packs.add(name, data)

    def sync(self) -> None:
        """Return once what was written until now is on the disk, with its names."""
        self._packs.sync(self._unhurried)

    def _put(self, job: _Job) -> None:
        """Write an extent, or link it where it's found to be the same."""
        found = self._stored(job) if job.source is None else self._taken(job.source, job)
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

    def _taken(self, source: SavedRows, job: _Job) -> Extent:
        """Write a segment from where it lives; from a copy if it was written on meanwhile."""
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
                pack.cut(found.offset)  # some of it is from before a write, and some from after it
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
        """Leave the processor to others, unless there is haste."""
        if self._unhurried:
            self._pace.keep()

    @property
    def _unhurried(self) -> bool:
        return self._aside is not None and not self._aside.is_set()

    def _same(self, job: _Job, pieces: list[Array]) -> Extent | None:
        """Return the earlier extent, linked, if it has these very bytes."""
        if job.earlier is None or self._earlier is None:
            return None
        before = job.earlier.file
        if self._packs.refuses(before) or not _has(self._earlier.place(before), job.earlier, pieces):
            return None
        if checksums(pieces) != job.earlier.checksums:  # which were forged
            return None
        file = self._packs.link(before)
        return None if file is None else job.earlier.within(file)


def _has(path: str, extent: Extent, pieces: list[Array]) -> bool:
    """Return whether an extent of a file has these very bytes."""
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
    except OSError:  # then it's written
        return False


def checksums(pieces: Iterable[Any]) -> tuple[int, ...]:
    """Return the checksums of all blocks of bytes that lie one piece after the other; the last one may be short."""
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
    """Return about how many bytes each piece of a large array has."""
    return LARGE_BYTES // 2 if size <= _COARSE_BYTES else BLOCK_BYTES


def _cut(data: Any, size: int) -> Iterator[Any]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))
