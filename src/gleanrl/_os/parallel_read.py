"""Many files that are read at once, each byte into the place where it stays, and compared with checksums on the way.

A part of the seam to the file system, see `fs`; the fault points are `fs.open` and `fs.read`, once for each part.
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
    """Where rows go that follow each other, run after run."""

    memory: Array
    """``(n, bytes of a row)`` uint8, contiguous."""
    starts: Array
    """The first row of each run, ``(k,)`` int64, rising from 0 on; the last one takes all that follow."""
    to: Array
    """Which row of `memory` that becomes, ``(k,)`` int64; -1 where nobody wants the run."""
    stride: int = 1
    """How many rows of `memory` further the next row of the run goes."""


class Targets:
    """Where rows are copied to, all of them.

    Args:
        each: The targets.
    """

    def __init__(self, each: Sequence[Target]) -> None:
        self._each = each  # whose memory this keeps
        self.numbers = [
            (t.memory.ctypes.data, t.stride, t.starts.ctypes.data, t.to.ctypes.data, len(t.starts))
            for t in each
        ]
        """What the core is told of them."""


class Spread(NamedTuple):
    """Bytes of rows, which are copied to targets."""

    width: int
    """Bytes of a row."""
    before: int
    """How many bytes of the rows stand before these."""
    targets: Targets

    def numbers(self, size: int) -> tuple[int, int, int, list[tuple[int, int, int, int, int]]]:
        """Return what the core is told of so many bytes."""
        return self.width, self.before, size, self.targets.numbers


class Reading(NamedTuple):
    """A part of a plain file to be read."""

    path: str
    offset: int
    """Where it begins."""
    size: int
    """Its bytes."""
    into: Array | Spread
    """Address and size of memory that is filled, piece after piece, ``(..., 2)`` int64, contiguous; address 0 for bytes
    that nobody wants. Or rows, which all of it consists of. Somebody keeps the memory."""
    checksums: Sequence[int]
    """The crc32 of each block, the last one may be short: pieces are all of it then. None for no comparing."""


class Damage(NamedTuple):
    """What is wrong with a file."""

    path: str
    what: str


def read_files(files: Sequence[Reading], block: int, threads: int) -> Damage | None:
    """Read parts of files; an interrupt waits for the end of that.

    Args:
        files: The parts. Symbolic links, devices and pipes are refused.
        block: Bytes that have one checksum.
        threads: How many read, at most.

    Returns:
        What was wrong first, in the order of the parts; some of the memory is filled then. None if all is well.

    Raises:
        OSError: At a fault point only.
    """
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
    what = (
        os.strerror(detail),
        f"it became shorter: {detail} bytes",
        f"bytes {detail} to {end} aren't what was written",
    )
    return Damage(file.path, what[kind])


def spread_rows(columns: Iterable[tuple[Array, Sequence[Target]]], threads: int) -> None:
    """Copy rows in memory, ``(n, bytes of a row)`` uint8, contiguous, to all their targets, in some threads at most."""
    kept = [(rows, Targets(targets)) for rows, targets in columns]
    native.spread_rows(
        [(rows.ctypes.data, (rows.shape[1], 0, rows.nbytes, to.numbers)) for rows, to in kept], threads
    )
