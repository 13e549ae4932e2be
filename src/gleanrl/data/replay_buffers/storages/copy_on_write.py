"""What a storage held at one moment, while it's written on.

Its rows are read where they live, and copied before a write changes them, no more of them than that needs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from gleanrl._checkpoint.row_segments import Array, SavedRows, SegmentLayout, bytes_of, rows_at, rows_of
from gleanrl._os.clock import sleep
from gleanrl._os.hugepages import mapped
from gleanrl._os.interrupts import renew_in_child
from gleanrl.data.replay_buffers.change_log import Change, Version, ring_spans

_SECONDS_BETWEEN_LOOKS = 0.001  # of a writer for whom there's no room
_PIECE_BYTES = 1 << 18  # copied at once for a writer, who waits for that
# Memory is taken in slabs and used again: that of a new piece costs more than copying to it does. They are larger where
# many were taken, of which the system has a limit, but never so large that giving one back takes long.
_SLAB_BYTES, _MOST_SLAB_BYTES, _SLABS = 1 << 21, 1 << 26, 256
# For the next pieces; the rest is given back as segments are taken, not all of it at the end.
_KEPT_BYTES = 1 << 24


class Mark(NamedTuple):
    """What a storage remembers of rows that have a name in checkpoints."""

    version: Version
    """When they were all that it held."""
    lent: int
    """How often views had been given to others until then."""


def preserve(
    moments: tuple[weakref.ref[CowSnapshot], ...], ranges: list[tuple[int, int]], size: int
) -> tuple[weakref.ref[CowSnapshot], ...]:
    """Let moments that are being saved copy slots that are about to change, and return those that aren't saved yet.

    Args:
        moments: of one storage.
        ranges: first slot and count of each.
        size: slots of the storage, around which a range may go.
    """
    living = [(moment, found) for moment in moments if (found := moment()) is not None]
    if living:
        spans = [span for start, count in ranges for span in ring_spans(start, count, size)]
        for _, found in living:
            found.before(spans)
    return tuple(moment for moment, found in living if found.open)


class CowSnapshot(SavedRows):
    """The rows of a storage at one moment.

    Made under the lock of the storage's buffer. From then on the storage calls `before` ahead of each write, under that
    lock, and any thread without it for what is likely to be written; whoever saves the moment takes its segments in
    other threads.

    Nobody waits while a segment is read: what a writer is about to change is copied by the writer, and whoever read it
    meanwhile learns that, and lays the copy over what was read. The lock here is held by a writer while it copies a
    piece of a segment, and else for a few lines.

    Args:
        columns: live, ``[rows or more, *shape]`` each; the first one holds the generations.
        rows: how many are stored.
        start: the row that will be overwritten next: what follows it is taken first.
        earlier: for the names of moments that may be known to somebody, what changed since; None for all of it.
        reading: called before columns are read: see `ColumnStore.begin`.
    """

    def __init__(
        self,
        columns: Sequence[torch.Tensor],
        rows: int,
        start: int,
        earlier: dict[str, list[Change] | None],
        reading: Callable[[], None],
    ) -> None:
        fields = [(column.dtype, tuple(column.shape[1:])) for column in columns]
        super().__init__(SegmentLayout.fitting(fields, rows, columns[0].shape[0]))
        self._columns, self._reading = columns, reading
        self.first = start // self.layout.step  # a ring writer comes there first
        self._earlier = earlier
        self._row_bytes = max(sum(self.layout.widths), 1)
        self._rows_a_piece = min(max(_PIECE_BYTES // self._row_bytes, 1), self.layout.step)
        self._pending = set(range(self.layout.count))
        self.after_fork(())
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Let the parent save it: there is no thread for that in the child."""
        if lineage:
            self._pending = set()
        # Raw, and nobody waits with it: an exception of a signal's handler leaves it held nowhere.
        self._lock = threading.Lock()
        self._saved: dict[
            int, dict[int, Array]
        ] = {}  # bytes, column after column, by segment and piece of it
        self._held = 0  # bytes of them
        self._free: list[Array] = []  # memory for a piece each
        self._spare: list[Array] = []  # for a segment each
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
                    self._save(number, start, stop)

    def _save(self, number: int, start: int, stop: int) -> None:
        """Copy the pieces of a segment that hold some of these rows."""
        first, end = self.layout.span(number)
        rows = self._rows_a_piece
        for piece in range((max(start, first) - first) // rows, -(-(min(stop, end) - first) // rows)):
            while not self._copied(number, piece):
                sleep(_SECONDS_BETWEEN_LOOKS)

    def _copied(self, number: int, piece: int) -> bool:
        """Copy a piece of a segment if that is still to be done; return False if there's no room for it now."""
        with self._lock:
            if self._lacks(number, piece):
                if self._begun and self._held >= self.room:
                    return False
                saved = self._saved.setdefault(number, {})
                memory, span = self._memory(), self._span(number, piece)
                np.concatenate(self._at(*span), out=memory[: (span[1] - span[0]) * self._row_bytes])
                saved[piece] = memory
                self._held += memory.size
            return True

    def _lacks(self, number: int, piece: int) -> bool:
        """Return whether a piece of a segment is still to be copied before a write; under the lock."""
        return number in self._pending and piece not in self._saved.get(number, ())

    def _memory(self) -> Array:
        """Return memory for a piece; under the lock."""
        if not self._free:
            size = self._rows_a_piece * self._row_bytes
            wanted = min(max(_SLAB_BYTES, self._held // _SLABS), _MOST_SLAB_BYTES)
            slab = mapped(max(wanted // size, 1) * size)
            self._free += [slab[begin : begin + size] for begin in range(0, slab.size, size)]
        return self._free.pop()

    def _span(self, number: int, piece: int) -> tuple[int, int]:
        """Return the rows of a piece of a segment, ``[start, stop)``."""
        first, end = self.layout.span(number)
        start = first + piece * self._rows_a_piece
        return start, min(start + self._rows_a_piece, end)

    def _at(self, start: int, stop: int) -> list[Array]:
        """Return the bytes of rows, column after column, where they live."""
        return [
            bytes_of(live[start:stop])
            if isinstance(live, torch.Tensor)
            else live[start * width : stop * width]
            for live, width in zip(self._bytes, self.layout.widths, strict=True)
        ]

    def _release(self, number: int) -> dict[int, Array]:
        """Return what was copied of a segment, which isn't needed from now on; under the lock."""
        saved = self._saved.pop(number, {})
        self._pending.discard(number)
        if saved:
            self._held -= sum(data.size for data in saved.values())
        return saved

    # The side of who saves it

    def unchanged(self, earlier: str) -> Array | None:
        """Return which segments hold what they held at the moment of that name."""
        changes = self._earlier.get(earlier)
        if changes is None:
            return None
        same = np.ones(self.layout.count, bool)
        for change in changes:
            touched = self.layout.touched(change.start, change.stop)
            same[touched.start : touched.stop] = False
        return same

    def begin(self) -> None:
        """Have writers wait for segments to be taken when many were copied for them."""
        self._begun = True

    def look(self, number: int) -> list[Array] | None:
        """Return a segment's bytes where they live."""
        return None if number in self._saved else self.layout.pieces(number, self._bytes)

    @property
    def _bytes(self) -> list[torch.Tensor | Array]:
        """All bytes of each column, to be read now."""
        self._reading()
        return self._visible

    @cached_property
    def _visible(self) -> list[torch.Tensor | Array]:
        """The bytes of columns where they can be seen, and the other columns themselves."""
        return [
            bytes_of(column) if column.is_cpu and column.is_contiguous() else column
            for column in self._columns
        ]

    def settled(self, number: int) -> bool:
        """Return whether a segment wasn't written on since `look`."""
        with self._lock:
            if number in self._saved:
                return False
            self._release(number)
        return True

    def take(self, number: int) -> Array:
        """Return a segment's bytes."""
        size = self.layout.size(number)
        memory = self._spare.pop() if self._spare else mapped(self.layout.size(0))
        data: Array = np.concatenate(self.layout.pieces(number, self._bytes), out=memory[:size])
        with self._lock:
            saved = self._release(number)
        first, _ = self.layout.span(number)
        for piece, copied in saved.items():
            start, stop = self._span(number, piece)
            at = 0
            for width, (offset, _) in zip(self.layout.widths, self.layout.places(number), strict=True):
                begin, size = offset + (start - first) * width, (stop - start) * width
                data[begin : begin + size] = copied[at : at + size]
                at += size
        self._reuse(saved)
        return data

    def give(self, data: Array) -> None:
        """Give back the memory that `take` returned."""
        if isinstance(data.base, np.ndarray):
            self._spare.append(data.base)

    def pick(self, column: int, rows: Array | slice) -> Array:
        """Return any rows of a column."""
        width, live = self.layout.widths[column], self._bytes[column]
        if isinstance(live, torch.Tensor):
            index = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(live.device)
            data = rows_of(live[index].clone())
        else:
            data = rows_at(live.reshape(self._columns[column].shape[0], width), rows)
        if self._saved and data.size:  # what was written on until now; the rest was read before it may be
            with self._lock:
                saved = [(number, dict(pieces)) for number, pieces in self._saved.items()]
            rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            first, last = rows.min(), rows.max()
            before = sum(self.layout.widths[:column])
            for number, pieces in saved:
                begin, end = self.layout.span(number)
                if begin <= last and first < end:
                    for piece, copied in pieces.items():
                        start, stop = self._span(number, piece)
                        count = stop - start
                        part = copied[count * before : count * (before + width)].reshape(count, width)
                        _overlay(data, rows, start, part)
        return data

    def skip(self, numbers: Sequence[int]) -> None:
        """Say that segments aren't needed."""
        with self._lock:
            kept = self._saved.keys() & set(numbers)
            self._pending.difference_update(numbers)
            saved = [self._release(number) for number in kept]
        for pieces in saved:
            self._reuse(pieces)

    def _reuse(self, saved: dict[int, Array]) -> None:
        """Keep the memory of pieces for the next ones, as far as that is little."""
        room = _KEPT_BYTES // (self._rows_a_piece * self._row_bytes) - len(self._free)
        self._free += list(saved.values())[: max(room, 0)]

    def close(self) -> None:
        """Copy for writers no more, and let nobody wait."""
        with self._lock:
            self._begun = False
            self._pending = set()
            self._held = 0
        for memory in (self._saved, self._spare, self._free):
            while memory:  # so that nobody waits until all of it is given back
                memory.popitem() if isinstance(memory, dict) else memory.pop()


def _overlay(data: Array, rows: Array, begin: int, saved: Array) -> None:
    """Put rows from `begin` on, which were copied, where they belong among those that were read."""
    found = np.flatnonzero((rows >= begin) & (rows < begin + len(saved)))
    data[found] = saved[rows[found] - begin]
