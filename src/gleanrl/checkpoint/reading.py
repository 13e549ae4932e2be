"""Data files, read: each byte once, into the place where it stays, and compared with its checksum on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.checkpoint.manifest import BLOCK_BYTES, DataFile, arrays_in
from gleanrl.checkpoint.segments import ALIGNMENT, Array, Layout, Segmented, bytes_of
from gleanrl.errors import CorruptCheckpointError
from gleanrl.system import fs
from gleanrl.system.file_reading import Reading, read_files

_CALL_BYTES = 1 << 26  # read by one call, for which interrupts wait
_FEW_BYTES = 1 << 22  # read by one thread
_THREADS = 2


class FileReader:
    """Reads arrays and rows out of the data files of a checkpoint: first `fill`, then the others, and last `finish`.

    Args:
        folder: the checkpoint.
        files: those of its manifest.
        verify: whether checksums are compared; sizes are always.

    Raises:
        CorruptCheckpointError: a file is missing, of another size, or not a plain file.
    """

    def __init__(self, folder: Path, files: tuple[DataFile, ...], verify: bool) -> None:
        self._folder, self._files, self._verify = folder, files, verify
        self._reached: dict[int, int] = {}  # where the last array ends, of each file of arrays
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

    def fill(self, tree: Any) -> None:
        """Read the arrays of a state's tree, and put each one in the tree in place of what was noted of it.

        Raises:
            CorruptCheckpointError: an array stands nowhere, or where another one does, or was damaged.
        """
        pieces: dict[int, list[memoryview | int]] = {}
        for node, key in arrays_in(tree):
            node[key] = self._place(node[key], pieces)
        self._read(pieces)

    def _place(self, noted: Any, pieces: dict[int, list[memoryview | int]]) -> Array:
        """Return memory for an array, whose pieces are noted to be read, file by file."""
        places = self._checked(noted)
        data: Array = np.empty(sum(count for _, _, count in places), np.uint8)
        view, at = data.data, 0
        for number, offset, count in places:
            gap = offset - self._reached.get(number, 0)
            if gap < 0:
                raise CorruptCheckpointError(
                    f"an array at {[number, offset, count]}, where another one stands"
                )
            pieces.setdefault(number, []).extend(
                [gap, view[at : at + count]] if gap else [view[at : at + count]]
            )
            self._reached[number] = offset + count
            at += count
        return data

    def _checked(self, noted: Any) -> list[tuple[int, int, int]]:
        """Return file, offset and bytes of each piece of an array."""
        found: list[tuple[int, int, int]] = []
        if not isinstance(noted, list):
            raise CorruptCheckpointError("an array without a place")
        for piece in noted:
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
        return found

    def _read(self, pieces: dict[int, list[memoryview | int]]) -> None:
        """Read files of arrays to their ends, as far as anybody wants or compares them."""
        for number, parts in pieces.items():
            if self._verify and (rest := self._files[number].size - self._reached.get(number, 0)):
                parts.append(rest)
        _read_all(_reading(self._folder, self._files[n], parts, self._verify) for n, parts in pieces.items())

    def fetch(self, array: Any, size: int) -> Array:
        """Return the bytes of an array, in memory of their own.

        Args:
            array: what `fill` put into the tree.
            size: how many there are.

        Raises:
            CorruptCheckpointError: it put nothing there, or another number of bytes.
        """
        if not isinstance(array, np.ndarray) or array.size != size:
            raise CorruptCheckpointError(f"an array of {size} bytes that stands in others")
        return array

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
        if not fits or any(number in self._reached or number in self._of_rows for number in numbers):
            raise CorruptCheckpointError(f"rows in files {first} to {numbers.stop}, where others stand")
        files = self._files[first : numbers.stop]
        if [file.size for file in files] != layout.sizes():
            raise CorruptCheckpointError(f"rows in files {first} to {numbers.stop} that have other sizes")
        self._of_rows.update(numbers)
        stored = Stored(self._folder, files, layout, identity, self._verify)
        self._rows.append(stored)
        return stored

    def finish(self, rows: bool) -> None:
        """Compare the checksums of files that hold nothing.

        Args:
            rows: whether those of rows, too; they are compared when these are read.

        Raises:
            CorruptCheckpointError: something was damaged.
        """
        if not self._verify:
            return
        numbers = range(len(self._files))
        self._read({n: [] for n in numbers if n not in self._of_rows and n not in self._reached})
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
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []

        def reading(number: int) -> Reading:
            spans = [
                ((start - behind) % rows, stop - start)
                for start, stop in _cut_at(behind, *self.layout.span(number))
            ]
            count = sum(rows_in for _, rows_in in spans)
            pieces: list[memoryview | int] = []
            for column, whole, width in zip(columns, memory, self.layout.widths, strict=True):
                for start, rows_in in spans:
                    if whole is None:
                        part = torch.empty(rows_in, *column.shape[1:], dtype=column.dtype, device="cpu")
                        staged.append((column[start : start + rows_in], part))
                        pieces.append(bytes_of(part).data)
                    else:
                        pieces.append(whole[start * width : (start + rows_in) * width])
                if padding := -count * width % ALIGNMENT:
                    pieces.append(padding)
            return _reading(self._folder, self._files[number], pieces, self._verify)

        def settle() -> None:
            for place, part in staged:
                place.copy_(part)
            staged.clear()

        _read_all(map(reading, range(self.layout.count)), settle)

    def check(self) -> None:
        """Compare checksums only.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        _read_all(_reading(self._folder, file, [file.size], self._verify) for file in self._files)

    def tensors(self) -> list[torch.Tensor]:
        """Return all columns in memory.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        columns = self.layout.empty()
        self.read(columns)
        return columns


def _reading(folder: Path, file: DataFile, pieces: list[memoryview | int], verify: bool) -> Reading:
    return Reading(f"{folder}/{file.name}", file.size, pieces, file.checksums if verify else ())


def _read_all(files: Iterable[Reading], settle: Callable[[], object] = lambda: None) -> None:
    """Read files, some at a time, after which each time `settle` is called."""
    for some in _parted(files):
        threads = _THREADS if sum(file.size for file in some) > _FEW_BYTES else 1
        damage = read_files(some, BLOCK_BYTES, threads)
        if damage is not None:
            raise CorruptCheckpointError(f"{damage.path}: {damage.what}")
        settle()


def _parted(files: Iterable[Reading]) -> Iterator[list[Reading]]:
    some: list[Reading] = []
    size = 0
    for file in files:
        some.append(file)
        size += file.size
        if size >= _CALL_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _cut_at(row: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Return a span in one piece, or two where one ends at `row`."""
    return [(start, row), (row, stop)] if start < row < stop else [(start, stop)]
