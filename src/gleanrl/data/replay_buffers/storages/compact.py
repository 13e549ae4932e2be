"""Columns in which an outcome that the following step's root repeats is stored once: the store of ``compact=True``.

Row t of ``("next", key)`` is read from the column of ``key``. If its bits equal the root of the following step, it is
read at that step's slot, otherwise at a spare row behind the ring. Each write decides this by content.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl._arrays.native import Columns as NativeColumns
from gleanrl._arrays.results import Placement
from gleanrl._arrays.schema import Field, allocate, numpy_view
from gleanrl._arrays.tensordicts import Path
from gleanrl._checkpoint.reader import Stored
from gleanrl._checkpoint.row_segments import bytes_of
from gleanrl._os import proc
from gleanrl._os.interrupts import ForkSafeLock
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.storages.allocators import Allocator, FileAllocator, HeapAllocator
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.columns import (
    ColumnSource,
    ColumnStore,
    HostColumns,
    NoColumns,
    OwnColumns,
    Sources,
    column_store,
    written_by_core,
)
from gleanrl.data.replay_buffers.storages.indexing import column_of, is_key
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.snapshots import Records, StorageState, read_records, stored_rows
from gleanrl.data.replay_buffers.storages.table import StoreMaker, Table
from gleanrl.data.trajectories import twins
from gleanrl.errors import CapacityError, UnsupportedError

Rows: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_LEAST_BYTES = 16  # shorter rows are stored twice: the map of the rows would cost as much
_STEP_BYTES = 64 << 20  # by which the spare rows grow
_FREE_CHECK_BYTES = 64 << 20  # copies below this size are made without a look at the free memory
_LOGGED = 256  # number of writes whose rows a reader can still find
_address = torch.Tensor.data_ptr
_TRIES = 4  # number of times that a reader reads rows again, before it makes writers wait


class SharedColumn:
    """A column of outcomes without own memory, for reading: an index of rows, or a slice, returns copies.

    Snapshots read it like any column. An outcome that a writer moves during a read is read again, so writers only have
    to keep the rows that they overwrite.
    """

    is_cpu = True
    device = torch.device("cpu")

    def __init__(self, columns: CompactColumns, position: int, field: Field, num_rows: int) -> None:
        self._columns, self._position = weakref.ref(columns), position
        self.dtype, self.shape = field.dtype, torch.Size((num_rows, *field.shape))
        self.itemsize = field.dtype.itemsize

    def _store(self) -> CompactColumns:
        found = self._columns()
        assert found is not None, "the storage of this column is gone"
        return found

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """Return copies of rows, ``[n, *field]``."""
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.shape[0]), device="cpu")
        slots = torch.as_tensor(rows, device="cpu").reshape(-1).contiguous()
        store = self._store()
        store.check_room(slots.shape[0], [self._position])
        return store.gather((slots,), (ColumnSource(self._position),))[0]

    def numel(self) -> int:
        """Return the number of elements that are stored apart from the roots."""
        return self._store().apart.num_apart * self.shape[1:].numel()

    def is_contiguous(self) -> bool:
        """Return True."""
        return True

    def __getattr__(self, name: str) -> Any:
        """Raise `UnsupportedError`: only rows can be read."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"column: a compact storage has no tensor of these outcomes, so it can't serve {name!r}; read rows by "
            "column(path)[slots], or build the storage without compact"
        )


class Arriving:
    """The destination of a column of outcomes that a reader of files writes piece by piece."""

    is_cpu = False  # so that the reader copies

    def __init__(self, field: Field, shape: torch.Size, arrive: Callable[[int, torch.Tensor], None]) -> None:
        self.dtype, self.shape, self._arrive = field.dtype, shape, arrive
        self._start = 0

    def __getitem__(self, rows: slice) -> Arriving:
        """Return the destination of the rows from the start of the slice on."""
        self._start = rows.start
        return self

    def copy_(self, piece: torch.Tensor) -> None:
        """Take the rows, ``[n, *field]``."""
        self._arrive(self._start, piece)


class CompactColumns(HostColumns):
    """Columns in CPU memory or in mapped files, in which equal outcomes and following roots are stored once.

    `SharedRows` in the core compares, writes and numbers rows. Its header describes the spare rows.

    Threads: one thread writes, and any thread reads at any time. A reader notes which writes are complete, finds the
    rows of the outcomes and copies them. Afterwards it reads outcomes again that a later write may have moved. The
    caller finds torn records by their generations, as for all columns.

    Args:
        fields: the leaves.
        columns: the column of each leaf; None for outcomes that are stored with their roots. Roots of these have
            `spare_rows` further rows.
        pairs: the outcomes and their roots, by position.
        num_rows: the number of slots.
        streams: the slots of one step. The outcome of a slot is compared with the root so many slots later.
        reach: see `HeapAllocator.sparse`.
    """

    can_widen = False

    def __init__(
        self,
        fields: Sequence[Field],
        columns: Sequence[torch.Tensor | None],
        pairs: Sequence[tuple[int, int]],
        num_rows: int,
        streams: int,
        reach: Callable[[int], None],
    ) -> None:
        self._pairs, self.streams, self._reach = pairs, streams, reach
        self._of = dict(pairs)
        self._columns = [column for column in columns if column is not None]
        self._stored = [position for position, column in enumerate(columns) if column is not None]
        seen: list[Any] = [
            SharedColumn(self, position, field, num_rows) if column is None else column[:num_rows]
            for position, (field, column) in enumerate(zip(fields, columns, strict=True))
        ]
        self._usable = num_rows + 1  # the row after the last one that has memory
        self._places: Rows = np.empty(num_rows, np.uint32)
        """The row of each slot's outcomes in the columns of their roots."""
        self._log: deque[tuple[int, Any]] = deque(maxlen=_LOGGED)
        """The number of each last write, and the slots whose outcomes it may move: first and count, or an array."""
        self._begun = self._done = 0
        self._lock = ForkSafeLock()  # held during a write
        self._read_by: dict[Sources | None, tuple[Sources, list[int]]] = {}
        super().__init__(fields, seen)
        self.live_views = self._alone.live_views

    def _register(self) -> None:
        """Make the stores of parts of the columns."""
        stored, roots = [self.fields[p] for p in self._stored], [root for _, root in self._pairs]
        self._ring = OwnColumns(stored, [self.columns[position] for position in self._stored])
        """All columns, without spare rows."""
        # `_places` refuses slots behind the ring, so the number of rows here only has to cover all columns.
        most = self.num_rows + spare_rows(self.num_rows, self.streams)
        self._rows = HostColumns(stored, self._columns, most)
        starts = {p: column.data_ptr() for p, column in zip(self._stored, self._columns, strict=True)}
        self.apart = NativeColumns.sharing(
            [starts.get(position, 0) for position in range(len(self.fields))],
            [field.row_bytes for field in self.fields],
            [outcome for outcome, _ in self._pairs],
            roots,
            self.num_rows,
            self.streams,
            self._places.ctypes.data,
        )
        """Compares, writes and numbers the rows."""
        self._ranges = [
            (start, start + column.nbytes)
            for start, column in zip(starts.values(), self._columns, strict=True)
        ]
        self._low, self._high = min(starts.values()), max(stop for _, stop in self._ranges)
        self._unpaired = [p for p in self._stored if p not in roots]
        self._alone: ColumnStore = (
            OwnColumns([self.fields[p] for p in self._unpaired], [self.columns[p] for p in self._unpaired])
            if self._unpaired
            else NoColumns(self.num_rows)
        )
        """The columns whose live views users may have."""
        columns = dict(zip(self._stored, self._columns, strict=True))
        by_leaf = [columns[self._of.get(p, p)][: self.num_rows] for p in range(len(self.fields))]
        self._by_core = written_by_core(by_leaf)

    def fits(self, leaves: list[torch.Tensor], lead: torch.Size) -> bool:
        """Let the core compare the leaves' shapes and dtypes; see `ColumnStore.fits`."""
        return self._by_core is not None and self._by_core.fits(leaves, lead)

    # Reading

    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Fetch all leaves in one native call; then fetch outcomes again that a writer moved meanwhile."""
        slots = indices[0]
        sources, outcomes = self._read_by.get(wanted) or self._read_from(wanted)
        if not outcomes:
            return self._ring.gather((slots,), sources)
        done = self._done
        leaves = self._rows.gather((slots, self._following(slots)), sources)
        if self._begun != done:
            self._read_again(slots, done, [(leaves[p], sources[p].column) for p in outcomes])
        return leaves

    def _following(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of the outcomes of slots; raise `IndexError` for slots outside of the ring."""
        places = torch.empty_like(slots)  # a third of the time of `empty` with its arguments
        self.apart.find(slots.data_ptr(), slots.shape[0], places.data_ptr())
        return places

    def _read_from(self, wanted: Sources | None) -> tuple[Sources, list[int]]:
        """Return the source of each wanted leaf among the stored columns, and the positions of outcomes among them."""
        leaves = range(len(self.fields)) if wanted is None else [source.column for source in wanted]
        column = {position: number for number, position in enumerate(self._stored)}
        sources = tuple(ColumnSource(column[self._of.get(leaf, leaf)], leaf in self._of) for leaf in leaves)
        found = sources, [position for position, source in enumerate(sources) if source.array]
        self._read_by[wanted] = found
        return found

    def _read_again(self, slots: torch.Tensor, done: int, outcomes: list[tuple[torch.Tensor, int]]) -> None:
        """Read outcomes again that a write after the write number `done` may have moved, in place.

        Args:
            slots: the slots that were read.
            done: the last write that was complete before.
            outcomes: the rows that were read, and the number of their column.
        """
        for attempt in range(_TRIES):
            stale = torch.from_numpy(self._moved_since(slots.numpy(), done).nonzero()[0])
            if not len(stale):
                return
            done, last = self._done, attempt == _TRIES - 1
            if last:
                with self._lock.lock:
                    self._replace(slots, stale, outcomes)
            else:
                self._replace(slots, stale, outcomes)

    def _replace(
        self, slots: torch.Tensor, stale: torch.Tensor, outcomes: list[tuple[torch.Tensor, int]]
    ) -> None:
        at = self._following(slots[stale])
        for leaf, column in outcomes:
            numpy_view(leaf)[stale.numpy()] = numpy_view(self._rows.gather((at,), (ColumnSource(column),))[0])

    def _moved_since(self, slots: Rows, done: int) -> Rows:
        """Return whether a write after the write `done` may have moved the outcomes of slots, ``(n,)`` bool."""
        log = tuple(self._log)
        if log[0][0] > done + 1:  # too many writes to remember
            return np.ones(len(slots), bool)
        moved = np.zeros(len(slots), bool)
        for touched in (touched for number, touched in log if number > done):
            if isinstance(touched, tuple):
                moved |= (slots - touched[0]) % self.num_rows < touched[1]
            else:
                moved |= np.isin(slots, touched)
        return moved

    def check_room(self, num_rows: int, positions: Iterable[int]) -> None:
        """Raise `CapacityError` if copies of rows of these leaves would take more than half of the free memory."""
        needed = num_rows * sum(self.fields[position].row_bytes for position in positions)
        room = proc.available_memory() if needed > _FREE_CHECK_BYTES else None
        if room is not None and needed > room // 2:
            raise CapacityError(
                f"copies of {num_rows} rows need {needed:,} bytes, {room:,} are free, and a compact storage has no "
                "views of entries that it stores once: read fewer rows at once, or fetch single keys"
            )

    def views(
        self,
        lead: torch.Size,
        index: tuple[int | slice, ...] = (),
        leaves: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Return copies of the outcomes that are stored once and of their roots, and live views of all other leaves.

        A write into a view of a root would also change the outcome of the step before.

        Args:
            lead: see `ColumnStore.views`.
            index: see `ColumnStore.views`.
            leaves: the wanted leaves; None for all.
        """
        leaves = range(len(self.fields)) if leaves is None else leaves
        positions = [position for position in leaves if position in chain.from_iterable(self._pairs)]
        slots = torch.arange(lead.numel(), device="cpu").view(lead)[(*index, ...)]
        self.check_room(slots.numel(), positions)
        wanted = tuple(ColumnSource(position) for position in positions)
        copies = self.gather((slots.reshape(-1).contiguous(),), wanted) if wanted else []
        found = dict(zip(self._unpaired, self._alone.views(lead, index), strict=True))
        for position, copy in zip(positions, copies, strict=True):
            found[position] = copy.view(*slots.shape, *copy.shape[1:])
        return [found[position] for position in leaves]

    def view(self, position: int) -> Any:
        """Return a live view of a column, for reading only; a `SharedColumn` for outcomes that are stored once."""
        if position in self._of:
            return self.columns[position]
        return self._ring.view(self._stored.index(position))

    # Writing

    def make_room(self, count: int) -> None:
        """Make sure that a write of `count` rows finds spare rows. Call it before each write.

        Raises:
            CapacityError: there is too little memory or disk space for further spare rows. Nothing changed.
        """
        stop = self.apart.reach(2 * count)
        if stop > self._usable:
            step = _STEP_BYTES // sum(self.fields[root].row_bytes for _, root in self._pairs)
            stop = max(
                stop, min(self._usable + step, self.num_rows + spare_rows(self.num_rows, self.streams))
            )
            self._reach(stop)
            self._usable = stop

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Write rows of a ring, and share outcomes with roots. An interrupted call may be repeated."""
        touched = (start - self.streams) % self.num_rows, count + self.streams
        self._change(touched, self.apart.write, start, count, leaves)

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Write rows in the order of `slots`, and share outcomes with roots. An interrupted call may be repeated."""
        written = slots.numpy()
        touched = np.concatenate((written, (written - self.streams) % self.num_rows))
        self._change(touched, self.apart.put, slots.data_ptr(), len(written), leaves)

    def _change(
        self,
        touched: Any,
        write: Callable[[int, int, list[int]], bool],
        at: int,
        count: int,
        leaves: list[torch.Tensor],
    ) -> None:
        with self._lock.lock:
            number = self._done + 1
            self._log.append((number, touched))
            self._begun = number  # before the first byte changes: readers look at it after their last one
            if not write(at, count, list(map(_address, leaves))):
                write(at, count, self.addresses(leaves))
            self._done = number

    def forget(self) -> None:
        """Forget all rows. An interrupted call may be repeated."""
        self.apart.forget()

    def watched(
        self, outcomes: list[int], roots: list[int], flags: list[int]
    ) -> Callable[[int, int, int, list[torch.Tensor]], bytes | None]:
        """Return a function that finds seams; see `ColumnStore.watched`."""
        self.apart.watch(outcomes, roots, flags)
        return self._seams

    def _seams(self, newest: int, steps: int, streams: int, leaves: list[torch.Tensor]) -> bytes | None:
        return self.apart.seams(newest, steps, streams, self.addresses(leaves))

    def take(self, columns: Sequence[torch.Tensor]) -> None:
        """Write the first rows of new columns, piece by piece; see `ColumnStore.take`."""
        step = max(_STEP_BYTES // sum(field.row_bytes for field in self.fields), self.streams)
        rows = columns[0].shape[0]
        for start in range(0, rows, step):
            leaves = self.ready([column[start : min(start + step, rows)] for column in columns])
            self.make_room(leaves[0].shape[0])
            self.write(start, leaves[0].shape[0], leaves)

    def arriving(self) -> list[torch.Tensor | Arriving]:
        """Return columns for a reader of files: it fills roots in place, and copies outcomes piece by piece."""
        pieces: dict[int, dict[int, torch.Tensor]] = {}  # by their first row and column

        def arrive(position: int, start: int, piece: torch.Tensor) -> None:
            found = pieces.setdefault(start, {})
            found[position] = piece
            if len(found) == len(self._pairs):
                count = piece.shape[0]
                leaves = [
                    found.get(p, column[start : start + count]) for p, column in enumerate(self.columns)
                ]
                del pieces[start]
                self.make_room(count)
                self.apart.write(start, count, [leaf.data_ptr() for leaf in leaves], in_place=True)

        return [
            Arriving(self.fields[position], column.shape, partial(arrive, position))
            if isinstance(column, SharedColumn)
            else column
            for position, column in enumerate(self.columns)
        ]

    def check_writable(self) -> None:
        """Do nothing; see `ColumnStore.check_writable`."""

    def check_valid(self) -> None:
        """Raise AssertionError if two rows share a spare row, or a free one is in use; for tests."""
        apart = self._places[self._places > self.num_rows].tolist()
        spares = apart + self.apart.free()
        assert len(spares) == len(set(spares)), "a spare row is used twice"
        assert set(spares) == set(range(self.num_rows + 1, self.apart.used)), (
            "a spare row is lost or out of range"
        )
        assert self.apart.used <= self._usable, "a spare row has no memory"
        for position, column in zip(self._stored, self._columns, strict=True):
            if position in self._of.values():
                assert not bool(bytes_of(column[self.num_rows]).any()), "the row of zeros was written"

    def of_parent(self) -> ParentsCompactColumns:
        """Return columns for a forked child, which refuse all use of the mapped files."""
        return ParentsCompactColumns(self)


class ParentsCompactColumns(ColumnStore):
    """Mapped compact columns in a forked child. The parent moves outcomes unseen, so the child can't read them."""

    def __init__(self, columns: CompactColumns) -> None:
        self.fields, self.columns, self.num_rows = columns.fields, list(columns.columns), columns.num_rows
        self._lasting = columns  # `SharedColumn` refers to them weakly
        self.live_views = columns.live_views

    def _refuse(self, *args: Any) -> Any:
        raise UnsupportedError(
            "a compact LazyMemmapStorage can't be used in a forked process, because its parent moves rows in the "
            "shared files; use LazyTensorStorage, or send state_dict() to the process"
        )

    begin = ready = part = write = put = gather = _refuse  # type: ignore[assignment]
    views = view = check_writable = take = make_room = _refuse  # type: ignore[assignment]


def spare_rows(num_rows: int, streams: int) -> int:
    """Return how many rows follow the ring: zeros, a spare row for each slot, and one for each slot of a step.

    Spare rows of the step before a write become free only after the write, so a step needs some more.
    """
    return 1 + num_rows + streams


def compact_store(
    streams: int, allocate: Allocator, paths: Sequence[Path], fields: Sequence[Field], num_rows: int
) -> ColumnStore:
    """Make the columns of a compact storage; like `column_store` if no outcome can be stored with its root.

    Args:
        streams: the rows of one time step.
        allocate: makes the columns.
        paths: the paths of the leaves with columns.
        fields: their fields.
        num_rows: the number of slots.

    Raises:
        CapacityError: there is too little memory or disk space.
    """
    number = {path: position for position, path in enumerate(paths)}
    repeated = twins(dict(zip(paths, fields, strict=True)))
    long = {path: path[1:] for path in repeated if fields[number[path]].row_bytes >= _LEAST_BYTES}
    # A root that is itself the outcome of another entry, as in ("next", "next", key), has no column.
    pairs = [(number[outcome], number[root]) for outcome, root in long.items() if root not in long]
    if not pairs:
        return column_store(allocate, paths, fields, num_rows)
    outcomes, roots = {outcome for outcome, _ in pairs}, {root for _, root in pairs}
    stored = [position for position in range(len(paths)) if position not in outcomes]
    more = [spare_rows(num_rows, streams) if position in roots else 0 for position in stored]
    assert isinstance(allocate, (HeapAllocator, FileAllocator))
    columns, reach = allocate.sparse([paths[p] for p in stored], [fields[p] for p in stored], num_rows, more)
    by_position = dict(zip(stored, columns, strict=True))
    return CompactColumns(
        fields, [by_position.get(p) for p in range(len(paths))], pairs, num_rows, streams, reach
    )


class CompactStorage(Storage):
    """The part of ``compact=True`` that a storage of columns needs in addition to `CompactColumns`.

    It finds room for spare rows before a write begins. It loads records into new columns, since a load that has begun
    can't fail, and could need more spare rows than there is room for.
    """

    _table: Table | None

    def _store_for(self, streams: int) -> StoreMaker:
        """Return the function that makes the columns, for steps of so many rows."""
        return partial(compact_store, streams)

    @property
    def _once(self) -> CompactColumns | None:
        """The columns; None if there are none yet, or none of them can be stored once."""
        columns = None if self._table is None else self._table.columns
        return columns if isinstance(columns, CompactColumns) else None

    def write(self, prepared: Prepared, placement: Placement, end: int | None = None) -> None:
        """Find room for spare rows, and then write as every storage does; see `Storage.write`.

        Raises:
            CapacityError: there is no room for further spare rows. Nothing changed.
        """
        columns = self._once
        if columns is not None:
            columns.make_room(placement.num_steps * self.rows_per_step)
        super().write(prepared, placement, end)

    def _put(
        self, rows: Any, slots: torch.Tensor, amended: bool, num_steps: int, end: int, ordered: bool
    ) -> None:
        columns = self._once
        if columns is not None and slots.shape[0]:
            columns.make_room(slots.shape[0])
        super()._put(rows, slots, amended, num_steps, end, ordered)

    def _forget(self) -> None:
        super()._forget()
        columns = self._once
        if columns is not None:
            columns.forget()

    def get(self, index: Any) -> Any:
        """Return records or a column (see `TensorStorage.get`). Entries that are stored once come as copies.

        Raises:
            CapacityError: these copies would take more than half of the free memory.
        """
        columns, table = self._once, self._table
        if columns is None or table is None or table.lists or not is_key(index):
            return super().get(index)  # type: ignore[safe-super]
        paths = self.columns_of([index])
        leaves = columns.views(self.shape, (), [table.stored.column_of(path) for path in paths])
        return column_of(table.form.narrow(paths).build(leaves, self.shape, table.device), index)

    def _flattened(self) -> Any:
        raise UnsupportedError("flatten: a compact storage has no columns to share; build it without compact")

    def _loading_table(self, form: RecordFormat, streams: int, num_rows: int) -> Table:
        """Make a table for records to load, next to the present one."""
        table: Table | None = self._table
        allocator: Any = self.allocator  # type: ignore[attr-defined]
        if table is not None and isinstance(allocator, FileAllocator):
            allocator = allocator.another()
        known = form if table is None else table.form
        made = Table(known, num_rows, allocator, self.device, self._store_for(streams))  # type: ignore[attr-defined]
        if self.ndim > 1:
            made.watch_mask()
        return made

    def _loaded(self, records: Records, streams: int, num_rows: int) -> Records:
        """Return records in a new table."""
        table = self._loading_table(records.form, streams, num_rows)
        try:
            found = records.into(table)
            table.take(found.columns)
        except BaseException:
            table.discard()
            raise
        return replace(found, there=True)

    def _parse_content(self, reader: StateReader, state: StorageState) -> Records | None:
        table = self._table
        records = read_records(reader, state, None if table is None else table.form)
        if records is None:
            return None
        if table is not None:
            self.check_form(records.form, state)  # type: ignore[attr-defined]
        streams = torch.Size(state.batch_shape).numel()
        return self._loaded(records, streams, self.steps_that_fit(torch.Size(state.batch_shape)) * streams)

    def _turned(self, content: Records, rows: int) -> Records:
        table = content.table
        assert table is not None
        table.discard()
        turned = replace(content.turned(rows), table=None)
        return self._loaded(turned, _streams_of(table), table.columns.num_rows)

    def _read(self, stored: Stored, reader: StateReader) -> StorageState:
        """Return the value of a state whose records are in files, and read them into new columns piece by piece."""
        saved, table = StorageState.read(reader), self._table
        value = saved.fitted_to(self)
        form = stored_rows(reader, value, None if table is None else table.form)
        if table is not None:
            self.check_form(form, value)  # type: ignore[attr-defined]
        streams = torch.Size(value.batch_shape).numel()
        target = self._loading_table(
            form, streams, self.steps_that_fit(torch.Size(value.batch_shape)) * streams
        )
        try:
            columns = target.columns
            own = columns.arriving() if isinstance(columns, CompactColumns) else columns.columns
            order: list[Any] = [own[target.form.schema.index(path)] for path in form.schema.paths]
            generations = allocate((value.rows,), torch.int64)
            stored.read([generations, *order], value.moved or 0)
        except BaseException:
            target.discard()
            raise
        seen = [
            column[: value.rows] if isinstance(column, torch.Tensor) else column for column in columns.columns
        ]
        identity = None if value.moved else stored.identity
        return replace(
            value.with_generations(generations, reader),
            content=Records(target.form, seen, target, True, identity=identity),
        )

    def check_valid(self) -> None:
        """Raise AssertionError if the storage's metadata are inconsistent; for tests."""
        super().check_valid()  # type: ignore[misc]
        columns = self._once
        if columns is not None:
            columns.check_valid()

    def __repr__(self) -> str:
        """Return the class, the size, the schema, and how many outcomes are stored apart from the following roots."""
        columns = self._once
        text = super().__repr__().replace("Compact", "Lazy", 1)
        rows = "" if columns is None else f", {columns.apart.num_apart} of {len(self)} outcomes stored apart"
        return f"{text[:-1]}, compact=True{rows})"


def _streams_of(table: Table) -> int:
    return table.columns.streams if isinstance(table.columns, CompactColumns) else 1
