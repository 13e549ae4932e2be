"""Memory that an owner and its workers share: each worker's progress, and named regions with blocks of rows.

One file descriptor without a name refers to all of it, so that nothing is left when processes die. The first pages hold
the workers' progress (see `ITEM` and the following words). The owner lays out regions by name in the rest. A region
has one or several blocks of rows. With two blocks, the worker writes one while the owner reads the other.
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
ITEM, STEP, WORK, MEMORY, HALT = range(5)
"""The words of a worker's progress:

- `ITEM`: the index of the item that the worker works on.
- `STEP`: the step of that item. Items before it have done this step, and later items have done the previous one.
- `WORK`: the number of requests begun.
- `MEMORY`: the process's peak memory in bytes.
- `HALT`: set by the owner to make the worker break off long work, because the pool is being closed.
"""
OWN = 8
"""The first of the words that the owner and the service use for their own purposes."""
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
        """The shapes of all columns, including lists, which each process keeps privately."""
        return [
            torch.Size((*self.batch_size, self.num_steps, *field.row_shape)) for field in self.schema.fields
        ]

    @cached_property
    def starts(self) -> list[int]:
        """The first byte of each column relative to the block; the last entry is the block's size."""
        starts = [0]
        for shape, field in zip(self.shapes, self.schema.fields, strict=True):
            size = 0 if field.is_list else shape.numel() * field.dtype.itemsize
            starts.append(starts[-1] + _aligned(size))
        return starts


@dataclass(frozen=True)
class Region:
    """A part of a segment: consecutive blocks of the same rows. The owner sends it to the workers that use it.

    Attributes:
        start: its first byte.
        rows: the rows of each block.
        num_blocks: the number of blocks.
    """

    start: int
    rows: SharedRows
    num_blocks: int

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.start + self.num_blocks * self.rows.starts[-1]


class SharedSegment:
    """Shared memory, seen from one process. For one thread at a time; any thread may use views of it.

    Args:
        num_workers: the number of workers whose progress it holds.
        descriptor: the memory that another process made and will close; None creates new memory.

    Raises:
        CapacityError: the machine lacks the memory.
    """

    def __init__(self, num_workers: int, descriptor: int | None = None) -> None:
        self._head = -(-num_workers * _WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._owned = Descriptors()
        if descriptor is None:
            (descriptor,) = self._owned.take(memory("gleanrl"))
            _reserve(descriptor, 0, self._head)
        self.descriptor = descriptor
        head: Any = _mapped(descriptor, self._head).view(np.int64)
        self._progress = memoryview(head)
        self._data: np.ndarray[Any, Any] = np.empty(0, np.uint8)
        self._regions: dict[str, Region] = {}

    def progress(self, worker: int) -> memoryview:
        """Return the words of a worker, int64; see `ITEM` and the following words."""
        return self._progress[worker * _WORDS : (worker + 1) * _WORDS]

    # ---------------------------------------------------------------- regions
    def region(self, name: str, rows: SharedRows, num_blocks: int = 1) -> Region:
        """Lay out a region. Only the process that made the segment may call this.

        A region of the same name is replaced, and its memory may be reused. So no process may use the old blocks any
        more.

        Raises:
            CapacityError: the machine lacks the memory; nothing has changed then.
        """
        size = num_blocks * rows.starts[-1]
        former = self._regions.get(name)
        other_regions = [region for other_name, region in self._regions.items() if other_name != name]
        if former is not None and former.end - former.start >= size:
            start = former.start
        else:
            start = _first_gap(other_regions, size)
        region = Region(start, rows, num_blocks)
        self._map(region.end)
        self._regions[name] = region
        return region

    def block(self, region: Region, number: int = 0) -> Block:
        """Return a block of a region that the owner laid out: views of its `number`-th block, from 0.

        The block is borrowed: a later rollout overwrites it. Its lists belong to this process alone.
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
        """Map at least `size` bytes of data. In the process that made the segment, reserve missing memory first."""
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
        """Close the descriptor, if this object made the memory. Views stay valid, and the last one frees the memory."""
        self._owned.close()
        self._data = np.empty(0, np.uint8)


def _first_gap(regions: Sequence[Region], size: int) -> int:
    """Return the first position of `size` free bytes between the regions, or after them."""
    start = 0
    for region in sorted(regions, key=lambda region: region.start):
        if start + size <= region.start:
            break
        start = region.end
    return start


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mapped(descriptor: int, size: int) -> np.ndarray[Any, Any]:
    """Map the first `size` bytes of a file; raise `CapacityError` if that fails.

    Unlike `mmap`, torch keeps no duplicate of the descriptor open.
    """
    try:
        # A trial, because torch leaks a descriptor when the mapping fails.
        mmap.mmap(descriptor, size).close()
    except OSError as cause:
        raise CapacityError(f"shared memory: {size} bytes can't be mapped: {cause}") from cause
    array: np.ndarray[Any, Any] = torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
    ).numpy()
    return array


def _reserve(descriptor: int, start: int, size: int) -> None:
    """Reserve memory for a part of a segment now, so that later writes to it can't fail; else raise `CapacityError`."""
    left = available_memory()
    try:
        if left is not None and size > left:
            raise OSError(f"{left} bytes are left")
        os.posix_fallocate(descriptor, start, size)
    except OSError as cause:
        raise CapacityError(f"shared memory: {size} bytes can't be reserved: {cause}") from cause
