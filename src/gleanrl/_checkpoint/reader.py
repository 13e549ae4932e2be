"""Reading of data files: each byte once, directly into its final memory, with checksums compared on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl._checkpoint.manifest import BLOCK_BYTES, DataFile, Extent, arrays_in, columns_in
from gleanrl._checkpoint.row_segments import (
    ALIGNMENT,
    Array,
    Segmented,
    SegmentLayout,
    Unread,
    empty_columns,
    rows_of,
)
from gleanrl._os import files as fs
from gleanrl._os.parallel_read import Reading, Spread, Target, Targets, read_files, spread_rows
from gleanrl.errors import CorruptCheckpointError

# The most that one call reads. An interrupt is raised only after the call.
_CALL_BYTES, _CALL_PIECES = 1 << 28, 1 << 18
_FEW_BYTES = 1 << 22  # Up to this size, one thread reads.
_THREADS = 2
_NOTHING: Array = np.empty((0, 2), np.int64)  # no memory to read into


class FileReader:
    """Reads arrays and rows from the data files of a checkpoint.

    Call `fill` first, then `fetch` and `rows`, and `finish` last.

    Args:
        folder: the checkpoint.
        files: the files of its manifest.
        extents: the extents of its manifest.
        verify: whether checksums are compared; sizes always are.

    Raises:
        CorruptCheckpointError: a file is missing, has another size, or isn't a plain file.
    """

    def __init__(
        self, folder: Path, files: Sequence[DataFile], extents: Sequence[Extent], verify: bool
    ) -> None:
        self._paths = [f"{folder}/{file.name}" for file in files]
        self._extents, self._verify = extents, verify
        self._reached: dict[int, int] = {}  # For each extent of arrays, the end of its last array.
        self._rows: list[Stored] = []
        self._later: set[int] = set()  # extents that are read later, when their rows are loaded
        for path, file in zip(self._paths, files, strict=True):
            try:
                size = fs.size_at(path)
            except OSError as cause:
                raise CorruptCheckpointError(f"{path}: {cause}") from cause
            if size != file.size:
                raise CorruptCheckpointError(f"{path}: expected {file.size} bytes, got {size}")

    def fill(self, tree: Any, unread: bool = False) -> None:
        """Read the arrays of a state's tree, and replace each reference in the tree by its array, ``(n,)`` uint8.

        Args:
            tree: the tree of a state.
            unread: whether columns with separate extents become `Unread`, to be read later into their final memory.

        Raises:
            CorruptCheckpointError: a reference is invalid, overlaps another array, or its bytes are damaged.
        """
        pieces: dict[int, list[tuple[int, int]]] = {}
        columns = {id(node) for node in columns_in(tree)} if unread else ()
        for node, key in arrays_in(tree):
            places = self._checked(node[key])
            own = id(node) in columns and self._left(places)
            node[key] = own or self._allocate(places, pieces)
        self._read(pieces)

    def _left(self, places: list[tuple[int, int, int]]) -> Unread | None:
        """Return an unread array for these pieces, or None if it is empty or shares its extents."""
        numbers = [number for number, _, _ in places]
        extents = [self._extents[number] for number in numbers]
        size = sum(extent.size for extent in extents)
        if not size or [(0, extent.size) for extent in extents] != [piece[1:] for piece in places]:
            return None
        for number in numbers:
            if number in self._reached or number in self._later:
                raise CorruptCheckpointError(f"an array in extent {number}, which holds another array")
            self._later.add(number)
        return Unread(torch.uint8, (size,), tuple(self._reading(number, _NOTHING) for number in numbers))

    def _allocate(
        self, places: list[tuple[int, int, int]], pieces: dict[int, list[tuple[int, int]]]
    ) -> Array:
        """Allocate memory for an array, and add its pieces to the pieces to read, by extent."""
        data: Array = np.empty(sum(count for _, _, count in places), np.uint8)
        at = data.ctypes.data
        for number, offset, count in places:
            gap = offset - self._reached.get(number, 0)
            if gap < 0 or number in self._later:
                raise CorruptCheckpointError(
                    f"an array at {[number, offset, count]}, which overlaps another array"
                )
            # The bytes before the array are read to nowhere, so that the checksums of whole blocks can be compared.
            pieces.setdefault(number, []).extend([(0, gap), (at, count)] if gap else [(at, count)])
            self._reached[number] = offset + count
            at += count
        return data

    def _checked(self, noted: Any) -> list[tuple[int, int, int]]:
        """Return the extent, the offset in it and the bytes of each piece of an array."""
        found: list[tuple[int, int, int]] = []
        if not isinstance(noted, list):
            raise CorruptCheckpointError(f"expected a list of the places of an array, got {noted!r:.50}")
        for piece in noted:
            if (
                not isinstance(piece, list)
                or len(piece) != 3
                or not all(type(n) is int and n >= 0 for n in piece)
            ):
                raise CorruptCheckpointError(
                    f"expected [extent, offset, bytes] of an array, got {piece!r:.50}"
                )
            number, offset, count = piece
            if number >= len(self._extents) or offset + count > self._extents[number].size or not count:
                raise CorruptCheckpointError(f"an array at {piece}, which isn't inside an extent")
            found.append((number, offset, count))
        return found

    def _read(self, pieces: dict[int, list[tuple[int, int]]]) -> None:
        """Read extents of arrays; with `verify`, to their ends, so that all checksums can be compared."""
        for number, parts in pieces.items():
            if self._verify and (rest := self._extents[number].size - self._reached.get(number, 0)):
                parts.append((0, rest))
        _read_all(self._reading(number, _table(parts)) for number, parts in pieces.items())

    def _reading(self, number: int, pieces: Array) -> Reading:
        file, offset, size, checksums = self._extents[number]
        return Reading(self._paths[file], offset, size, pieces, checksums if self._verify else ())

    def fetch(self, array: Any, size: int) -> Array | Unread:
        """Return the bytes of an array, in private memory or unread.

        Args:
            array: the value that `fill` put into the tree.
            size: the expected number of bytes.

        Raises:
            CorruptCheckpointError: `fill` put no array there, or one of another size.
        """
        found = array.shape[0] if isinstance(array, Unread) else getattr(array, "size", None)
        if found != size:
            raise CorruptCheckpointError(f"expected an array of {size} bytes, got {found}")
        return array

    def rows(self, first: int, layout: SegmentLayout, identity: str) -> Stored:
        """Return rows that will be read later. Their extents must belong to no array and no other rows.

        Args:
            first: the number of the extent of their first segment.
            layout: their layout.
            identity: see `Segmented`.

        Raises:
            CorruptCheckpointError: the extents don't match the layout, or hold other data.
        """
        numbers = range(first, first + layout.count)
        fits = layout.count <= len(self._extents) and numbers.stop <= len(self._extents)
        if not fits or any(number in self._reached or number in self._later for number in numbers):
            raise CorruptCheckpointError(
                f"rows in extents {first} to {numbers.stop}, which don't exist or hold other data"
            )
        if [one.size for one in self._extents[first : numbers.stop]] != layout.sizes():
            raise CorruptCheckpointError(
                f"rows in extents {first} to {numbers.stop}, whose sizes don't match the layout"
            )
        self._later.update(numbers)
        stored = Stored([self._reading(number, _NOTHING) for number in numbers], layout, identity)
        self._rows.append(stored)
        return stored

    def finish(self, rows: bool) -> None:
        """Compare the checksums of extents that no array or row refers to; do nothing without `verify`.

        Args:
            rows: whether to compare the checksums of rows, too. Otherwise they are compared when the rows are read.

        Raises:
            CorruptCheckpointError: bytes are damaged.
        """
        if not self._verify:
            return
        numbers = range(len(self._extents))
        self._read({n: [] for n in numbers if n not in self._later and n not in self._reached})
        for stored in self._rows if rows else ():
            stored.check()


class Stored(Segmented):
    """Rows in the files of a checkpoint.

    Args:
        segments: the file range of each segment, without memory to read into.
        layout: their layout.
        identity: see `Segmented`.
    """

    def __init__(self, segments: Sequence[Reading], layout: SegmentLayout, identity: str) -> None:
        self.layout, self.identity, self._segments = layout, identity, segments

    def read(self, columns: Sequence[torch.Tensor], behind: int = 0) -> None:
        """Read the rows into the first rows of columns, ``[rows or more, *shape]`` each, on any device.

        Args:
            columns: the destinations.
            behind: rotates the rows: the first `behind` of them are placed after all others.

        Raises:
            CorruptCheckpointError: a file is damaged. The columns may be partly overwritten then.
        """
        layout = self.layout
        if not layout.count:
            return
        at_once = min(_CALL_BYTES // max(layout.size(0), 1), _CALL_PIECES // max(len(columns), 1))
        at_once = max(at_once, 1)
        for first in range(0, layout.count, at_once):
            self._read_some(np.arange(first, min(first + at_once, layout.count)), columns, behind)

    def _read_some(self, numbers: Array, columns: Sequence[torch.Tensor], behind: int) -> None:
        """Read consecutive segments; see `read`.

        Columns that aren't contiguous CPU memory are read into temporary memory and copied.
        """
        layout, rows = self.layout, self.layout.rows
        starts = numbers * layout.step
        stops = np.minimum(starts + layout.step, rows)
        begin, end = int(starts[0]), int(stops[-1])
        # A segment that contains row `behind` is split there, because its two parts have separate destinations.
        middle = np.clip(behind, starts, stops)
        edges, counts = np.stack((starts, middle), 1), np.stack((middle - starts, stops - middle), 1)
        # For each column: the rows before the split, the rows from it on, and the padding.
        pieces = np.zeros((len(numbers), len(columns), 3, 2), np.int64)
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for position, (column, width) in enumerate(zip(columns, layout.widths, strict=True)):
            to = (edges - behind) % rows
            if not (column.is_cpu and column.is_contiguous()):
                part = torch.empty(end - begin, *column.shape[1:], dtype=column.dtype, device="cpu")
                staged.append((column, part))
                column, to = part, edges - begin
            pieces[:, position, :2, 0] = column.data_ptr() + to * width
            pieces[:, position, :2, 1] = counts * width
            pieces[:, position, 2, 1] = -(stops - starts) * width % ALIGNMENT
        _read_all(
            self._segments[number]._replace(into=table) for number, table in zip(numbers, pieces, strict=True)
        )
        for column, part in staged:
            for start, stop in _cut_at(behind, begin, end):
                first = (start - behind) % rows
                column[first : first + stop - start].copy_(part[start - begin : stop - begin])

    def first_rows(self) -> list[torch.Tensor]:
        """Return the rows of the first segment, in new memory.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        layout = self.layout
        columns = empty_columns(layout.fields, min(layout.step, layout.rows))
        if layout.count:
            self._read_some(np.arange(1), columns, 0)
        return columns

    def check(self) -> None:
        """Compare the checksums without storing any rows.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        _read_all(segment._replace(into=_table([(0, segment.size)])) for segment in self._segments)

    def tensors(self) -> list[torch.Tensor]:
        """Return all columns in new memory.

        Raises:
            CorruptCheckpointError: a file is damaged.
        """
        columns = self.layout.empty()
        self.read(columns)
        return columns


def spread(columns: Iterable[tuple[Unread | torch.Tensor, Sequence[Target]]]) -> None:
    """Copy rows of columns to their targets, from memory first and then from files.

    Raises:
        CorruptCheckpointError: a file is damaged. The targets may be partly overwritten then.
    """
    parts: list[Reading] = []
    in_memory: list[tuple[Array, Sequence[Target]]] = []
    for column, targets in columns:
        if isinstance(column, Unread):
            before, together = 0, Targets(targets)
            for part in column.parts:
                parts.append(part._replace(into=Spread(column.width, before, together)))
                before += part.size
        elif column.numel():
            in_memory.append((rows_of(column), targets))
    spread_rows(in_memory, _THREADS)
    _read_all(parts)


def all_read(columns: Sequence[Any]) -> list[Any]:
    """Return the columns, with unread ones read into new memory.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    found = [
        empty_columns([(column.dtype, column.shape[1:])], column.shape[0])[0]
        if isinstance(column, Unread)
        else column
        for column in columns
    ]
    start = np.zeros(1, np.int64)
    spread(
        (column, [Target(rows_of(made), start, start)])
        for column, made in zip(columns, found, strict=True)
        if isinstance(column, Unread)
    )
    return found


def _table(pieces: Sequence[tuple[int, int]]) -> Array:
    """Return addresses and sizes in the form that `Reading` expects."""
    return np.array(pieces, np.int64).reshape(-1, 2)


def _read_all(parts: Iterable[Reading]) -> None:
    """Read parts of files in batches; raise `CorruptCheckpointError` at the first damage."""
    for some in _batches(parts):
        threads = _THREADS if sum(part.size for part in some) > _FEW_BYTES else 1
        damage = read_files(some, BLOCK_BYTES, threads)
        if damage is not None:
            raise CorruptCheckpointError(f"{damage.path}: {damage.description}")


def _batches(parts: Iterable[Reading]) -> Iterator[list[Reading]]:
    some: list[Reading] = []
    size = 0
    for part in parts:
        some.append(part)
        size += part.size
        if size >= _CALL_BYTES or len(some) >= _CALL_PIECES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _cut_at(row: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Return a span, split at `row` if the row lies inside it."""
    return [(start, row), (row, stop)] if start < row < stop else [(start, stop)]
