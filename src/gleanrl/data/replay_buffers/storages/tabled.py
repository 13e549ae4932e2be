"""Storages whose records stand in a table: taking its memory, and saving and loading it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gleanrl.checkpoint.reading import Stored
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.columns import plain
from gleanrl.data.replay_buffers.storages.memory import Allocator, FileAllocator, GivenColumns, HeapAllocator
from gleanrl.data.replay_buffers.storages.moments import Mark, Moment
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.saved import (
    LiveRecords,
    Records,
    RecordsCopy,
    read_records,
    stored_rows,
)
from gleanrl.data.replay_buffers.storages.seams import Numbers, Pieces, numbered, seam_slots
from gleanrl.data.replay_buffers.storages.snapshots import Ahead, AtEnd, ContentCopy, StorageState
from gleanrl.data.replay_buffers.storages.table import Table
from gleanrl.devices import device_of
from gleanrl.errors import EmptyBufferError, SchemaError
from gleanrl.objects import Leaf, Objects
from gleanrl.records import Placement
from gleanrl.schema import allocate
from gleanrl.state import StateReader
from gleanrl.system.interrupts import to_the_end

_MARKS = 8  # checkpoints of which a storage knows what changed since


class TabledStorage(Storage):
    """Records in the columns of a `Table`, which the first write makes, or the first load; see `TensorStorage`.

    Args:
        max_size: transitions that fit, at least 1.
        allocator: what makes the columns.
        device: where they are.
        ndim: batch dimensions of a storage, at least 1; the first is time.
        follows_data: whether the device, and memory on it, is that of the first data instead.
    """

    def __init__(
        self, max_size: int, allocator: Allocator, device: torch.device, ndim: int, follows_data: bool = False
    ) -> None:
        super().__init__(max_size, ndim=ndim)
        self.device = device
        self.allocator = allocator
        """What makes the columns."""
        self._follows_data = follows_data
        self._table: Table | None = None

    @property
    def initialized(self) -> bool:
        """Whether a first write has fixed the schema and taken the memory."""
        return self._table is not None

    @property
    def exposed(self) -> bool:
        """Whether live views were given, or the memory is that of a user, of files, or of other processes."""
        if self._table is None:
            return False
        lent = self._table.columns.lent
        return lent.always or lent.count > 0 or self._table.shared

    @property
    def borrowed(self) -> bool:
        """Whether others may hold tensors of the columns' memory, and move it."""
        return table_of(self).columns.lent.always

    @property
    def format(self) -> RecordFormat:
        """The frozen structure of the records (`EmptyBufferError` before the first write)."""
        return table_of(self).form

    def _settle(self, device: torch.device) -> None:
        """Choose the device of the first data, if that was asked for."""
        if self._follows_data:
            self.device = device
            self.allocator = HeapAllocator(device)

    def _make_table(self, form: RecordFormat, batch: torch.Size) -> Table:
        table = Table(form, self.steps_that_fit(batch) * batch.numel(), self.allocator, self.device)
        if self.ndim > 1:  # with one dimension writes leave out rows that are no steps
            table.watch_mask()
        return table

    def _begin(self, table: Table, batch: torch.Size) -> None:
        table.keep()
        self.fix_batch(batch)
        self.device, self._table, self.find_seams = table.device, table, table.find_seams

    # Pieces

    _pieces: Numbers | None

    def _pieces_of(self, placement: Placement, begins: bytes | None) -> Pieces:
        start, count, _, _, length, capacity = placement
        known, stored = self._pieces, self.num_steps
        if known is None or not stored or count == capacity:  # nothing is numbered, or nothing of it stays
            numbers = np.zeros(self.rows_per_step, np.int64)
        else:
            numbers = known[(self.end - 1) % capacity]
        if begins is not None:
            numbers = numbers + np.frombuffer(begins, np.uint8)
        elif (
            stored and count < capacity and start != self.end
        ):  # a correction; the stored part may grow by it
            return Pieces(stored, length - stored, numbers)
        return Pieces(start, count, numbers)

    def _number(self, pieces: Pieces) -> None:
        first, count, numbers = pieces
        known = self._new_pieces() if self._pieces is None else self._pieces
        known[first : first + count] = numbers
        if first + count > len(known):
            known[: first + count - len(known)] = numbers

    def _new_pieces(self) -> Numbers:
        """Begin to number pieces: all rows are of one."""
        self._pieces = np.zeros((self.capacity_steps, self.rows_per_step), np.int64)
        return self._pieces

    def _seam_slots(self) -> torch.Tensor:
        pieces = self._pieces
        return super()._seam_slots() if pieces is None else seam_slots(pieces, self.num_steps, self.end)

    def _number_as_saved(self, value: StorageState) -> None:
        self._forget()
        if value.seams.numel():
            numbered(value.seams, self._new_pieces(), value.num_steps, value.end)

    def _forget(self) -> None:
        self._pieces = None

    # State

    _alone = True  # whether nobody but this process writes here
    _marks: dict[str, Mark] = {}

    def moment_ahead(self) -> Ahead:
        """Begin a snapshot whose records are copied when they are saved, or written on; those with lists are now."""
        table = self._table
        return (
            super().moment_ahead() if table is None or table.lists or not self._alone else AtEnd(self.moment)
        )

    def moment(self) -> tuple[Any, int]:
        """Return the records of this moment as a snapshot's content (see `Ahead.end`); the caller holds the lock."""
        table = table_of(self)
        if table.lists:
            return self.copy_ahead().end()
        lent = table.columns.lent
        earlier = {
            name: self.changed_since(mark.version)
            for name, mark in self._marks.items()
            if mark.lent == lent.count
        }
        columns = [self.generations.of_all(), *table.all]
        start = self.end * self.rows_per_step
        moment = Moment(columns, len(self), start, {} if lent.alive else earlier, table.columns.begin)
        self._mark(moment.identity)
        self.moments = (*self.moments, weakref.ref(moment))
        return LiveRecords(table.form, moment), 0

    def _mark(self, name: str) -> None:
        """Remember that what is stored now has this name in checkpoints."""
        lent = table_of(self).columns.lent
        if not lent.alive:
            last = [*self._marks.items()][1 - _MARKS :]
            self._marks = {**dict(last), name: Mark(self.version, lent.count)}

    def _remember(self, content: Any) -> None:
        if isinstance(content, Records) and content.identity is not None:
            self._mark(content.identity)

    def plain_state(self, value: StorageState) -> dict[str, Any]:
        """Return a snapshot as plain values and its own tensors; the rows of a moment as they are."""
        state = super().plain_state(value)
        if isinstance(value.content, LiveRecords):
            del state["generations"]
        return state

    def parse(self, state: Any) -> StorageState:
        """Return the value of a foreign state (see `Storage.parse`); records in files are read to where they stay."""
        stored = state.get("columns") if isinstance(state, Mapping) else None
        if not isinstance(stored, Stored) or not self._alone:
            return super().parse(state)
        return self._read(stored, StateReader(state, f"a {type(self).__name__}"))

    def _read(self, stored: Stored, reader: StateReader) -> StorageState:
        """Return the value of a state whose records stand in files, in memory that is nobody's yet."""
        saved, table = StorageState.read(reader), self._table
        value = saved.fitted_to(self)
        form = stored_rows(reader, value, None if table is None else table.form)
        place: Table | None = None
        if table is None:
            self._settle(torch.device("cpu"))
            place = self._make_table(form, torch.Size(value.batch_shape))
        else:
            self._check_form(form, value)
            if isinstance(self.allocator, FileAllocator):
                place = Table(table.form, table.columns.num_rows, self.allocator.another())
        if place is None:
            columns: list[Any] = [
                allocate((value.rows, *field.row_shape), field.dtype, self.device)
                for field in form.schema.fields
            ]
        else:
            own = [column[: value.rows] for column in place.all]
            columns = [own[place.form.schema.index(path)] for path in form.schema.paths]
        generations = allocate((value.rows,), torch.int64)
        try:
            stored.read([generations, *columns], value.moved or 0)
        except BaseException:
            if place is not None:
                place.discard()
            raise
        identity = None if value.moved else stored.identity
        rows = (
            replace(Records(form, columns), identity=identity).into(table_of(self))
            if place is None
            else Records(place.form, own, place, True, identity=identity)
        )
        return replace(value.with_generations(generations, reader), content=rows)

    def _turned(self, content: Records, rows: int) -> Records:
        return content.turned(rows)

    def _check_form(self, form: RecordFormat, state: StorageState) -> None:
        """Raise `SchemaError` if records of that format can't be loaded."""
        table = table_of(self)
        if not table.form.same_as(form) or state.batch_shape != self.batch_shape:
            raise SchemaError(
                f"load_state_dict: the state's schema {form.schema!r} with batch {state.batch_shape} isn't "
                f"this storage's {table.form.schema!r} with batch {tuple(self.batch_shape)}"
            )
        table.columns.ready(table.columns.columns)  # raises where nothing may be written

    def _start_copy(self) -> ContentCopy | None:
        return None if self._table is None else RecordsCopy(self._table)

    def _plain_content(self, content: Records | LiveRecords | None) -> dict[str, Any]:
        if content is None:
            return {}
        if isinstance(content, LiveRecords):
            return {"format": content.form.state(), "columns": content.moment}
        columns = [column.items() if isinstance(column, Objects) else column for column in content.columns]
        return {"format": content.form.state(), "columns": columns}

    def _parse_content(self, reader: StateReader, state: StorageState) -> Records | None:
        rows = read_records(reader, state, None if self._table is None else self._table.form)
        if rows is None:
            return None
        table = self._table
        if table is None:
            self._settle(device_of(rows.columns))
            batch = torch.Size(state.batch_shape)
            full = state.rows == self.steps_that_fit(batch) * batch.numel()
            if (
                self._alone
                and rows.fresh
                and full
                and isinstance(self.allocator, HeapAllocator)
                and self.device.type == "cpu"
            ):
                given = Table(rows.form, state.rows, GivenColumns(rows.columns, exclusive=True))
                if self.ndim > 1:
                    given.watch_mask()
                return replace(rows.into(given), there=True)
            table = self._make_table(rows.form, batch)
        else:
            self._check_form(rows.form, state)
        return rows.into(table)

    def _take_content(self, content: Records | None, rows: int) -> None:
        if content is None:
            return
        if content.there and content.table is not None:
            table = content.table
            table.settle(content.columns)
        else:
            table = self._table or content.table or self._make_table(content.form, self.batch_shape)
            table.take(content.columns)
        self._begin(table, self.batch_shape)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the stored records; unpickling takes new memory for them.

        Raises:
            UnsupportedError: for records in files of a `scratch_dir`: they belong to this storage.
        """
        value = self.snapshot()
        state = super().__getstate__()
        state["_saved"] = self.plain_state(value)
        if value.content is not None:
            state["_saved"]["format"] = value.content.form.state(by_name=False)
        state["_table"] = state["_pieces"] = state["find_seams"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        saved = state.pop("_saved")
        super().__setstate__(state)
        self.num_steps = 0  # there is nothing to clear: generations are those of the pickle
        self.adopt(self.parse(saved))


def table_of(storage: TabledStorage) -> Table:
    """Return a storage's table; `EmptyBufferError` before the first write."""
    if storage._table is None:
        raise EmptyBufferError("the storage is empty and has no schema yet: write records first")
    return storage._table


def first_table(
    storage: TabledStorage, form: RecordFormat, batch: torch.Size, leaves: Sequence[Leaf]
) -> tuple[Table, list[Leaf]]:
    """Take a storage's memory, for records like the first ones, and fix its schema.

    It changes only once every column exists.

    Args:
        storage: without a table.
        form: of the records.
        batch: their batch dimensions after time.
        leaves: theirs, in the format's order.

    Returns:
        the table, and the leaves on the storage's device.

    Raises:
        CapacityError: too little memory or disk.
    """
    storage._settle(device_of(leaves))
    # Whatever fails does so before the memory is taken and the schema fixed.
    there = [plain(leaf, storage.device) for leaf in leaves]
    table = storage._make_table(form, batch)
    to_the_end(lambda: storage._begin(table, batch))
    return table, there
