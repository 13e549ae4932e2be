"""Settings of a process in which plain code runs at its best, independent of earlier work in the process."""

from __future__ import annotations

import gc

import numpy as np

LARGEST = (32 << 20) - (16 << 10)


def settle_allocator() -> None:
    """Make glibc keep freed memory instead of returning it to the system; harmless with other allocators.

    glibc maps each block above a threshold from the system. It returns the free end of the heap if that exceeds twice
    the threshold. The threshold rises to the size of the largest mapped block that was freed, up to 32 MB. A loop may
    allocate some megabytes for each batch. Above the threshold it pays for new pages each time, a third of its speed.
    So its speed would depend on blocks that were freed earlier. To settle this for every side, the function allocates
    and frees one block of nearly 32 MB.
    """
    np.empty(LARGEST, np.uint8)


def settle_garbage() -> None:
    """Collect garbage, then exclude the objects of the set-up from garbage collections while sides are timed."""
    gc.collect()
    gc.freeze()
