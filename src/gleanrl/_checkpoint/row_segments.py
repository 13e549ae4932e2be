"""Rows of columns in segments. Consecutive segments share a data file, which is written or linked as a whole."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from gleanrl._os.hugepages import zeroed
from gleanrl._os.parallel_read import Reading

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
MOST_FILES = 128
"""The most files for the rows of one storage, and for one large array."""
_LEAST_BYTES, _MOST_BYTES = 1 << 19, 1 << 21  # of a segment
_PAGE_BYTES = 1 << 12
_ZEROS: Array = np.zeros(ALIGNMENT, np.uint8)


@dataclass(frozen=True)
class SegmentLayout:
    """The layout of rows in segments. A segment holds its columns one after the other, each aligned to 64 bytes.

    Attributes:
        fields: dtype and shape of a row of each column.
        rows: the number of rows.
        step: rows in a segment; the last one may have fewer.
        together: the number of consecutive segments that share a file when the rows are written.
    """

    fields: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    rows: int
    step: int
    together: int = field(default=1, compare=False)

    @classmethod
    def fitting(
        cls, fields: Sequence[tuple[torch.dtype, tuple[int, ...]]], rows: int, capacity: int
    ) -> SegmentLayout:
        """Return a layout for a storage with room for `capacity` rows.

        Neither size depends on the current `rows`, so a storage that isn't full yet keeps its earlier files.

        There are at most `MOST_FILES` files. If 1 % of consecutive rows change, at most 3 % of a large storage's bytes
        are rewritten. Small storages have fewer files, because each file costs a sync. A segment has at most 2 MiB,
        because a writer may have to wait while a segment is saved. So files of large storages hold several segments.
        """
        width = sum(dtype.itemsize * math.prod(shape) for dtype, shape in fields)
        size = min(max(width * capacity // MOST_FILES, _LEAST_BYTES), _MOST_BYTES)
        step = max(size // max(width, 1), 1)
        # A round number of rows: most columns then need no padding and are cut at page boundaries, where copies are
        # fastest. It is rounded up, so that there aren't more files.
        unit = min(1 << max(step.bit_length() - 2, 0), _PAGE_BYTES)
        step = -(-step // unit) * unit
        return cls(tuple(fields), rows, step, max(-(-capacity // (step * MOST_FILES)), 1))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes in a row of each column."""
        return tuple(dtype.itemsize * math.prod(shape) for dtype, shape in self.fields)

    @property
    def count(self) -> int:
        """The number of segments."""
        return -(-self.rows // self.step)

    def span(self, number: int) -> tuple[int, int]:
        """Return the rows of a segment, ``[start, stop)``."""
        return number * self.step, min((number + 1) * self.step, self.rows)

    def touched(self, start: int, stop: int) -> range:
        """Return the segments that contain any of the rows ``[start, stop)``; rows from `rows` on don't count."""
        stop = min(stop, self.rows)
        return range(start // self.step, -(-stop // self.step)) if start < stop else range(0)

    def size(self, number: int) -> int:
        """Return the bytes of a segment."""
        start, stop = self.span(number)
        return self._full_size if stop - start == self.step else self._size(stop - start)

    @cached_property
    def _full_size(self) -> int:
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
        return self._full_size * (self.count - 1) + self.size(self.count - 1) if self.count else 0

    def places(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the offset and size of each column within a segment, in bytes."""
        start, stop = self.span(number)
        offset = 0
        for width in self.widths:
            size = (stop - start) * width
            yield offset, size
            offset += _aligned(size)

    def columns(self, number: int, data: Array) -> list[torch.Tensor]:
        """Return views of the columns in a segment's bytes, ``[rows, *shape]`` each."""
        start, stop = self.span(number)
        return [
            torch.from_numpy(data[offset : offset + size]).view(dtype).view(stop - start, *shape)
            if size
            else torch.empty(stop - start, *shape, dtype=dtype, device="cpu")
            for (offset, size), (dtype, shape) in zip(self.places(number), self.fields, strict=True)
        ]

    def pieces(self, number: int, columns: Sequence[torch.Tensor | Array]) -> list[Array]:
        """Return a segment's bytes as consecutive pieces: views of the columns, and padding.

        Args:
            number: the number of the segment.
            columns: ``[rows or more, *shape]`` each, or all bytes of a column (see `bytes_of`).
        """
        start, stop = self.span(number)
        found = []
        for column, width in zip(columns, self.widths, strict=True):
            size = (stop - start) * width
            if isinstance(column, np.ndarray):
                found.append(column[start * width : stop * width])
            else:
                found.append(bytes_of(column[start:stop]))
            if padding := -size % ALIGNMENT:
                found.append(_ZEROS[:padding])
        return found

    def empty(self) -> list[torch.Tensor]:
        """Return new CPU memory for the columns, ``[rows, *shape]`` each."""
        return empty_columns(self.fields, self.rows)


@dataclass(frozen=True)
class Unread:
    """A non-empty tensor in separate extents that haven't been read.

    Attributes:
        dtype: the dtype of the tensor.
        shape: its shape, with the rows first.
        parts: the file ranges of its bytes in order, without memory to read into.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Reading, ...]

    @cached_property
    def width(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


class PrivateColumns(list[Any]):
    """Columns in private memory, including their generations. The receiver may keep the memory."""


class Segmented(ABC):
    """Rows of columns that are moved segment by segment. Only `tensors` moves all of them at once."""

    layout: SegmentLayout
    identity: str
    """Identifies these rows in their present state; no other rows ever have the same identity."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return all columns in memory, ``[rows, *shape]`` each. May be called once."""


def empty_columns(fields: Sequence[tuple[torch.dtype, tuple[int, ...]]], rows: int) -> list[torch.Tensor]:
    """Return zeroed memory for columns on the CPU, ``[rows, *shape]`` each.

    All columns share one array, as views. A large array uses large pages, which then also serve the short columns.
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
    """Return the bytes of a tensor in row-major order, ``(n,)`` uint8.

    The result is a view if the tensor is contiguous and on the CPU.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # A tensor with one element is contiguous with any stride, but `view` needs stride 1.
    flat = flat.as_strided(flat.shape, (1,))
    found: Array = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return found


def rows_of(column: torch.Tensor) -> Array:
    """Return the bytes of a column, ``(n, bytes of a row)`` uint8; a view where `bytes_of` returns one."""
    width = column.element_size() * math.prod(column.shape[1:])
    return bytes_of(column).reshape(len(column), width)


def rows_at(data: Array, rows: Array | slice) -> Array:
    """Return a copy of rows of ``(n, bytes of a row)``. A slice is copied faster than an index array."""
    return data[rows].copy() if isinstance(rows, slice) else data.take(rows, 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
