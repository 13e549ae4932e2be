"""Data files, written: arrays and segments of rows with checksums, or links to those of an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.checkpoint.earlier import Earlier
from gleanrl.checkpoint.manifest import BLOCK_BYTES, DataFile, file_name
from gleanrl.checkpoint.segments import ALIGNMENT, Array, Source
from gleanrl.checkpoint.values import ATTACHED, LARGE_BYTES, Attachment
from gleanrl.errors import CheckpointError
from gleanrl.native import crc32
from gleanrl.system import fs
from gleanrl.system.threads import for_each

FILE_BYTES = 1 << 26
"""About how large a file of small arrays gets."""
_PIECE_BYTES = 1 << 20  # written at once: still in the cache from when its checksum was made
_LOOK_BYTES = 1 << 16  # compared first: what differs mostly differs there
_THREADS = 4  # files are synced one by one, and one waits while others are copied


@dataclass
class _Job:
    """A file to be written."""

    number: int
    name: str
    size: int
    pieces: list[Array]
    """Its bytes; empty where they are a segment's."""
    source: Source | None = None
    segment: int = 0
    earlier: DataFile | None = None
    """What may be the same file in an earlier checkpoint."""
    same: bool = False
    """Whether it is, for sure."""


class FileWriter:
    """Collects what is to be written, and writes it into data files of a folder.

    What an earlier checkpoint has in a file of its own, be it known or found by comparing bytes, gets a link to that
    file. Large files are written by several threads.

    Args:
        folder: where; nothing else is in it.
        earlier: another checkpoint on the same file system; None for no links.
    """

    def __init__(self, folder: Path, earlier: Earlier | None = None) -> None:
        self._folder, self._earlier = folder, earlier
        self._jobs: list[_Job] = []
        self._shared: _Job | None = None  # the file that takes small arrays
        self._sources: list[Source] = []
        self._large = 0

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
        before = [] if self._earlier is None else self._earlier.arrays[self._large : self._large + 1]
        candidates = dict(enumerate(before[0])) if before else {}
        self._large += 1
        step = LARGE_BYTES // 2 if data.size <= FILE_BYTES else BLOCK_BYTES
        places = []
        for number, begin in enumerate(range(0, data.size, step)):
            piece = data[begin : begin + step]
            job = self._add(piece.size, [piece])
            job.earlier = candidates.get(number)
            places.append([job.number, 0, piece.size])
        return places

    def attach(self, attachment: Attachment) -> list[list[int]]:
        """Take bytes that get a file of their own; return where they stand, as `store` does.

        Raises:
            CheckpointError: its name isn't one of an attachment.
        """
        if not ATTACHED.fullmatch(attachment.name):
            raise CheckpointError(f"{attachment.name!r} isn't a name of a file: expected {ATTACHED.pattern}")
        name, data = attachment.name, attachment.data
        if any(job.name == name for job in self._jobs):
            name = f"{len(self._jobs):06d}-{name}"
        return [[self._add(data.size, [data], name).number, 0, data.size]]

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
        """Write everything; return the files, all of which are on the disk."""
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

        try:
            for source in self._sources:
                source.begin()
            fresh = sum(job.size for job in jobs if not job.same)
            for_each(put, jobs, _THREADS if fresh > LARGE_BYTES else 1)
        finally:
            for source in self._sources:
                source.close()
        return tuple(written[job.name] for job in self._jobs)

    def _put(self, job: _Job) -> DataFile:
        if job.same and (found := self._linked(job)):
            if job.source is not None:
                job.source.skip(job.segment)
            return found
        if job.source is None:
            return self._written(job, job.pieces)
        data = job.source.take(job.segment)
        try:
            return self._written(job, [data])
        finally:
            job.source.give(data)

    def _written(self, job: _Job, pieces: list[Array]) -> DataFile:
        if not job.same and self._holds(job, pieces) and (found := self._linked(job)):
            return found
        checksums = Checksums()
        fs.write_file(self._folder / job.name, checksums.watching(pieces))
        return DataFile(job.name, job.size, checksums.end())

    def _linked(self, job: _Job) -> DataFile | None:
        """Link the earlier file; None where there can't be links, or it isn't there as it was."""
        before = job.earlier
        if before is None or self._earlier is None:
            return None
        if not fs.link_file(self._earlier.path / before.name, self._folder / job.name, job.size):
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


class Checksums:
    """Checksums of blocks of bytes that go by."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._crc, self._count = 0, 0

    def watching(self, pieces: Iterable[Array]) -> Iterator[Array]:
        """Yield the pieces, cut where they are large, and counted in."""
        for piece in pieces:
            for part in _cut(piece, _PIECE_BYTES):
                self.add(part)
                yield part

    def add(self, piece: Any) -> None:
        """Count bytes in."""
        rest = memoryview(piece)
        while rest:
            taken = rest[: BLOCK_BYTES - self._count]
            self._crc = crc32([taken], self._crc)
            self._count += len(taken)
            rest = rest[len(taken) :]
            if self._count == BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        self._found.append(self._crc)
        self._crc, self._count = 0, 0

    def end(self) -> tuple[int, ...]:
        """Return the checksums of all blocks, the last of which may be short."""
        if self._count:
            self._close_block()
        return tuple(self._found)


def _cut(data: Array, size: int) -> Iterator[Array]:
    return (data[begin : begin + size] for begin in range(0, data.size, size))
