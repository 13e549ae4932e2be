"""Many files that are read at once, each byte into the place where it stays, and compared with checksums on the way.

A part of the seam to the file system, see `fs`; the fault points are `fs.open` and `fs.read`, once for each file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from gleanrl import native
from gleanrl.system import faults


class Reading(NamedTuple):
    """A plain file to be read from its beginning on."""

    path: str
    size: int
    """Its bytes."""
    pieces: list[memoryview | int]
    """Memory that is filled, piece after piece; a number is of bytes that nobody wants."""
    checksums: Sequence[int]
    """The crc32 of each block, the last one may be short: pieces are the whole file then. None for no comparing."""


class Damage(NamedTuple):
    """What is wrong with a file."""

    path: str
    what: str


def read_files(files: Sequence[Reading], block: int, threads: int) -> Damage | None:
    """Read files; an interrupt waits for the end of that.

    Args:
        files: Symbolic links, devices and pipes are refused.
        block: Bytes that have one checksum.
        threads: How many read, at most.

    Returns:
        What was wrong first, in the order of the files; some of the memory is filled then. None if all is well.

    Raises:
        OSError: At a fault point only.
    """
    for _ in files:
        faults.point("fs.open")
        faults.point("fs.read")
    found = native.read_files([(os.fsencode(f.path), f.pieces, f.checksums) for f in files], block, threads)
    if found is None:
        return None
    number, kind, detail = found
    file = files[number]
    end = min(detail + block, file.size)
    what = (
        os.strerror(detail),
        f"it became shorter: {detail} bytes",
        f"bytes {detail} to {end} aren't what was written",
    )
    return Damage(file.path, what[kind])
