"""Memory that an owner and its workers share, without a name: nothing is left of it, whatever dies.

One descriptor stands for all of it. The first page or pages hold each worker's progress (see `Progress`); the rest is
for whatever the owner lays out there, and may grow.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from gleanrl.block import Block, Schema, numpy_dtype
from gleanrl.errors import CapacityError
from gleanrl.system.proc import available_memory

_ALIGNMENT = 64
PLACE, STEP, WORK, MEMORY, HALT = range(5)
"""Words of a worker's progress: which item is at work, at which step, how many requests were begun, and the most memory
that the process had; and the owner's word that what is long should be broken off, because the crew is being closed."""
_WORDS = 8


class Segment:
    """Shared memory, seen from one process. One thread at a time; views of it may be used by any.

    Args:
        num_workers: how many progresses it holds.
        descriptor: one that another process made; None makes a new segment. Either way it's owned here.

    Raises:
        CapacityError: if the machine hasn't the memory.
    """

    def __init__(self, num_workers: int, descriptor: int | None = None) -> None:
        self._head = -(-num_workers * _WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size = 0
        if descriptor is None:
            descriptor = os.memfd_create("gleanrl", os.MFD_CLOEXEC)
            try:
                _reserve(descriptor, 0, self._head)
            except BaseException:
                os.close(descriptor)
                raise
        self.descriptor = descriptor
        head: Any = _mapped(descriptor, self._head).view(np.int64)
        self._progress = memoryview(head)
        self._data: np.ndarray[Any, Any] = np.empty(0, np.uint8)

    def progress(self, worker: int) -> memoryview:
        """Return the words of a worker: int64, see `PLACE` and the others."""
        return self._progress[worker * _WORDS : (worker + 1) * _WORDS]

    def grow(self, size: int) -> None:
        """Make room for `size` bytes of data; the process that made the segment calls it before the others.

        Raises:
            CapacityError: if the machine hasn't the memory; nothing has changed then.
        """
        if size <= self.size:
            return
        if os.fstat(self.descriptor).st_size < self._head + size:
            _reserve(self.descriptor, self._head + self.size, size - self.size)
        self._data = _mapped(self.descriptor, self._head + size)[self._head :]
        self.size = size

    def block(self, schema: Schema, batch_size: Sequence[int], num_steps: int) -> Block:
        """Return a block over the data, from their first byte on; the same arguments give the same place.

        The block is borrowed: it's written again in the next rollout.
        """
        shapes = [(*batch_size, num_steps, *field.shape) for field in schema.fields]
        starts, end = [], 0
        for shape, field in zip(shapes, schema.fields, strict=True):
            starts.append(end)
            end += -(-prod(shape) * field.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.grow(end)
        columns = [
            self._tensor(start, shape, field.dtype)
            for start, shape, field in zip(starts, shapes, schema.fields, strict=True)
        ]
        return Block(schema, batch_size, num_steps, columns=columns, borrowed=True)

    def _tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kind = numpy_dtype(dtype)
        array = self._data[start : start + prod(shape) * kind.itemsize].view(kind).reshape(shape)
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype is dtype else tensor.view(dtype)

    def close(self) -> None:
        """Close the descriptor; views stay valid, and memory is given back with the last of them."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._data = np.empty(0, np.uint8)


def _mapped(descriptor: int, size: int) -> np.ndarray[Any, Any]:
    """Return the first `size` bytes of a file. Unlike `mmap`, torch keeps no descriptor of its own for them."""
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
