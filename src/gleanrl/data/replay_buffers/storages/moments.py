"""What a storage held at one moment, while it's written on.

Its rows are copied segment by segment, when they are asked for, or before a write changes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gleanrl.checkpoint.segments import Array, Layout, Source
from gleanrl.data.replay_buffers.versions import Change, Version
from gleanrl.system.forks import renew_in_child


class Mark(NamedTuple):
    """What a storage remembers of rows that have a name in checkpoints."""

    version: Version
    """When they were all that it held."""
    lent: int
    """How often views had been given to others until then."""


class Moment(Source):
    """The rows of a storage at one moment.

    Made under the lock of the storage's buffer. From then on the storage calls `before` ahead of each write; whoever
    saves the moment takes its segments in other threads. The lock here is held while one segment is copied, never
    longer.

    Args:
        columns: live, ``[rows or more, *shape]`` each; the first one holds the generations.
        rows: how many are stored.
        start: the row that will be overwritten next: what follows it is taken first.
        earlier: for the names of moments that may be known to somebody, what changed since; None for all of it.
    """

    def __init__(
        self,
        columns: Sequence[torch.Tensor],
        rows: int,
        start: int,
        earlier: dict[str, list[Change] | None],
    ) -> None:
        fields = [(column.dtype, tuple(column.shape[1:])) for column in columns]
        super().__init__(Layout.fitting(fields, rows, columns[0].shape[0]))
        self._columns = columns
        self._first = start // self.layout.step
        self._earlier = earlier
        self._size = self.layout.size(0) if rows else 0
        self._pending = set(range(self.layout.count))
        self.after_fork(())
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Let the parent save it: there is no thread for that in the child."""
        if lineage:
            self._pending = set()
        self._turn = threading.Condition(threading.Lock())
        self._saved: dict[int, Array] = {}
        self._spare: list[Array] = []
        self._begun = False

    @property
    def open(self) -> bool:
        """Whether some segment is still needed."""
        return bool(self._pending)

    # The writers' side

    def before(self, spans: Iterable[tuple[int, int]]) -> None:
        """Copy what is still needed of the slots ``[start, stop)`` that are about to change."""
        for start, stop in spans:
            for number in self.layout.touched(start, stop):
                if number in self._pending:
                    self._save(number)

    def _save(self, number: int) -> None:
        with self._turn:
            while self._begun and len(self._saved) * self._size >= self.room and number in self._pending:
                self._turn.wait()
            if number in self._pending:
                self._saved[number] = self._copied(number)
                self._pending.discard(number)

    def _copied(self, number: int) -> Array:
        memory = self._spare.pop() if self._spare else np.empty(self._size, np.uint8)
        data: Array = memory[: self.layout.size(number)]
        self.layout.fill(number, self._columns, data)
        return data

    # The side of who saves it

    def unchanged(self, earlier: str) -> list[bool] | None:
        """Return which segments hold what they held at the moment of that name."""
        changes = self._earlier.get(earlier)
        if changes is None:
            return None
        same = [True] * self.layout.count
        for change in changes:
            for number in self.layout.touched(change.start, change.stop):
                same[number] = False
        return same

    def order(self) -> list[int]:
        """Return the segments in the order in which a ring writer will come to them."""
        count = self.layout.count
        return [(self._first + number) % count for number in range(count)]

    def begin(self) -> None:
        """Have writers wait for segments to be taken when many were copied for them."""
        self._begun = True

    def take(self, number: int) -> Array:
        """Return a segment's bytes."""
        with self._turn:
            data = self._saved.pop(number, None)
            if data is None:
                data = self._copied(number)
            self._pending.discard(number)
            self._turn.notify_all()
        return data

    def give(self, data: Array) -> None:
        """Give back the memory that `take` returned."""
        memory = data.base
        if isinstance(memory, np.ndarray) and memory.size == self._size:
            self._spare.append(memory)

    def skip(self, number: int) -> None:
        """Say that a segment isn't needed."""
        with self._turn:
            self._pending.discard(number)
            if self._saved.pop(number, None) is not None:
                self._turn.notify_all()

    def close(self) -> None:
        """Copy for writers no more, and let nobody wait."""
        with self._turn:
            self._begun = False
            self._pending = set()
            self._saved.clear()
            self._spare.clear()
            self._turn.notify_all()
