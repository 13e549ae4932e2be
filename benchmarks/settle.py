"""Puts a process into the state in which plain code runs at its best, whatever ran in it before."""

from __future__ import annotations

import gc

import numpy as np

LARGEST = (32 << 20) - (16 << 10)


def settle_allocator() -> None:
    """Lets glibc keep freed memory instead of handing it back to the system; does no harm elsewhere.

    glibc maps blocks above a threshold from the system one by one, and gives the heap's free end back above twice
    that threshold; both rise with the largest mapped block that was freed, up to 32 MB. So whether a loop that makes
    arrays of some megabytes for each batch pays for fresh pages each time (a third of its speed) depends on what
    happened to be freed before it. One block of nearly 32 MB, made and freed, settles that for every side.
    """
    np.empty(LARGEST, np.uint8)


def settle_garbage() -> None:
    """Collects what is garbage and takes what a set-up made out of the collector's sight while sides are timed."""
    gc.collect()
    gc.freeze()
