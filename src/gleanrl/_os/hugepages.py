"""Memory in mappings of its own, in large pages where the system has such.

Fresh memory costs a fault for every page that is touched: in pages of 4 KB these take longer than filling it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
"""Bytes: columns start with a cache line."""
_LEAST = 4 << 20  # bytes that are worth large pages
_LARGE_PAGE = 2 << 20


def zeroed(num_bytes: int) -> Array:
    """Return zeroed bytes, ``(num_bytes,)`` uint8, aligned; many of them in large pages.

    Raises:
        MemoryError: the system refuses.
    """
    if num_bytes < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        return memory[skip : skip + num_bytes]
    # Linux aligns what is a multiple of large pages; other memory begins and ends with hundreds of small ones.
    region = _mapping(-(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE)
    with suppress(OSError):  # a system may be built or set not to have them
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8, num_bytes)


def mapped(num_bytes: int) -> Array:
    """Return zeroed bytes, 1 or more, in a mapping of their own, which goes back to the system with its last view.

    What the allocator has goes back once nothing behind it is in use any more: then it may be a GB by one call, for a
    tenth of a second in which every thread of Python waits.

    Raises:
        MemoryError: the system refuses.
    """
    return np.frombuffer(_mapping(num_bytes), np.uint8)


def _mapping(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as cause:
        raise MemoryError(f"the system refuses {num_bytes:,} bytes of memory: {cause}") from cause
