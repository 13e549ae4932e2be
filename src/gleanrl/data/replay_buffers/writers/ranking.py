"""Which of the stored records are the worst: ranks and ages by slot, the worst ones in order."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Integers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

_TAIL = 1024  # records kept in order at least, once the order matters


class Ranking:
    """The ranks of the records in slots ``[0, size)``, and their ages for equal ranks: the older one is better.

    The worst records are kept in order (the *tail*), every other one is better than all of them. When the tail
    is used up, the next one is found in one pass over all ranks, so that a replacement costs
    O(capacity / 1024) on average, and O(log) of what is written.

    Memory: 16 bytes for each slot.

    Args:
        capacity: slots.
        ranks: of the records stored, ``(size,)``; no NaN.
        ages: when they came, ``(size,)``, each number once; the smallest came first.
    """

    def __init__(self, capacity: int, ranks: Floats, ages: Integers) -> None:
        self.size = len(ranks)
        # Untouched pages of these cost nothing.
        self.ranks: Floats = np.empty(capacity, np.float64)
        self.ages: Integers = np.empty(capacity, np.int64)
        self.ranks[: self.size] = ranks
        self.ages[: self.size] = ages
        self._next_age = int(ages.max()) + 1 if self.size else 0
        self._tail: Integers = np.empty(0, np.int64)  # slots, the worst one last

    def worst(self, count: int) -> Integers:
        """Return the slots of the `count` worst records (at most `size`), the worst one first."""
        if len(self._tail) < count:
            self._find(max(count, min(_TAIL, self.size)))
        return self._tail[len(self._tail) - count :][::-1]

    def put(self, slots: Integers, ranks: Floats) -> None:
        """Learn that new records came to `slots`, each once, in this order; slots beyond `size` follow it."""
        if not len(slots):
            return
        tail = self._tail[~np.isin(self._tail, slots)]
        self.ranks[slots] = ranks
        self.ages[slots] = np.arange(self._next_age, self._next_age + len(slots))
        self._next_age += len(slots)
        self.size = max(self.size, int(slots.max()) + 1)
        if len(tail):
            # The newest of equals is the worst one: what equals the tail's best belongs to the tail.
            among = slots[ranks <= self.ranks[tail[0]]]
            if len(among):
                tail = self._ordered(np.concatenate([tail, among]))[-2 * _TAIL :]
        self._tail = tail

    def _find(self, count: int) -> None:
        ranks = self.ranks[: self.size]
        if count < self.size:
            bound = np.partition(ranks, count - 1)[count - 1]
            slots = np.flatnonzero(ranks <= bound)
        else:
            slots = np.arange(self.size)
        self._tail = self._ordered(slots)[-count:]

    def _ordered(self, slots: Integers) -> Integers:
        """Return `slots`, the best one first."""
        return slots[np.lexsort((self.ages[slots], -self.ranks[slots]))]

    def check_valid(self) -> None:
        """Raise AssertionError unless the tail holds the worst records in order; for tests."""
        everything = self._ordered(np.arange(self.size))
        assert np.array_equal(everything[self.size - len(self._tail) :], self._tail)
        assert len(np.unique(self.ages[: self.size])) == self.size
        assert not self.size or self.ages[: self.size].max() < self._next_age
