"""Large buffers that are used again once nothing refers to them: fresh memory costs a page fault every 4 KB.

A batch of image observations is tens of megabytes. Given back to the system and asked for again, that memory
is faulted in anew for every batch, which takes longer than filling it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# References to a buffer that only the pool holds: its list, and the argument of getrefcount.
_IDLE = 2
_TRACKED = 8


class BufferPool:
    """Hands out uninitialised byte buffers and takes them back by itself when the last view of one has died.

    Any tensor or array made of a buffer keeps it in use, however it was derived; nobody has to return it. At most
    `spare` idle buffers of a size are kept beyond the one handed out. Any number of threads may take.

    Args:
        min_bytes: smaller buffers aren't pooled: the allocator is good at those.
        spare: idle buffers kept of each size.
    """

    def __init__(self, min_bytes: int = 1 << 20, spare: int = 2) -> None:
        self.min_bytes = min_bytes
        self.spare = spare
        self._lock = threading.Lock()
        self._buffers: dict[int, list[Array]] = {}

    def take(self, num_bytes: int) -> Array:
        """Return ``(num_bytes,)`` uint8 that nothing else refers to."""
        if num_bytes < self.min_bytes:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            buffers = self._buffers.setdefault(num_bytes, [])
            idle = [k for k in range(len(buffers)) if sys.getrefcount(buffers[k]) == _IDLE]
            for index in reversed(idle[self.spare + 1 :]):
                del buffers[index]
            if idle:
                return buffers[idle[0]][:]
            buffer = np.empty(num_bytes, np.uint8)
            if len(buffers) < _TRACKED:
                buffers.append(buffer)
            return buffer[:]
