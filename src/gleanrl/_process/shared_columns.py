"""Memory that an owner and its workers share, without a name: nothing is left of it, whatever dies.

One descriptor stands for all of it. The first page or pages hold each worker's progress (see `PLACE` and the others);
the rest holds *regions*, which the owner lays out by name: each is one or several blocks of rows. A worker with two
blocks writes one of them while the owner reads the other.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gleanrl._arrays.allocate import lasting
from gleanrl._arrays.block import Block
from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.schema import Schema, numpy_dtype
from gleanrl._os.files import Descriptors, memory
from gleanrl._os.proc import available_memory
from gleanrl.errors import CapacityError

_ALIGNMENT = 64
PLACE, STEP, WORK, MEMORY, HALT = range(5)
"""Words of a worker's progress: which item is at work, at which step (the items before it have made that one, all have
made those before), how many requests were begun, and the most memory that the process had; and the owner's word that
what is long should be broken off, because the crew is being closed."""
OWN = 8
"""The first of the words that owner and servant use as they like."""
_WORDS = 384


@dataclass(frozen=True)
class SharedRows:
    """The rows of a block.

    Attributes:
        schema: its columns.
        batch_size: its batch dimensions.
        num_steps: T.
    """

    schema: Schema
    batch_size: torch.Size
    num_steps: int

    @cached_property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the columns; those of lists, which each process has for itself, included."""
        return [
            torch.Size((*self.batch_size, self.num_steps, *field.row_shape)) for field in self.schema.fields
        ]

    @cached_property
    def starts(self) -> list[int]:
        """The first byte of each column, counted from the block's; the last entry is the block's size."""
        starts = [0]
        for shape, field in zip(self.shapes, self.schema.fields, strict=True):
            size = 0 if field.is_list else shape.numel() * field.dtype.itemsize
            starts.append(starts[-1] + _aligned(size))
        return starts


@dataclass(frozen=True)
class Region:
    """A part of a segment: blocks of the same rows, one after the other. It's sent to whoever is to see them.

    Attributes:
        start: its first byte.
        rows: what each block holds.
        num_blocks: how many there are.
    """

    start: int
    rows: SharedRows
    num_blocks: int

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + self.num_blocks * self.rows.starts[-1]


class SharedSegment:
    """Shared memory, seen from one process. One thread at a time; views of it may be used by any.

    Args:
        num_workers: how many progresses it holds.
        descriptor: of the memory that another process made, which closes it; None makes new memory.

    Raises:
        CapacityError: if the machine hasn't the memory.
    """

    def __init__(self, num_workers: int, descriptor: int | None = None) -> None:
        self._head = -(-num_workers * _WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._held = Descriptors()
        if descriptor is None:
            (descriptor,) = self._held.take(memory("gleanrl"))
            _reserve(descriptor, 0, self._head)
        self.descriptor = descriptor
        head: Any = _mapped(descriptor, self._head).view(np.int64)
        self._progress = memoryview(head)
        self._data: np.ndarray[Any, Any] = np.empty(0, np.uint8)
        self._regions: dict[str, Region] = {}

    def progress(self, worker: int) -> memoryview:
        """Return the words of a worker: int64, see `PLACE` and the others."""
        return self._progress[worker * _WORDS : (worker + 1) * _WORDS]

    # ---------------------------------------------------------------- regions
    def region(self, name: str, rows: SharedRows, num_blocks: int = 1) -> Region:
        """Lay out a region; for the process that made the segment.

        One of the same name is given up for it: its memory is used again, so that its blocks are nobody's any more.

        Raises:
            CapacityError: if the machine hasn't the memory; nothing has changed then.
        """
        size = num_blocks * rows.starts[-1]
        former = self._regions.get(name)
        others = [region for other, region in self._regions.items() if other != name]
        if former is not None and former.end - former.start >= size:
            start = former.start
        else:
            start = _first_gap(others, size)
        region = Region(start, rows, num_blocks)
        self._map(region.end)
        self._regions[name] = region
        return region

    def block(self, region: Region, number: int = 0) -> Block:
        """Return a block of a region that the owner laid out.

        The block is borrowed: it's written again in a later rollout. Its lists are this process's own.
        """
        self._map(region.end)
        rows = region.rows
        first = region.start + number * rows.starts[-1]
        columns = [
            ObjectColumn.blanks(shape, field.blank)
            if field.is_list
            else self._tensor(first + start, shape, field.dtype)
            for start, shape, field in zip(rows.starts, rows.shapes, rows.schema.fields, strict=False)
        ]
        return Block(rows.schema, rows.batch_size, rows.num_steps, columns=columns, borrowed=True)

    def _map(self, size: int) -> None:
        """See at least `size` bytes of data; the process that made the segment takes the memory for them first."""
        if size <= self._data.size:
            return
        missing = self._head + size - os.fstat(self.descriptor).st_size
        if missing > 0:
            _reserve(self.descriptor, self._head + size - missing, missing)
        self._data = _mapped(self.descriptor, self._head + size)[self._head :]

    @lasting
    def _tensor(self, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        kind = numpy_dtype(dtype)
        array = self._data[start : start + shape.numel() * kind.itemsize].view(kind).reshape(shape)
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype is dtype else tensor.view(dtype)

    def close(self) -> None:
        """Close the descriptor; views stay valid, and memory is given back with the last of them."""
        self._held.close()
        self._data = np.empty(0, np.uint8)


def _first_gap(regions: Sequence[Region], size: int) -> int:
    """Return where `size` bytes stand in nobody's way, as far in front as can be."""
    start = 0
    for region in sorted(regions, key=lambda region: region.start):
        if start + size <= region.start:
            break
        start = region.end
    return start


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mapped(descriptor: int, size: int) -> np.ndarray[Any, Any]:
    """Return the first `size` bytes of a file. Unlike `mmap`, torch keeps no descriptor of its own for them."""
    try:
        mmap.mmap(descriptor, size).close()  # torch leaves a descriptor open when it fails
    except OSError as cause:
        raise CapacityError(f"shared memory: {size} bytes can't be mapped: {cause}") from cause
    array: np.ndarray[Any, Any] = torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
    ).numpy()
    return array


def _reserve(descriptor: int, start: int, size: int) -> None:
    """Take memory for a part of a segment now, so that writing there can't fail later."""
    left = available_memory()
    try:
        if left is not None and size > left:
            raise OSError(f"{left} bytes are left")
        os.posix_fallocate(descriptor, start, size)
    except OSError as cause:
        raise CapacityError(f"shared memory: {size} bytes can't be had: {cause}") from cause
