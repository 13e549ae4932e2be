"""Zeroed memory in private mappings, in large pages if the system has them.

The first touch of each page costs a page fault. With pages of 4 KB, these faults take longer than filling the memory.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
"""In bytes: columns start at a cache line."""
_LEAST = 4 << 20  # bytes; smaller memory gains nothing from large pages
_LARGE_PAGE = 2 << 20
# Python names this flag of Linux from 3.13 on. Without it, the system refuses more address space than it has memory.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def zeroed(num_bytes: int) -> Array:
    """Return zeroed bytes, ``(num_bytes,)`` uint8, aligned. Large arrays use large pages.

    Raises:
        MemoryError: the system refuses.
    """
    if num_bytes < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        return memory[skip : skip + num_bytes]
    # Linux aligns mappings whose size is a multiple of a large page. Others begin and end with hundreds of small pages.
    region = _mapping(-(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE)
    with suppress(OSError):  # Large pages may be disabled in the kernel.
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8, num_bytes)


def mapped(num_bytes: int) -> Array:
    """Return 1 or more zeroed bytes in a private mapping, which is unmapped with its last view.

    Memory of the allocator returns to the system only when all memory behind it is free. One call may then return a GB,
    and take a tenth of a second, during which every Python thread waits.

    Raises:
        MemoryError: the system refuses.
    """
    return np.frombuffer(_mapping(num_bytes), np.uint8)


def reserved(num_bytes: int) -> Array:
    """Return 1 or more zeroed bytes of address space, which take memory only where they are written.

    Raises:
        MemoryError: the system refuses.
    """
    region = _mapping(num_bytes, _NO_RESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)


def _mapping(num_bytes: int, flags: int = 0) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError as cause:
        raise MemoryError(f"the system refuses {num_bytes:,} bytes of memory: {cause}") from cause
