"""Parallel reading of many files, directly into their final memory, with checksums compared on the way.

Part of the access to the file system, see `files`. The fault points are `fs.open` and `fs.read`, once for each part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gleanrl._arrays import native
from gleanrl._os import fault_points

Array = np.ndarray[Any, Any]


class Target(NamedTuple):
    """The destination of consecutive rows, in runs."""

    memory: Array
    """``(n, bytes of a row)`` uint8, contiguous."""
    starts: Array
    """The first row of each run, ``(k,)`` int64, rising from 0. The last run extends to the last row."""
    to: Array
    """The row of `memory` that the first row of each run is copied to, ``(k,)`` int64; -1 skips the run."""
    stride: int = 1
    """The distance in `memory` between consecutive rows of a run, in rows."""


class Targets:
    """All destinations of some rows.

    Args:
        each: The targets.
    """

    def __init__(self, each: Sequence[Target]) -> None:
        self._each = each  # keeps the memory alive whose addresses `numbers` holds
        self.numbers = [
            (t.memory.ctypes.data, t.stride, t.starts.ctypes.data, t.to.ctypes.data, len(t.starts))
            for t in each
        ]
        """The targets in the form that the native core expects."""


class Spread(NamedTuple):
    """Bytes of rows that are copied to targets."""

    width: int
    """Bytes of a row."""
    before: int
    """The number of bytes of the rows that precede these bytes."""
    targets: Targets

    def numbers(self, size: int) -> tuple[int, int, int, list[tuple[int, int, int, int, int]]]:
        """Return the description of `size` bytes that the native core expects."""
        return self.width, self.before, size, self.targets.numbers


class Reading(NamedTuple):
    """A part of a plain file to read."""

    path: str
    offset: int
    """Its first byte in the file."""
    size: int
    """Its number of bytes."""
    into: Array | Spread
    """The destination: either addresses and sizes of memory to fill in order, ``(..., 2)`` int64, contiguous, or rows.

    Address 0 skips the bytes. Rows cover the whole part. The caller keeps the memory alive.
    """
    checksums: Sequence[int]
    """The crc32 of each block; the last block may be short. The pieces cover the whole part then. Empty for no
    check.
    """


class Damage(NamedTuple):
    """A damaged file, and a description of the damage."""

    path: str
    description: str


def read_files(files: Sequence[Reading], block: int, threads: int) -> Damage | None:
    """Read parts of files. An interrupt is raised after the end of the call.

    Args:
        files: The parts. Symbolic links, devices and pipes are refused.
        block: Number of bytes for each checksum.
        threads: The most threads that read.

    Returns:
        The first damage in the order of the parts, or None. With damage, some of the memory may be filled.

    Raises:
        OSError: Only at a fault point.
    """
    # All visits come before the call, because the native core has no fault points.
    for _ in files:
        fault_points.point("fs.open")
        fault_points.point("fs.read")
    found = native.read_files(
        [
            (path, offset, into.numbers(size) if isinstance(into, Spread) else into, checksums)
            for path, offset, size, into, checksums in files
        ],
        block,
        threads,
    )
    if found is None:
        return None
    number, kind, detail = found
    file = files[number]
    end = min(detail + block, file.offset + file.size)
    descriptions = (
        os.strerror(detail),
        f"it became shorter: {detail} bytes",
        f"bytes {detail} to {end} don't match their checksum",
    )
    return Damage(file.path, descriptions[kind])


def spread_rows(columns: Iterable[tuple[Array, Sequence[Target]]], threads: int) -> None:
    """Copy rows in memory to all their targets, in at most `threads` threads.

    The rows are ``(n, bytes of a row)`` uint8, contiguous.
    """
    prepared = [(rows, Targets(targets)) for rows, targets in columns]
    native.spread_rows(
        [(rows.ctypes.data, (rows.shape[1], 0, rows.nbytes, to.numbers)) for rows, to in prepared], threads
    )
