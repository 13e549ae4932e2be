"""Writing of a checkpoint's data files. A file that an earlier checkpoint has with the same bytes is linked instead."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from typing_extensions import Self

from gleanrl._arrays.native import crc32
from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._checkpoint.manifest import BLOCK_BYTES, DataFile, Extent, Manifest, file_name, stored_in
from gleanrl._checkpoint.row_segments import ALIGNMENT, MOST_FILES, Array, SegmentLayout
from gleanrl._checkpoint.tree_codec import ATTACHED, LARGE_BYTES, ArrayPieces, Attachment, layout_of
from gleanrl._os import files
from gleanrl._os.atomic_files import NewFile
from gleanrl._os.clock import Pace
from gleanrl._os.threads import for_each
from gleanrl.errors import CheckpointError, CorruptCheckpointError

FILE_BYTES = 1 << 26
"""A file of small arrays of this size is full."""
_PIECE_BYTES = 1 << 18  # bytes of one comparison
# Up to this size one thread writes; two would mostly wait for each other's interpreter lock.
_FEW_BYTES = 1 << 22
_THREADS = 2  # Threads that write; two keep a disk busy.
_SHARE_ASIDE = 0.15  # share of a processor for a background write
# Bytes written between two rests of a background write. Other threads wait no longer than one such write.
_STINT_BYTES = 1 << 18
_SYNCS = 16  # Files that are synced at the same time. One flush of the disk's cache serves all waiting syncs.
_FEW_SYNCS, _FEW_SYNC_BYTES = (
    4,
    1 << 23,
)  # For fewer files or bytes, starting threads takes longer than the syncs.
_UNSYNCED = 64  # The most unsynced files. One thread syncs a batch of them while another writes.
_UNSYNCED_BYTES = 1 << 28  # the same limit in bytes


@dataclass(frozen=True)
class EarlierRows:
    """Rows of an earlier checkpoint.

    Attributes:
        layout: their layout.
        identity: the identity of the rows, see `Segmented`.
        extents: one extent for each segment.
    """

    layout: SegmentLayout
    identity: str
    extents: Sequence[Extent]

    def same(self, source: CowSnapshot) -> list[bool]:
        """Return for each segment of other rows, which have the same step, whether it is known to be the same here.

        An empty list means that nothing is known.
        """
        known = source.unchanged(self.identity)
        if known is None:
            return []
        # The last segment may have grown.
        rows, other = self.layout.rows, source.layout
        common = other.count if rows == other.rows else min(rows, other.rows) // other.step
        found: list[bool] = [*known[:common].tolist(), *[False] * (other.count - common)]
        return found


@dataclass(frozen=True)
class Earlier:
    """A checkpoint whose files can be linked.

    Attributes:
        path: its folder.
        kind: the kind of the state's owner.
        files: its data files.
        arrays: the extents of each large array, in the order of the tree.
        rows: all rows in segments, in the order of the tree.
    """

    path: Path
    kind: str
    files: tuple[DataFile, ...]
    arrays: Sequence[Sequence[Extent]]
    rows: Sequence[EarlierRows]

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Earlier:
        """Return the checkpoint that a manifest describes. Malformed entries are skipped: their data are written again.

        Entries may share extents. Each file to write is linked separately, so this does no harm.
        """
        arrays: list[Sequence[Extent]] = []
        rows: list[EarlierRows] = []
        extents = manifest.extents
        for node in stored_in(manifest.state):
            with suppress(CorruptCheckpointError, LookupError, TypeError, ValueError):
                if "$rows" in node:
                    layout, first, identity = layout_of(node)
                    rows.append(EarlierRows(layout, identity, extents[first : first + layout.count]))
                elif "$tensor" in node and sum(size for _, _, size in node["$tensor"]) >= LARGE_BYTES:
                    arrays.append(tuple(extents[number] for number, _, _ in node["$tensor"]))
        return cls(path, manifest.kind, manifest.files, arrays, rows)

    def rows_like(self, layout: SegmentLayout, number: int) -> EarlierRows | None:
        """Return the `number`-th rows of this checkpoint if they have the same fields and step, or None."""
        for found in self.rows[number : number + 1]:
            if (found.layout.fields, found.layout.step) == (layout.fields, layout.step):
                return found
        return None

    def file_of(self, extents: Sequence[Extent], sizes: Sequence[int]) -> str:
        """Return the path of the file that holds these extents and nothing else, one after the other, or "".

        Args:
            extents: some extents of this checkpoint.
            sizes: the required bytes of each extent.
        """
        if [one.size for one in extents] != sizes:
            return ""
        number, end = extents[0].file, 0
        for one in extents:
            if (one.file, one.offset) != (number, end):
                return ""
            end += one.size
        return f"{self.path}/{self.files[number].name}" if end == self.files[number].size else ""


@dataclass(slots=True)
class _Job:
    """A data file to write, unless an earlier checkpoint has a file with the same bytes."""

    file: int
    """The number of the file."""
    first: int
    """The number of its first extent. The extents of the file have consecutive numbers."""
    sizes: list[int]
    """The bytes of each extent."""
    look: Callable[[int], list[Array] | None]
    """Returns the bytes of a segment, or of a part of an array; None for a segment that a writer has changed."""
    begin: int
    """The number of the segment or part that is the first extent."""
    source: CowSnapshot | None = None
    """The rows that the segments belong to."""
    earlier: str = ""
    """The path of a file of the earlier checkpoint that may have the same bytes, in extents of the same sizes."""
    extents: Sequence[Extent] = ()
    """The extents of that file."""
    same: bool = False
    """Whether that file is known to have the same bytes."""


class FileWriter:
    """Collects data, and writes them to data files of a folder. Used in a ``with`` block.

    The small arrays share a file. Rows and large arrays are cut into at most `MOST_FILES` files each, and a file that
    an earlier checkpoint has with the same bytes is linked. Changes are known from the rows' source or found by
    comparing bytes. Several threads write, if there are many bytes.

    Args:
        folder: the new folder, which is empty.
        earlier: another checkpoint on the same file system; None for no links.
        aside: an event, for a background write. Until it is set, one thread writes and rests most of the time, so that
            other threads are hardly delayed. None for full speed from the start.
    """

    def __init__(self, folder: Path, earlier: Earlier | None = None, aside: Event | None = None) -> None:
        self._folder, self._earlier = folder, earlier
        self._aside, self._pace = aside, None if aside is None else Pace(_SHARE_ASIDE)
        self._names: list[str] = []  # of the data files
        self._jobs: list[_Job] = []
        self._rows: list[tuple[CowSnapshot, int]] = []  # with the number of the extent of the first segment
        self._large: list[range] = []  # the numbers of the extents of each large array
        self._shared: _Job | None = None  # the file for small arrays
        self._small: list[Array] = []  # its content
        self._files: tuple[DataFile, ...] = ()
        self._extents: list[Extent] = []  # by number; offsets and checksums once they are written or linked
        self._unsynced: deque[NewFile] = deque()
        self._unsynced_bytes = 0
        self._lock = threading.Lock()  # While several threads write, it protects the two fields above.

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close files that an error has left unsynced."""
        while self._unsynced:
            self._unsynced.pop().close()

    # ---------------------------------------------------------------- collecting
    def store(self, data: Array) -> list[list[int]]:
        """Add the bytes of an array; return their future position. The caller must not change them until `write` ends.

        Returns:
            ``[extent, offset, bytes]`` for each piece, in order.
        """
        if data.size >= LARGE_BYTES:
            step = _step(data.size)
            parts = [data[start : start + step] for start in range(0, data.size, step)]
            return self._store_large([part.size for part in parts], lambda number: [parts[number]])
        if not data.size:
            return []
        job = self._shared
        if job is None or job.sizes[0] >= FILE_BYTES:
            small = self._small = []
            job = self._shared = self._add([0], lambda number: small)
        piece = [job.first, job.sizes[0], data.size]
        padding = -data.size % ALIGNMENT
        self._small += [data] + ([np.zeros(padding, np.uint8)] if padding else [])
        job.sizes[0] += data.size + padding
        return [piece]

    def pieces(self, value: ArrayPieces) -> list[list[int]]:
        """Add a tensor of at least `LARGE_BYTES`, which `write` will make; return its position as `store` does."""
        spans = [*value.cut(_step(value.width * value.shape[0]))]
        sizes = [(stop - start) * value.width for start, stop in spans]
        return self._store_large(sizes, lambda number: [value.make(*spans[number]).reshape(-1)])

    def _store_large(self, sizes: list[int], pieces: Callable[[int], list[Array]]) -> list[list[int]]:
        """Add an array in extents of these sizes; `pieces` returns the bytes of an extent by its number."""
        position, first, together = len(self._large), len(self._extents), -(-len(sizes) // MOST_FILES)
        before = [] if self._earlier is None else self._earlier.arrays[position : position + 1]
        self._large.append(range(first, first + len(sizes)))
        for start in range(0, len(sizes), together):
            job = self._add(sizes[start : start + together], pieces, start)
            for extents in before:
                self._compare(job, extents[start : start + together])
        return [[first + number, 0, size] for number, size in enumerate(sizes)]

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
        number = len(self._names)
        self._names.append(f"{number:06d}-{name}" if name in self._names else name)
        file = self._create(number)
        try:
            if callable(content):
                file.fill(content, self._rest)
            else:
                file.append([content])
            size, found = file.size, checksums(file.parts(BLOCK_BYTES))
        except BaseException:
            file.close()
            raise
        self._written(file, size)
        if not size:
            return []
        self._extents.append(Extent(number, 0, size, found))
        return [[len(self._extents) - 1, 0, size]]

    def segments(self, source: CowSnapshot) -> int:
        """Add rows; return the number of the extent of their first segment.

        The other segments have the numbers after it.
        """
        layout, first = source.layout, len(self._extents)
        sizes = layout.sizes()
        before = None if self._earlier is None else self._earlier.rows_like(layout, len(self._rows))
        same = [] if before is None else before.same(source)
        self._rows.append((source, first))
        for start in range(0, layout.count, layout.together):
            stop = start + layout.together
            job = self._add(sizes[start:stop], source.look, start, source)
            # If the source knows all changes, changed files need no comparison.
            if before is not None and all(same[start:stop]):
                self._compare(job, before.extents[start:stop])
                job.same = bool(same)
        return first

    def _add(
        self,
        sizes: list[int],
        look: Callable[[int], list[Array] | None],
        begin: int = 0,
        source: CowSnapshot | None = None,
    ) -> _Job:
        job = _Job(len(self._names), len(self._extents), sizes, look, begin, source)
        self._names.append(file_name(job.file))
        self._extents += [Extent(job.file, 0, size, ()) for size in sizes]
        self._jobs.append(job)
        return job

    def _compare(self, job: _Job, extents: Sequence[Extent]) -> None:
        """Let a job look for its bytes in the file of these earlier extents, if they fill a file."""
        if self._earlier is not None:
            job.earlier, job.extents = self._earlier.file_of(extents, job.sizes), extents

    # ---------------------------------------------------------------- writing
    def write(self) -> tuple[tuple[DataFile, ...], tuple[Extent, ...]]:
        """Write the files that the earlier checkpoint lacks, link the others, and return files and extents.

        New files are on the disk only after `sync`. All rows are closed at the end, also after an error.

        Raises:
            OSError: the disk is full, or fails.
        """
        try:
            for source, _ in self._rows:
                source.begin()
            # Links come first, so that writers to the buffer don't have to copy these segments.
            jobs = sorted(
                (job for job in self._jobs if not (job.same and self._link_known(job))), key=_urgency
            )
            left = sum(sum(job.sizes) for job in jobs)
            for_each(self._put, jobs, 1 if self._aside is not None or left <= _FEW_BYTES else _THREADS)
        finally:
            for source, _ in self._rows:
                source.close()
        sizes = [0] * len(self._names)
        for one in self._extents:
            sizes[one.file] += one.size
        self._files = tuple(map(DataFile, self._names, sizes))
        return self._files, tuple(self._extents)

    def as_earlier(self, path: Path, kind: str) -> Earlier:
        """Return the written checkpoint as the earlier one of the next commit.

        Args:
            path: the final path of the folder.
            kind: the kind of the state's owner.
        """
        extents = tuple(self._extents)
        arrays = [extents[numbers.start : numbers.stop] for numbers in self._large]
        rows = [
            EarlierRows(source.layout, source.identity, extents[first : first + source.layout.count])
            for source, first in self._rows
        ]
        return Earlier(path, kind, self._files, arrays, rows)

    def _link_known(self, job: _Job) -> bool:
        """Link a file that is known to be the same. If this is impossible, let it be written, and return False."""
        if self._link(job):
            if job.source is not None:
                job.source.skip(range(job.begin, job.begin + len(job.sizes)))
            return True
        job.earlier = ""
        return False

    def _link(self, job: _Job) -> bool:
        """Link the earlier file; return False if there is none, or if the file system can't."""
        path = f"{self._folder}/{self._names[job.file]}"
        if not job.earlier or not files.link_file(job.earlier, path, sum(job.sizes)):
            return False
        for number, one in enumerate(job.extents, job.first):
            self._extents[number] = one._replace(file=job.file)
        return True

    def _put(self, job: _Job) -> None:
        """Write a file, or link it if an earlier checkpoint has the same bytes."""
        same, pieces = self._compared(job)
        if same == len(job.sizes) and self._link(job):
            return
        file, size = self._create(job.file), 0
        try:
            for number, count in enumerate(job.sizes):
                if number < same:
                    found = self._copy(file, job, number)
                else:
                    pieces = pieces if number == same else job.look(job.begin + number)
                    found = self._append_new(file, size, job, job.begin + number, pieces)
                self._extents[job.first + number] = Extent(job.file, size, count, found)
                size += count
                self._rest()
        except BaseException:
            file.close()
            raise
        self._written(file, size)

    def _compared(self, job: _Job) -> tuple[int, list[Array] | None]:
        """Return how many of the first extents the earlier file has with the same bytes, and the bytes of the next one.

        If there is a next one, the file must be written.
        """
        pieces = None
        for number in range(len(job.sizes)):
            pieces = job.look(job.begin + number)
            if not job.earlier or pieces is None or not _has(job.earlier, job.extents[number], pieces):
                return number, pieces
            if job.source is not None and not job.source.settled(job.begin + number):
                return number, None
            self._rest()
        return len(job.sizes), None

    def _copy(self, file: NewFile, job: _Job, number: int) -> tuple[int, ...]:
        """Copy an extent of the earlier file. Its rows are settled, so the source doesn't have them any more."""
        found, data = job.extents[number], np.empty(job.sizes[number], np.uint8)
        with files.reading(job.earlier) as earlier:
            files.read_into(earlier, data, found.offset)
        if self._append(file, [data]) != found.checksums:
            raise OSError(errno.EIO, "it changed during a dump", job.earlier)
        return found.checksums

    def _append_new(
        self, file: NewFile, size: int, job: _Job, number: int, pieces: list[Array] | None
    ) -> tuple[int, ...]:
        """Write an extent to a file of this size. If a writer changed its segment meanwhile, write a copy instead."""
        source = job.source
        if pieces is not None:
            found = self._append(file, pieces)
            if source is None or source.settled(number):
                return found
            file.cut(size)  # The bytes are torn: a write of another thread came in between.
        assert source is not None  # Only rows change during a dump.
        data = source.take(number)
        try:
            return self._append(file, [data])
        finally:
            source.give(data)

    def _append(self, file: NewFile, pieces: Sequence[Any]) -> tuple[int, ...]:
        found = checksums(pieces)
        if self._unhurried:
            for part in (part for piece in pieces for part in _cut(memoryview(piece), _STINT_BYTES)):
                file.append([part])
                self._rest()
        else:
            file.append(pieces)
        return found

    def _rest(self) -> None:
        """Rest, if this is a background write that no caller waits for."""
        if self._pace is not None and self._unhurried:
            self._pace.keep()

    @property
    def _unhurried(self) -> bool:
        return self._aside is not None and not self._aside.is_set()

    # ---------------------------------------------------------------- syncing
    def _create(self, number: int) -> NewFile:
        return NewFile(f"{self._folder}/{self._names[number]}", ())

    def _written(self, file: NewFile, size: int) -> None:
        """Start the writeback of a whole file. If many files are unsynced, sync some."""
        file.start()
        with self._lock:
            self._unsynced.append(file)
            self._unsynced_bytes += size
        if len(self._unsynced) >= _UNSYNCED or self._unsynced_bytes >= _UNSYNCED_BYTES:
            self._sync_batch()

    def add(self, name: str, data: bytes) -> None:
        """Write a further file that isn't a data file, such as the manifest; `sync` syncs it."""
        self._unsynced.append(NewFile(f"{self._folder}/{name}", [data]))

    def sync(self) -> None:
        """Return once all written files are on the disk, with their names.

        A file that can't be synced is removed, and the call raises `OSError`.
        """
        while len(self._unsynced) > _UNSYNCED:
            self._sync_batch()
        # Files and folder together, because one flush of the disk can serve all of them.
        self._sync_batch(partial(files.sync_dir, self._folder))

    def _sync_batch(self, *extra: Callable[[], object]) -> None:
        """Sync one batch of files, several at a time, and make other calls at the same time."""
        with self._lock:
            batch = [self._unsynced.popleft() for _ in range(min(_UNSYNCED, len(self._unsynced)))]
            self._unsynced_bytes = 0
        calls = [*(file.sync for file in batch), *extra]
        try:
            few = len(batch) <= _FEW_SYNCS and sum(file.size for file in batch) <= _FEW_SYNC_BYTES
            for_each(lambda call: call(), calls, 1 if self._unhurried or few else _SYNCS)
        finally:
            for file in batch:
                file.close()


def _urgency(job: _Job) -> int:
    """Return the place of a job in the best order: arrays first, then segments by the order of their source."""
    if job.source is None:
        return -1
    return min(map(job.source.position, range(job.begin, job.begin + len(job.sizes))))


def _has(path: str, found: Extent, pieces: list[Array]) -> bool:
    """Return whether an extent of a file has exactly these bytes and their checksums; False if it can't be read."""
    try:
        with files.reading(path) as file:
            at, buffer = found.offset, np.empty(_PIECE_BYTES, np.uint8)
            for piece in pieces:
                for part in _cut(piece, _PIECE_BYTES):
                    block = buffer[: part.size]
                    if files.read_into(file, block, at) != part.size or not np.array_equal(block, part):
                        return False
                    at += part.size
            # If the bytes are equal but the checksums aren't, the earlier manifest is wrong.
            return at == found.offset + found.size and checksums(pieces) == found.checksums
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
    """Return the bytes of an extent of a large array of `size` bytes."""
    return min(max(-(-size // MOST_FILES), LARGE_BYTES), BLOCK_BYTES)


def _cut(data: Any, size: int) -> Iterator[Any]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))
