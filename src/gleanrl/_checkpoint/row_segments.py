"""Rows of columns in segments: what is written, kept from an earlier checkpoint, and read, one extent for each."""

from __future__ import annotations

import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from gleanrl._os.hugepages import zeroed
from gleanrl._os.parallel_read import Reading

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
_PARTS, _LEAST_BYTES, _MOST_BYTES = 256, 1 << 16, 1 << 21
_PAGE_BYTES = 1 << 12
_ZEROS: Array = np.zeros(ALIGNMENT, np.uint8)


@dataclass(frozen=True)
class SegmentLayout:
    """How rows lie in segments: of each segment the fields one after the other, each from a multiple of 64 on.

    Attributes:
        fields: dtype and shape of a row of each column.
        rows: how many there are.
        step: rows in a segment; the last one may have less.
    """

    fields: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    rows: int
    step: int

    @classmethod
    def fitting(
        cls, fields: Sequence[tuple[torch.dtype, tuple[int, ...]]], rows: int, capacity: int
    ) -> SegmentLayout:
        """Return a layout for a storage that has room for `capacity` rows, however many there are now.

        A hundredth of the rows, one after the other, touches less than a fiftieth of the bytes where these are many; a
        segment is never large, so that a large storage does better than that, and never tiny, because each has its line
        in the manifest.
        """
        width = sum(dtype.itemsize * math.prod(shape) for dtype, shape in fields)
        size = min(max(width * capacity // _PARTS, _LEAST_BYTES), _MOST_BYTES)
        step = max(size // max(width, 1), 1)
        # A round number: many rows need no padding, and columns are cut at pages, where they are copied fastest.
        unit = min(1 << max(step.bit_length() - 2, 0), _PAGE_BYTES)
        return cls(tuple(fields), rows, (step + unit // 2) // unit * unit)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes in a row of each column."""
        return tuple(dtype.itemsize * math.prod(shape) for dtype, shape in self.fields)

    @property
    def count(self) -> int:
        """How many segments there are."""
        return -(-self.rows // self.step)

    def span(self, number: int) -> tuple[int, int]:
        """Return the rows of a segment, ``[start, stop)``."""
        return number * self.step, min((number + 1) * self.step, self.rows)

    def touched(self, start: int, stop: int) -> range:
        """Return the segments that hold one of the rows ``[start, stop)``."""
        stop = min(stop, self.rows)
        return range(start // self.step, -(-stop // self.step)) if start < stop else range(0)

    def size(self, number: int) -> int:
        """Return the bytes of a segment."""
        start, stop = self.span(number)
        return self._whole if stop - start == self.step else self._size(stop - start)

    @cached_property
    def _whole(self) -> int:
        return self._size(self.step)

    def _size(self, rows: int) -> int:
        return sum(_aligned(rows * width) for width in self.widths)

    def sizes(self) -> list[int]:
        """Return the bytes of each segment."""
        last = self.count - 1
        return [self.size(0)] * last + [self.size(last)] if last >= 0 else []

    @property
    def total(self) -> int:
        """The bytes of all segments."""
        return self._whole * (self.count - 1) + self.size(self.count - 1) if self.count else 0

    def places(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield where each column stands in a segment: offset and bytes."""
        start, stop = self.span(number)
        offset = 0
        for width in self.widths:
            size = (stop - start) * width
            yield offset, size
            offset += _aligned(size)

    def columns(self, number: int, data: Array) -> list[torch.Tensor]:
        """Return the columns that a segment's bytes hold, ``[rows, *shape]`` each: views."""
        start, stop = self.span(number)
        return [
            torch.from_numpy(data[offset : offset + size]).view(dtype).view(stop - start, *shape)
            if size
            else torch.empty(stop - start, *shape, dtype=dtype, device="cpu")
            for (offset, size), (dtype, shape) in zip(self.places(number), self.fields, strict=True)
        ]

    def pieces(self, number: int, columns: Sequence[torch.Tensor | Array]) -> list[Array]:
        """Return a segment's bytes, one piece after the other: views of columns, and padding.

        Args:
            number: of the segment.
            columns: ``[rows or more, *shape]`` each, or all bytes of one (see `bytes_of`).
        """
        start, stop = self.span(number)
        found = []
        for column, width in zip(columns, self.widths, strict=True):
            size = (stop - start) * width
            if isinstance(column, torch.Tensor):
                found.append(bytes_of(column[start:stop]))
            else:
                found.append(column[start * width : stop * width])
            if padding := -size % ALIGNMENT:
                found.append(_ZEROS[:padding])
        return found

    def empty(self) -> list[torch.Tensor]:
        """Return memory for the columns on the CPU, ``[rows, *shape]`` each."""
        return empty_columns(self.fields, self.rows)


@dataclass(frozen=True)
class Unread:
    """A tensor that isn't empty, in extents of its own that aren't read yet.

    Attributes:
        dtype: of the tensor.
        shape: with its rows first.
        parts: its bytes, one extent after the other, into nothing yet.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Reading, ...]

    @cached_property
    def width(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


class Fresh(list[Any]):
    """Columns in memory that nobody else has, like the generations beside them: who is given them may keep it."""


class Segmented(ABC):
    """Rows of columns that are moved segment by segment, and never all at once unless somebody asks for that."""

    layout: SegmentLayout
    identity: str
    """A name for these rows as they are at this moment; no other rows ever have it."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return all columns in memory, ``[rows, *shape]`` each; at most once."""


class SavedRows(Segmented):
    """Rows to be written. Each segment is settled, taken or skipped by any thread between `begin` and `close`."""

    room = 24 << 20
    """Bytes of segments that may be copied for writers before somebody takes them; who needs more of it waits."""
    first = 0
    """The segment that is best taken first; those behind it follow, around the end."""

    def __init__(self, layout: SegmentLayout) -> None:
        self.layout = layout
        self.identity = uuid.uuid4().hex

    @abstractmethod
    def unchanged(self, earlier: str) -> Array | None:
        """Return which segments hold what they held in rows of that identity, ``(n,)`` bool; None if nothing tells."""

    def position(self, number: int) -> int:
        """Return how many segments are best taken before one."""
        return (number - self.first) % self.layout.count

    def order(self) -> list[int]:
        """Return the segments in the order in which they are best taken."""
        return sorted(range(self.layout.count), key=self.position)

    @abstractmethod
    def begin(self) -> None:
        """Say that every segment will be taken or skipped soon: who is held up by that may wait for it."""

    @abstractmethod
    def look(self, number: int) -> list[Array] | None:
        """Return a segment's bytes, piece after piece, where they live; None if they were written on already.

        They may be written on while somebody reads them: `settled` tells.
        """

    @abstractmethod
    def settled(self, number: int) -> bool:
        """Return whether a segment wasn't written on since `look`, and say that it isn't needed then."""

    @abstractmethod
    def take(self, number: int) -> Array:
        """Return a segment's bytes, ``(n,)`` uint8, in memory of their own."""

    @abstractmethod
    def give(self, data: Array) -> None:
        """Give back the memory that `take` returned."""

    @abstractmethod
    def pick(self, column: int, rows: Array | slice) -> Array:
        """Return any rows of a column, ``(k, bytes of a row)`` uint8, as often as anybody asks.

        Args:
            column: its number.
            rows: theirs, ``(k,)`` int64, or a slice; of segments that weren't settled, taken or skipped.
        """

    @abstractmethod
    def skip(self, numbers: Sequence[int]) -> None:
        """Say that segments aren't needed."""

    @abstractmethod
    def close(self) -> None:
        """Say that no segment is needed any more; may be done twice."""

    def tensors(self) -> list[torch.Tensor]:
        """Return all columns in memory."""
        columns = self.layout.empty()
        self.begin()
        try:
            for number in self.order():
                data = self.take(number)
                start, stop = self.layout.span(number)
                for column, part in zip(columns, self.layout.columns(number, data), strict=True):
                    column[start:stop].copy_(part)
                self.give(data)
        finally:
            self.close()
        return columns


def empty_columns(fields: Sequence[tuple[torch.dtype, tuple[int, ...]]], rows: int) -> list[torch.Tensor]:
    """Return memory for columns on the CPU, ``[rows, *shape]`` each.

    One array for all: large ones get large pages, which the short columns share with the long ones.
    """
    sizes = [rows * dtype.itemsize * math.prod(shape) for dtype, shape in fields]
    starts = [*accumulate(map(_aligned, sizes), initial=0)]
    memory = zeroed(starts[-1])
    return [
        torch.from_numpy(memory[start : start + size]).view(dtype).view(rows, *shape)
        if size
        else torch.empty(rows, *shape, dtype=dtype, device="cpu")
        for start, size, (dtype, shape) in zip(starts, sizes, fields, strict=False)
    ]


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return the bytes of a tensor, in its order, ``(n,)`` uint8; a view where it's contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single number is contiguous with any stride
    found: Array = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return found


def rows_of(column: torch.Tensor) -> Array:
    """Return the bytes of a column, ``(n, bytes of a row)`` uint8; a view where `bytes_of` returns one."""
    width = column.element_size() * math.prod(column.shape[1:])
    return bytes_of(column).reshape(len(column), width)


def rows_at(data: Array, rows: Array | slice) -> Array:
    """Return rows of ``(n, bytes of a row)``, copied; quickly where they follow each other."""
    return data[rows].copy() if isinstance(rows, slice) else data.take(rows, 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
