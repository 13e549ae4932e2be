"""Copy-on-write snapshots: rows of columns at one moment, while writers keep writing.

A snapshot reads rows where they are stored. A writer copies rows before it overwrites them, and only the rows that the
snapshot still needs.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from gleanrl._arrays.schema import numpy_dtype
from gleanrl._checkpoint.row_segments import Array, Segmented, SegmentLayout, bytes_of, rows_at, rows_of
from gleanrl._os.clock import sleep
from gleanrl._os.hugepages import mapped
from gleanrl._os.interrupts import renew_in_child

_SECONDS_BETWEEN_LOOKS = 0.001  # how often a waiting writer looks for room
_PIECE_BYTES = 1 << 18  # copied at once for a writer; larger pieces would make writers wait longer
# Memory is taken in slabs and reused, because fresh memory for a piece costs more than copying the piece. The system
# limits the number of mappings, so slabs grow with the bytes in use. They stay small enough to be released quickly.
_SLAB_BYTES, _MOST_SLAB_BYTES, _SLABS = 1 << 21, 1 << 26, 256
# Kept for further pieces. More memory is released while segments are taken, instead of all of it at the end.
_REUSABLE_BYTES = 1 << 24


class CowSnapshot(Segmented):
    """The rows of a storage at one moment, copied on write, which a checkpoint saves.

    The snapshot is made under the lock of the storage's buffer. From then on the storage calls `before` ahead of each
    write, under that lock. Any thread may also call it without the lock, for slots that will probably be written. Other
    threads save the snapshot segment by segment: between `begin` and `close` they may call `settled`, `take` or `skip`
    for a segment.

    Reads take no lock. A writer copies rows before it overwrites them, and `settled` tells the reader afterwards that
    the rows it read may be torn. The reader then calls `take`, which replaces torn rows by that copy. The snapshot's
    own lock is held while a writer copies one piece of a segment, and otherwise only for a few instructions.

    Args:
        columns: the live columns, ``[rows or more, *shape]`` each; the first one holds the generations.
        rows: the number of stored rows.
        start: the row that will be overwritten next; its segment is saved first.
        earlier: for each earlier snapshot by its identity, the slots ``(start, stop, ...)`` that changed since then;
            None if they aren't known.
        reading: called before columns are read: see `ColumnStore.begin`.
    """

    room = 24 << 20
    """Bytes of copied segments that may wait to be taken. Threads that need more copies wait for a `take`."""

    def __init__(
        self,
        columns: Sequence[torch.Tensor],
        rows: int,
        start: int,
        earlier: Mapping[str, Sequence[tuple[int, int, bool]] | None],
        reading: Callable[[], None],
    ) -> None:
        fields = [(column.dtype, tuple(column.shape[1:])) for column in columns]
        self.layout = SegmentLayout.fitting(fields, rows, columns[0].shape[0])
        self.identity = uuid.uuid4().hex
        self._columns, self._reading = columns, reading
        self.first = start // self.layout.step
        """The best segment to take first, because a ring writer overwrites it first. The following ones come next."""
        self._earlier = earlier
        self._row_bytes = max(sum(self.layout.widths), 1)
        self._rows_a_piece = min(max(_PIECE_BYTES // self._row_bytes, 1), self.layout.step)
        self._pending = set(range(self.layout.count))
        self.after_fork(())
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Reset the state in a forked child.

        The child needs no segment, because only the parent has threads that save them.
        """
        if lineage:
            self._pending = set()
        # A plain lock: `with` acquires and releases it in C, so an exception of a signal handler can't leave it
        # held. No thread waits for something else while it holds the lock.
        self._lock = threading.Lock()
        # Copied bytes, column after column, by segment and by piece of the segment.
        self._saved: dict[int, dict[int, Array]] = {}
        self._saved_bytes = 0  # bytes in `_saved`
        self._free: list[Array] = []  # reusable memory, each for one piece
        self._spare: list[Array] = []  # reusable memory, each for one segment
        self._begun = False

    @property
    def open(self) -> bool:
        """Whether some segment is still needed."""
        return bool(self._pending)

    def before(self, spans: Iterable[tuple[int, int]]) -> None:
        """Copy the rows of the slots ``[start, stop)`` that are about to change and that the snapshot still needs.

        Called by writers. After `begin`, the call waits while too many copied bytes aren't taken yet.
        """
        for start, stop in spans:
            for number in self.layout.touched(start, stop):
                if number in self._pending:
                    self._save(number, start, stop)

    def _save(self, number: int, start: int, stop: int) -> None:
        """Copy the pieces of a segment that contain some of these rows, and wait while there is no room for them."""
        first, end = self.layout.span(number)
        rows = self._rows_a_piece
        for piece in range((max(start, first) - first) // rows, -(-(min(stop, end) - first) // rows)):
            while not self._copied(number, piece):
                sleep(_SECONDS_BETWEEN_LOOKS)

    def _copied(self, number: int, piece: int) -> bool:
        """Copy a piece of a segment, unless it isn't needed; return False if there is no room for it now."""
        with self._lock:
            if self._lacks(number, piece):
                # Before `begin` no thread takes segments, so a writer that waited here would never continue.
                if self._begun and self._saved_bytes >= self.room:
                    return False
                saved = self._saved.setdefault(number, {})
                memory, span = self._memory(), self._span(number, piece)
                np.concatenate(self._at(*span), out=memory[: (span[1] - span[0]) * self._row_bytes])
                saved[piece] = memory
                self._saved_bytes += memory.size
            return True

    def _lacks(self, number: int, piece: int) -> bool:
        """Return whether a piece of a segment must be copied before a write. The caller holds the lock."""
        return number in self._pending and piece not in self._saved.get(number, ())

    def _memory(self) -> Array:
        """Return memory for a piece. The caller holds the lock."""
        if not self._free:
            size = self._rows_a_piece * self._row_bytes
            wanted = min(max(_SLAB_BYTES, self._saved_bytes // _SLABS), _MOST_SLAB_BYTES)
            slab = mapped(max(wanted // size, 1) * size)
            self._free += [slab[begin : begin + size] for begin in range(0, slab.size, size)]
        return self._free.pop()

    def _span(self, number: int, piece: int) -> tuple[int, int]:
        """Return the rows of a piece of a segment, ``[start, stop)``."""
        first, end = self.layout.span(number)
        start = first + piece * self._rows_a_piece
        return start, min(start + self._rows_a_piece, end)

    def _at(self, start: int, stop: int) -> list[Array]:
        """Return the bytes of rows, column after column, where they are stored."""
        return [
            live[start * width : stop * width] if isinstance(live, np.ndarray) else bytes_of(live[start:stop])
            for live, width in zip(self._bytes, self.layout.widths, strict=True)
        ]

    def _release(self, number: int) -> dict[int, Array]:
        """Return the copied pieces of a segment and mark it as no longer needed. The caller holds the lock."""
        saved = self._saved.pop(number, {})
        self._pending.discard(number)
        if saved:
            self._saved_bytes -= sum(data.size for data in saved.values())
        return saved

    def unchanged(self, earlier: str) -> Array | None:
        """Return which segments are unchanged since the snapshot with that identity; None if this isn't known.

        The result is ``(segments,)`` bool.
        """
        changes = self._earlier.get(earlier)
        if changes is None:
            return None
        same = np.ones(self.layout.count, bool)
        for start, stop, _ in changes:
            touched = self.layout.touched(start, stop)
            same[touched.start : touched.stop] = False
        return same

    def position(self, number: int) -> int:
        """Return the position of a segment in `order`."""
        return (number - self.first) % self.layout.count

    def order(self) -> list[int]:
        """Return the segments in the best order to take them."""
        return sorted(range(self.layout.count), key=self.position)

    def begin(self) -> None:
        """Announce that every segment will be taken or skipped soon.

        From now on writers wait if too many bytes were copied for them.
        """
        self._begun = True

    def look(self, number: int) -> list[Array] | None:
        """Return a segment's bytes as consecutive live views; None if a writer changed some of them.

        Writers may change the bytes during the read; call `settled` afterwards to find out.
        """
        return None if number in self._saved else self.layout.pieces(number, self._bytes)

    @property
    def _bytes(self) -> list[torch.Tensor | Array]:
        """The bytes of each column, for reading now."""
        self._reading()
        return self._visible

    @cached_property
    def _visible(self) -> list[torch.Tensor | Array]:
        """The bytes of the contiguous CPU columns, and the other columns themselves."""
        return [
            bytes_of(column)
            if isinstance(column, torch.Tensor) and column.is_cpu and column.is_contiguous()
            else column
            for column in self._columns
        ]

    def settled(self, number: int) -> bool:
        """Return whether no writer changed a segment since `look`. If so, the segment isn't needed any more."""
        with self._lock:
            if number in self._saved:
                return False
            self._release(number)
        return True

    def take(self, number: int) -> Array:
        """Return a copy of a segment's bytes at the moment of the snapshot, ``(n,)`` uint8. It isn't needed any more.

        The call first reads the live bytes and then releases the segment under the lock. A row that a writer overwrote
        before the release has a copy, which replaces the possibly torn row.
        """
        size = self.layout.size(number)
        try:
            memory = self._spare.pop()
        except IndexError:  # not a test before `pop`: another saver thread could take the last one in between
            memory = mapped(self.layout.size(0))
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

    def tensors(self) -> list[torch.Tensor]:
        """Return all columns in new CPU memory, and close the snapshot, also after an error."""
        columns = self.layout.empty()
        self.begin()
        try:
            for number in self.order():
                data = self.take(number)
                start, stop = self.layout.span(number)
                for column, part in zip(columns, self.layout.columns(number, data), strict=True):
                    column[start:stop].copy_(part)
                self.give(data)
        finally:
            self.close()
        return columns

    def copies(self) -> list[torch.Tensor]:
        """Return all columns in new memory on their devices, ``[rows, *shape]`` each, and close the snapshot.

        Writers never wait for it: each column is copied whole, and the copies of changed rows replace torn ones at the
        end. They need memory for the rows that are written meanwhile. May be called once.
        """
        try:
            self._reading()
            columns = [copy_of(column, self.layout.rows) for column in self._columns]
            with self._lock:
                saved = {number: self._release(number) for number in range(self.layout.count)}
            for number, pieces in saved.items():
                for piece, copied in pieces.items():
                    self._restore(columns, copied, *self._span(number, piece))
        finally:
            self.close()
        return columns

    def _restore(self, columns: list[torch.Tensor], copied: Array, start: int, stop: int) -> None:
        """Replace the rows ``[start, stop)``, which a writer may have changed, by the copy of their bytes."""
        at = 0
        for column, width in zip(columns, self.layout.widths, strict=True):
            rows, part = column[start:stop], copied[at : at + (stop - start) * width]
            at += part.size
            if column.is_cpu:
                bytes_of(rows)[:] = part
            else:
                rows.copy_(torch.from_numpy(part.copy()).view(column.dtype).view(rows.shape))

    def give(self, data: Array) -> None:
        """Take back memory that `take` returned, for reuse."""
        if isinstance(data.base, np.ndarray):
            self._spare.append(data.base)

    def pick(self, column: int, rows: Array | slice) -> Array:
        """Return selected rows of a column at the moment of the snapshot, ``(k, bytes of a row)`` uint8.

        Args:
            column: the number of the column.
            rows: row numbers, ``(k,)`` int64, or a slice. Their segments must not be settled, taken or skipped yet.
        """
        width, live = self.layout.widths[column], self._bytes[column]
        if not isinstance(live, np.ndarray):
            index = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(live.device)
            data = rows_of(live[index].clone())
        else:
            data = rows_at(live.reshape(self._columns[column].shape[0], width), rows)
        # Rows that a writer changed until now have copies. All other rows were read before any later change.
        if self._saved and data.size:
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
        """Mark segments as not needed, and release their copies."""
        with self._lock:
            copied = self._saved.keys() & set(numbers)
            self._pending.difference_update(numbers)
            saved = [self._release(number) for number in copied]
        for pieces in saved:
            self._reuse(pieces)

    def _reuse(self, saved: dict[int, Array]) -> None:
        """Keep the memory of copied pieces for reuse, up to `_REUSABLE_BYTES`."""
        room = _REUSABLE_BYTES // (self._rows_a_piece * self._row_bytes) - len(self._free)
        self._free += list(saved.values())[: max(room, 0)]

    def close(self) -> None:
        """Stop copying for writers, let waiting writers continue, and release all copies."""
        with self._lock:
            self._begun = False
            self._pending = set()
            self._saved_bytes = 0
        for memory in (self._saved, self._spare, self._free):
            # One by one: all other threads would wait for the interpreter lock while everything is released at once.
            while memory:
                memory.popitem() if isinstance(memory, dict) else memory.pop()


def copy_of(column: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a copy of the first rows of a column, on its device, alone in its torch storage.

    Saving a tensor saves its whole torch storage. NumPy's memory isn't zeroed first, and uses large pages.
    """
    if not isinstance(column, torch.Tensor):  # a `SharedColumn` returns copies
        return column[:rows]
    if not column.is_cpu:
        return column[:rows].clone()
    array: Array = np.empty((rows, *column.shape[1:]), numpy_dtype(column.dtype))
    return torch.from_numpy(array).view(column.dtype).copy_(column[:rows])


def _overlay(data: Array, rows: Array, begin: int, saved: Array) -> None:
    """Replace rows in `data` by their copies in `saved`, which holds the rows from `begin` on."""
    found = np.flatnonzero((rows >= begin) & (rows < begin + len(saved)))
    data[found] = saved[rows[found] - begin]
