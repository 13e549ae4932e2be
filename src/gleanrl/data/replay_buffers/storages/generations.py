"""How often each slot of a storage was written or cleared."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch

from gleanrl.data.replay_buffers.storages.memory import zeroed
from gleanrl.system.interrupts import to_the_end

_FIRST_COUNTERS = 1024
_NO_SLOTS = torch.zeros(1, dtype=torch.int64, device="cpu")  # an address for counters that nobody looks at


class Generations:
    """A counter for each slot, in memory that is taken when it is first needed.

    It is zeroed memory, which costs nothing until it is touched: 8 bytes for each row in use. Whoever writes counts by
    the native core, before the bytes move. Not thread-safe: see `Storage`.

    Args:
        counters: ``(slots,)`` int64, to count in from now on; None for memory to be taken.

    Attributes:
        counters: ``(slots or more,)`` int64; None as long as there are none.
        at: their address, for the native core; 0 as long as there are none.
    """

    counters: torch.Tensor | None = None
    at = 0
    _size: int | None = 0  # slots; 0 while nobody knows how many, None for any number

    def __init__(self, counters: torch.Tensor | None = None) -> None:
        if counters is not None:
            self._size = counters.shape[0]
            self.hold(counters)

    def resize(self, size: int | None) -> None:
        """Have a counter for each of `size` slots; None for as many as are asked for."""
        self._size = size

    def of_all(self, rows: int = 0) -> torch.Tensor:
        """Return the counters of all slots; of a storage without a size those of `rows` slots at least.

        Before the size is known there is one, which nobody looks at.
        """
        if self._size == 0:
            return _NO_SLOTS
        counters = self.counters
        if counters is None or rows > counters.shape[0]:
            size = max(2 * rows, _FIRST_COUNTERS) if self._size is None else self._size
            grown = torch.from_numpy(zeroed(8 * size, size).view(np.int64))
            if counters is not None:
                grown[: counters.shape[0]] = counters
            counters = grown
            to_the_end(lambda: self.hold(grown))
        return counters

    def vacated(self, rows: int) -> torch.Tensor:
        """Return a copy of the counters of slots behind the first `rows` that were written before, and emptied.

        Slots are first written one after the other, so that those that never were are the last ones: few are looked at.
        """
        if self.counters is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        counters = self.counters.numpy()
        end = bisect_left(range(len(counters)), True, rows, key=lambda slot: not counters[slot])
        return self.counters[rows:end].clone()

    def hold(self, counters: torch.Tensor) -> None:
        """Count in this memory from now on; may be done twice."""
        self.counters, self.at = counters, counters.data_ptr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy: the counters have another address."""
        self.__dict__.update(state)
        if self.counters is not None:
            self.hold(self.counters)
