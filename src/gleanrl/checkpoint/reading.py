"""Data files, read: each byte once, into the place where it stays, and compared with its checksum on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.checkpoint.manifest import BLOCK_BYTES, DataFile
from gleanrl.checkpoint.segments import ALIGNMENT, Array, Layout, Segmented, bytes_of
from gleanrl.errors import CorruptCheckpointError
from gleanrl.native import crc32
from gleanrl.system import fs
from gleanrl.system.threads import for_each

_GAP_BYTES = 1 << 20  # that nobody wants, read at once
_THREADS = 2
_FEW_BYTES = 1 << 22


class _OneFile:
    """A file that is read from its beginning to its end, with pauses."""

    def __init__(self, folder: Path, entry: DataFile, verify: bool) -> None:
        self.path, self.reached = f"{folder}/{entry.name}", 0
        self._entry, self._verify = entry, verify
        self._checksum = 0  # of what was read of a block

    @property
    def left(self) -> int:
        """Bytes that weren't read yet."""
        return self._entry.size - self.reached

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open it; the operating system's errors are damage."""
        try:
            with fs.reading(self.path) as file:
                yield file
        except OSError as cause:
            raise CorruptCheckpointError(f"{self.path}: {cause}") from cause

    def read(self, file: int, pieces: Iterable[memoryview]) -> None:
        """Fill memory, piece after piece, with what follows; whatever their sizes, much is read at once."""
        block: list[memoryview] = []
        room = BLOCK_BYTES - self.reached % BLOCK_BYTES
        for piece in pieces:
            rest = piece
            while len(rest) >= room:
                self._fill(file, [*block, rest[:room]])
                block, rest, room = [], rest[room:], BLOCK_BYTES
            if rest:
                block.append(rest)
                room -= len(rest)
        if block:
            self._fill(file, block)

    def _fill(self, file: int, pieces: list[memoryview]) -> None:
        """Read what doesn't reach into another block."""
        size = sum(map(len, pieces))
        if fs.read_pieces(file, pieces, self.reached) != size:
            raise CorruptCheckpointError(f"{self.path}: it became shorter")
        self.reached += size
        if not self._verify:
            return
        self._checksum = crc32(pieces, self._checksum)
        if not self.reached % BLOCK_BYTES or self.reached == self._entry.size:
            block = (self.reached - 1) // BLOCK_BYTES
            if self._checksum != self._entry.checksums[block]:
                raise CorruptCheckpointError(
                    f"{self.path}: bytes {block * BLOCK_BYTES} to {self.reached} aren't what was written"
                )
            self._checksum = 0

    def skip(self, file: int, offset: int) -> None:
        """Go on to an offset; what lies before it is only compared."""
        while self._verify and self.reached < offset:
            gap = memoryview(bytearray(min(offset - self.reached, _GAP_BYTES)))
            self.read(file, [gap])
        self.reached = max(self.reached, offset)

    def end(self, file: int) -> None:
        """Compare the rest."""
        self.skip(file, self._entry.size)


class FileReader:
    """Reads arrays and rows out of the data files of a checkpoint.

    Args:
        folder: the checkpoint.
        files: those of its manifest.
        verify: whether checksums are compared; sizes are always.

    Raises:
        CorruptCheckpointError: a file is missing, of another size, or not a plain file.
    """

    def __init__(self, folder: Path, files: tuple[DataFile, ...], verify: bool) -> None:
        self._folder, self._files, self._verify = folder, files, verify
        self._begun: dict[int, _OneFile] = {}
        self._rows: list[Stored] = []
        self._of_rows: set[int] = set()
        for entry in files:
            path = f"{folder}/{entry.name}"
            try:
                size = fs.size_at(path)
            except OSError as cause:
                raise CorruptCheckpointError(f"{path}: {cause}") from cause
            if size != entry.size:
                raise CorruptCheckpointError(f"{path}: {size} bytes instead of {entry.size}")

    def fetch(self, pieces: Any, size: int) -> Array:
        """Return bytes of an array, in memory of their own.

        Args:
            pieces: what `FileWriter.store` returned.
            size: how many there are.

        Raises:
            CorruptCheckpointError: there are others, or they stand elsewhere, or were damaged.
        """
        found = self._pieces(pieces, size)
        data: Array = np.empty(size, np.uint8)
        view = data.data
        ends = accumulate(count for _, _, count in found)
        parts = [view[end - count : end] for (_, _, count), end in zip(found, ends, strict=True)]
        files = [self._file(number) for number, _, _ in found]

        def read_one(number: int) -> None:
            one, (_, offset, _) = files[number], found[number]
            if offset < one.reached:
                raise CorruptCheckpointError(f"an array at {found[number]}, where another one stands")
            with one.opened() as file:
                one.skip(file, offset)
                one.read(file, [parts[number]])

        apart = len(set(files)) == len(files)
        for_each(read_one, range(len(found)), _THREADS if apart and size > _FEW_BYTES else 1)
        return data

    def _file(self, number: int) -> _OneFile:
        if number in self._of_rows:
            raise CorruptCheckpointError(f"an array in file {number}, where rows stand")
        if number not in self._begun:
            self._begun[number] = _OneFile(self._folder, self._files[number], self._verify)
        return self._begun[number]

    def _pieces(self, pieces: Any, size: int) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        if not isinstance(pieces, list):
            raise CorruptCheckpointError("an array without a place")
        for piece in pieces:
            if (
                not isinstance(piece, list)
                or len(piece) != 3
                or not all(type(n) is int and n >= 0 for n in piece)
            ):
                raise CorruptCheckpointError(f"an array at {piece!r:.50}")
            number, offset, count = piece
            if number >= len(self._files) or offset + count > self._files[number].size or not count:
                raise CorruptCheckpointError(f"an array at {piece}, where there's nothing")
            found.append((number, offset, count))
        if sum(count for _, _, count in found) != size:
            raise CorruptCheckpointError(f"an array of {size} bytes that stands in others")
        return found

    def rows(self, first: int, layout: Layout, identity: str) -> Stored:
        """Return rows, which aren't read yet.

        Args:
            first: number of the file of their first segment.
            layout: how they lie.
            identity: see `Segmented`.

        Raises:
            CorruptCheckpointError: the files aren't of that layout.
        """
        numbers = range(first, first + layout.count)
        fits = layout.count <= len(self._files) and numbers.stop <= len(self._files)
        if not fits or any(number in self._begun or number in self._of_rows for number in numbers):
            raise CorruptCheckpointError(f"rows in files {first} to {numbers.stop}, where others stand")
        files = self._files[first : numbers.stop]
        if [file.size for file in files] != layout.sizes():
            raise CorruptCheckpointError(f"rows in files {first} to {numbers.stop} that have other sizes")
        self._of_rows.update(numbers)
        stored = Stored(self._folder, files, layout, identity, self._verify)
        self._rows.append(stored)
        return stored

    def finish(self, rows: bool) -> None:
        """Compare the checksums of what wasn't read; nothing is read after this.

        Args:
            rows: whether those of rows, too; they are compared when these are read.

        Raises:
            CorruptCheckpointError: something was damaged.
        """
        if not self._verify:
            return
        for number in range(len(self._files)):
            if number not in self._of_rows:
                one = self._file(number)
                if one.left:
                    with one.opened() as file:
                        one.end(file)
        for stored in self._rows if rows else ():
            stored.check()


class Stored(Segmented):
    """Rows in the files of a checkpoint."""

    def __init__(
        self, folder: Path, files: Sequence[DataFile], layout: Layout, identity: str, verify: bool
    ) -> None:
        self.layout, self.identity = layout, identity
        self._folder, self._files, self._verify = folder, files, verify

    def read(self, columns: Sequence[torch.Tensor], behind: int = 0) -> None:
        """Read the rows into the first rows of columns, ``[rows or more, *shape]`` each, on any device.

        Args:
            columns: where to.
            behind: how many of the rows, the first ones, come behind the others.

        Raises:
            CorruptCheckpointError: a file is damaged; columns hold something then.
        """
        rows = self.layout.rows
        memory = [
            bytes_of(column).data if column.is_cpu and column.is_contiguous() else None for column in columns
        ]

        def read_one(number: int) -> None:
            spans = [
                ((start - behind) % rows, stop - start)
                for start, stop in _cut_at(behind, *self.layout.span(number))
            ]
            count = sum(rows_in for _, rows_in in spans)
            gaps = memoryview(bytearray(ALIGNMENT * len(columns)))  # apart: each is compared
            pieces: list[memoryview] = []
            taken: list[tuple[torch.Tensor, torch.Tensor]] = []
            for column, whole, width in zip(columns, memory, self.layout.widths, strict=True):
                for start, rows_in in spans:
                    if whole is None:
                        part = torch.empty(rows_in, *column.shape[1:], dtype=column.dtype, device="cpu")
                        taken.append((column[start : start + rows_in], part))
                        pieces.append(bytes_of(part).data)
                    else:
                        pieces.append(whole[start * width : (start + rows_in) * width])
                if padding := -count * width % ALIGNMENT:
                    pieces.append(gaps[:padding])
                    gaps = gaps[ALIGNMENT:]
            one = _OneFile(self._folder, self._files[number], self._verify)
            with one.opened() as file:
                one.read(file, pieces)
            for place, part in taken:
                place.copy_(part)

        self._each(read_one)

    def check(self) -> None:
        """Compare checksums only.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """

        def check_one(number: int) -> None:
            one = _OneFile(self._folder, self._files[number], self._verify)
            with one.opened() as file:
                one.end(file)

        self._each(check_one)

    def _each(self, call: Any) -> None:
        # A small file comes out of the system's cache sooner than two threads hand the interpreter to each other.
        large = sum(file.size for file in self._files) > _FEW_BYTES * self.layout.count
        for_each(call, range(self.layout.count), _THREADS if large else 1)

    def tensors(self) -> list[torch.Tensor]:
        """Return all columns in memory.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        columns = self.layout.empty()
        self.read(columns)
        return columns


def _cut_at(row: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Return a span in one piece, or two where one ends at `row`."""
    return [(start, row), (row, stop)] if start < row < stop else [(start, stop)]
