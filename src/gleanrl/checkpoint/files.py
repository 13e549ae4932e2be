"""Data files, written: arrays and segments of rows with checksums, or links to those of an earlier checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from typing_extensions import Self

from gleanrl.checkpoint.earlier import Earlier
from gleanrl.checkpoint.manifest import BLOCK_BYTES, DataFile, file_name
from gleanrl.checkpoint.segments import ALIGNMENT, Array, Source
from gleanrl.checkpoint.values import ATTACHED, LARGE_BYTES, Attachment, Pieces
from gleanrl.errors import CheckpointError
from gleanrl.native import crc32
from gleanrl.system import fs
from gleanrl.system.clock import Pace
from gleanrl.system.new_files import NewFile
from gleanrl.system.threads import for_each

FILE_BYTES = 1 << 26
"""About how large a file of small arrays gets."""
_PIECE_BYTES = 1 << 20  # compared at once
_LOOK_BYTES = 1 << 16  # compared first: what differs mostly differs there
_FEW_BYTES = 1 << 22  # written by one thread: two would mostly hand the interpreter to each other
_THREADS = 2  # that write: as many as keep a disk busy
_SHARE_ASIDE = 0.15  # of a processor
_STINT_BYTES = 1 << 18  # written between two rests: nobody who has to run waits longer than that takes
_SYNCS = 16  # files that are synced at the same time: the disk empties its cache once for those that wait
_UNSYNCED = 64  # files in a batch; while one is synced, another one is written
_UNSYNCED_BYTES = 1 << 28  # about as many in a batch


@dataclass
class _Job:
    """A file to be written."""

    number: int
    name: str
    size: int
    pieces: list[Array]
    """Its bytes; empty where they are a segment's, or made."""
    make: Callable[[], Array] | None = None
    """Returns its bytes."""
    source: Source | None = None
    segment: int = 0
    earlier: DataFile | None = None
    """What may be the same file in an earlier checkpoint."""
    same: bool = False
    """Whether it is, for sure."""
    written: DataFile | None = None
    """The file, if it is there already."""


class FileWriter:
    """Collects what is to be written, and writes it into data files of a folder; used in a ``with`` block.

    What an earlier checkpoint has in a file of its own, be it known or found by comparing bytes, gets a link to that
    file. Large files are written by several threads.

    Args:
        folder: where; nothing else is in it.
        earlier: another checkpoint on the same file system; None for no links.
        aside: so that others are held up as little as can be: one thread writes, and rests most of the time until this
            is set; None for all haste from the beginning.
    """

    def __init__(self, folder: Path, earlier: Earlier | None = None, aside: Event | None = None) -> None:
        self._folder, self._earlier = folder, earlier
        self._aside, self._pace = aside, Pace(_SHARE_ASIDE)
        self._jobs: list[_Job] = []
        self._shared: _Job | None = None  # the file that takes small arrays
        self._sources: list[Source] = []
        self._large = 0
        self._unsynced: deque[NewFile] = deque()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of files that weren't synced because of an error."""
        while self._unsynced:
            self._unsynced.pop().close()

    def store(self, data: Array) -> list[list[int]]:
        """Take the bytes of an array, which aren't changed until `write`; return where they will stand.

        Returns:
            ``[file, offset, bytes]`` for each piece, in order.
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
        """Cut an array into files, each of which may be as it was."""
        step = _step(data.size)
        pieces = [data[begin : begin + step] for begin in range(0, data.size, step)]
        return self._places([self._add(piece.size, [piece]) for piece in pieces])

    def pieces(self, value: Pieces) -> list[list[int]]:
        """Take a tensor of `LARGE_BYTES` or more that `write` makes; return where it will stand, as `store` does."""
        jobs = []
        for start, stop in value.cut(_step(value.width * value.shape[0])):
            jobs.append(self._add((stop - start) * value.width, []))
            jobs[-1].make = partial(value.make, start, stop)
        return self._places(jobs)

    def _places(self, jobs: list[_Job]) -> list[list[int]]:
        """Return where the pieces of one more large array will stand, each of which may be as it was."""
        before = [] if self._earlier is None else self._earlier.arrays[self._large : self._large + 1]
        self._large += 1
        for job, earlier in zip(jobs, before[0] if before else (), strict=False):
            job.earlier = earlier
        return [[job.number, 0, job.size] for job in jobs]

    def attach(self, attachment: Attachment) -> list[list[int]]:
        """Take what gets a file of its own, which is written here and now if it writes itself.

        Returns:
            Where it stands, as `store` says.

        Raises:
            CheckpointError: its name isn't one of an attachment.
        """
        if not ATTACHED.fullmatch(attachment.name):
            raise CheckpointError(f"{attachment.name!r} isn't a name of a file: expected {ATTACHED.pattern}")
        name, content = attachment.name, attachment.content
        if any(job.name == name for job in self._jobs):
            name = f"{len(self._jobs):06d}-{name}"
        if not callable(content):
            return [[self._add(content.size, [content], name).number, 0, content.size]]
        file = NewFile(f"{self._folder}/{name}", ())
        file.fill(content, self._rest)
        self._unsynced.append(file)
        job = self._add(file.size, [], name)
        job.written = DataFile(name, job.size, checksums(self._in_stints(file.parts(BLOCK_BYTES))))
        return [[job.number, 0, job.size]]

    def segments(self, source: Source) -> int:
        """Take rows; return the number of the file of their first segment, which those of the others follow."""
        first, layout = len(self._jobs), source.layout
        table = None if self._earlier is None else self._earlier.table(len(self._sources), source.layout)
        self._sources.append(source)
        known = None if table is None else source.unchanged(table.identity)
        for number in range(layout.count):
            job = self._add(layout.size(number), [])
            job.source, job.segment = source, number
            if table is not None and table.layout.span(number) == layout.span(number):
                job.earlier = table.files[number]
                job.same = known is not None and known[number]
                if known is not None and not job.same:
                    job.earlier = None  # it changed: comparing is in vain
        return first

    def _add(self, size: int, pieces: list[Array], name: str | None = None) -> _Job:
        number = len(self._jobs)
        job = _Job(number, file_name(number) if name is None else name, size, pieces)
        self._jobs.append(job)
        return job

    def write(self) -> tuple[DataFile, ...]:
        """Write everything; return the files, which aren't surely on the disk before `sync`."""
        written: dict[str, DataFile] = {}
        position = {
            (id(source), number): place
            for source in self._sources
            for place, number in enumerate(source.order())
        }
        # Links first: nobody has to keep for long what isn't needed.
        jobs = sorted(
            self._jobs, key=lambda job: (not job.same, position.get((id(job.source), job.segment), -1))
        )

        def put(job: _Job) -> None:
            written[job.name] = self._put(job)
            if len(self._unsynced) >= min(_UNSYNCED, _UNSYNCED_BYTES // max(job.size, 1)):
                self._sync_batch()
            self._rest()

        try:
            for source in self._sources:
                source.begin()
            fresh = sum(job.size for job in jobs if not job.same)
            for_each(put, jobs, 1 if self._aside is not None or fresh <= _FEW_BYTES else _THREADS)
        finally:
            for source in self._sources:
                source.close()
        return tuple(written[job.name] for job in self._jobs)

    def add(self, name: str, data: bytes) -> None:
        """Write one more file of that name."""
        self._unsynced.append(NewFile(f"{self._folder}/{name}", [data]))

    def sync(self) -> None:
        """Return once what was written until now is on the disk, with its names."""
        while len(self._unsynced) > _UNSYNCED:
            self._sync_batch()
        self._sync_batch(partial(fs.sync_dir, self._folder))  # together: each waits for the disk once

    def _sync_batch(self, *others: Callable[[], object]) -> None:
        """Sync files, many at a time, and make other calls beside."""
        files: list[NewFile] = []
        with suppress(IndexError):  # another thread took it
            while len(files) < _UNSYNCED:
                files.append(self._unsynced.popleft())
        calls = [*(file.sync for file in files), *others]
        try:
            for_each(lambda call: call(), calls, 1 if self._unhurried else _SYNCS)
        finally:
            for file in files:
                file.close()

    def _put(self, job: _Job) -> DataFile:
        source, number = job.source, job.segment
        if job.written is not None:
            return job.written
        if job.same and (found := self._linked(job)):
            if source is not None:
                source.skip(number)
            return found
        if source is None:
            pieces = job.pieces if job.make is None else [job.make().reshape(-1)]
            return self._kept(*self._written(job, pieces))
        live = source.look(number)
        if live is not None:
            written = self._written(job, live)
            if source.settled(number):
                return self._kept(*written)
            self._drop(job, written[1])  # some of it is from before a write, and some from after it
        data = source.take(number)
        try:
            return self._kept(*self._written(job, [data]))
        finally:
            source.give(data)

    def _written(self, job: _Job, pieces: list[Array]) -> tuple[DataFile, NewFile | None]:
        """Write a file, or link it where that does; return it, and what has to be synced of it."""
        if not job.same and self._holds(job, pieces) and (found := self._linked(job)):
            return found, None
        path = f"{self._folder}/{job.name}"
        if self._aside is None:
            return DataFile(job.name, job.size, checksums(pieces)), NewFile(path, pieces)
        data = DataFile(job.name, job.size, checksums(self._in_stints(pieces)))
        file = NewFile(path, ())
        for part in self._in_stints(pieces):
            file.append([part])
        return data, file

    def _in_stints(self, pieces: Iterable[Any]) -> Iterator[memoryview]:
        """Yield pieces, resting between parts of them."""
        for piece in pieces:
            for part in _cut(memoryview(piece), _STINT_BYTES):
                yield part
                self._rest()

    def _rest(self) -> None:
        """Leave the processor to others, unless there is haste."""
        if self._unhurried:
            self._pace.keep()

    @property
    def _unhurried(self) -> bool:
        return self._aside is not None and not self._aside.is_set()

    def _kept(self, found: DataFile, file: NewFile | None) -> DataFile:
        if file is not None:
            self._unsynced.append(file)
        return found

    def _drop(self, job: _Job, file: NewFile | None) -> None:
        if file is None:
            fs.remove_file(self._folder / job.name)
        else:
            file.drop()

    def _linked(self, job: _Job) -> DataFile | None:
        """Link the earlier file; None where there can't be links, or it isn't there as it was."""
        before = job.earlier
        if before is None or self._earlier is None:
            return None
        if not fs.link_file(f"{self._earlier.path}/{before.name}", f"{self._folder}/{job.name}", job.size):
            return None
        return DataFile(job.name, job.size, before.checksums)

    def _holds(self, job: _Job, pieces: list[Array]) -> bool:
        """Return whether the earlier file has these very bytes."""
        if job.earlier is None or self._earlier is None or job.earlier.size != job.size or not job.size:
            return False
        path = self._earlier.path / job.earlier.name
        try:
            with fs.reading(path) as file:
                offset, buffer = 0, np.empty(_PIECE_BYTES, np.uint8)
                for piece in pieces:
                    for part in _cut(piece, _LOOK_BYTES if not offset else _PIECE_BYTES):
                        block = buffer[: part.size]
                        if fs.read_into(file, block, offset) != part.size or not np.array_equal(block, part):
                            return False
                        offset += part.size
                return fs.size_of(file) == offset
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
    return LARGE_BYTES // 2 if size <= FILE_BYTES else BLOCK_BYTES


def _cut(data: Any, size: int) -> Iterator[Any]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))
