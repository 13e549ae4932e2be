"""Large arrays used again once nothing refers to them.

Fresh memory of many megabytes is mapped by the operating system page by page, which costs more than filling
it. A training loop drops one batch as it takes the next: the pool hands the dropped batch's memory out again.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

MIN_BYTES = 1 << 20
"""Smaller arrays come from the allocator, which recycles those by itself."""


class BlockPool:
    """Arrays for the large leaves of batches of one size; at most `spare` unused ones of each kind are kept.

    An array is used again only after every tensor and array over its memory has been collected. Taking an
    array of another batch size lets all unused ones go, so that the pool never holds more than a batch.

    Threads: any; lists are changed by single operations under the interpreter lock.

    Args:
        spare: unused arrays kept of each shape and dtype.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self._rows = 0
        self._unused: dict[tuple[Any, ...], list[np.ndarray[Any, Any]]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an uninitialised array ``(rows, ...)`` that nothing else refers to."""
        if shape[0] != self._rows:
            self._rows, self._unused = shape[0], {}
        unused = self._unused.setdefault((shape, dtype), [])
        try:
            block = unused.pop()
        except IndexError:
            block = np.empty(shape, dtype)
        # A tensor keeps the array it was made from, this view, and not `block`: the view dies with the last
        # tensor.
        view = block[...]
        weakref.finalize(view, self._give_back, unused, block).atexit = False
        return view

    def _give_back(self, unused: list[np.ndarray[Any, Any]], block: np.ndarray[Any, Any]) -> None:
        # A list that `take` has dropped since takes nothing back.
        if len(unused) < self.spare and self._unused.get((block.shape, block.dtype)) is unused:
            unused.append(block)
