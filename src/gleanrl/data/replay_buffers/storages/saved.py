"""The records of a tensor storage in a snapshot, and in a state that is checked before anything is changed by it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gleanrl.checkpoint.segments import Fresh
from gleanrl.data.replay_buffers.storages.formats import check_all_storable, format_from_state
from gleanrl.data.replay_buffers.storages.moments import Moment
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.snapshots import ContentCopy, StorageState
from gleanrl.data.replay_buffers.storages.table import Table
from gleanrl.objects import Leaf, Objects
from gleanrl.schema import numpy_dtype, numpy_view
from gleanrl.state import StateReader


@dataclass(frozen=True)
class Records:
    """Records in columns of their own."""

    form: RecordFormat
    columns: list[Leaf]
    """``[rows, *field]`` each, lists among them, in the order of a table's columns."""
    table: Table | None = None
    """Where they are to be copied; None if that isn't known yet."""
    there: bool = False
    """Whether they stand there already: the columns are views of the table's, in its order."""
    fresh: bool = False
    """Whether nobody else has the columns' memory."""
    identity: str | None = None
    """Their name, if they are those of a checkpoint (see `Segmented`)."""

    def turned(self, rows: int) -> Records:
        """Return copies of the records, of which the first `rows` come last."""
        columns: list[Leaf] = []
        for column in self.columns:
            order = torch.arange(column.shape[0], device="cpu").roll(-rows)
            columns.append(column.take(order) if isinstance(column, Objects) else column.roll(-rows, 0))
        return replace(self, columns=columns, there=False, identity=None)

    def into(self, table: Table) -> Records:
        """Return the rows in the order of a table's columns, to be copied there."""
        index = self.form.schema.index
        columns = [self.columns[index(path)] for path in table.stored.paths]
        return replace(self, form=table.form, columns=columns, table=table)


@dataclass(frozen=True)
class LiveRecords:
    """Records that are copied when they are saved, or written on: a moment, the generations first."""

    form: RecordFormat
    moment: Moment


def layout_fields(form: RecordFormat) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Return dtype and shape of the columns of rows in segments: generations, then the records' leaves."""
    leaves = ((field.dtype, tuple(field.row_shape)) for field in form.schema.fields)
    return (torch.int64, ()), *leaves


def stored_rows(reader: StateReader, state: StorageState, known: RecordFormat | None) -> RecordFormat:
    """Return the format of records that are still in a checkpoint's files.

    Raises:
        SchemaError: the files don't hold such records.
    """
    form = format_from_state(reader.get("format"), known)
    layout = reader.get("columns").layout
    if form.schema.lists or layout.fields != layout_fields(form) or layout.rows != state.rows:
        raise reader.wrong("columns", f"{state.rows} rows of {form.schema!r}", layout)
    if 0 in state.batch_shape:
        raise reader.wrong("batch_shape", "sizes of 1 or more")
    return form


def read_records(
    reader: StateReader, state: StorageState, known: RecordFormat | None = None
) -> Records | None:
    """Return the records in a state; None if it holds none and has no schema.

    Raises:
        SchemaError: broken records.
    """
    if "columns" not in reader and not state.rows:
        return None
    columns = reader.get("columns")
    form = format_from_state(reader.get("format"), known)
    if not isinstance(columns, (list, tuple)) or len(columns) != len(form.schema):
        raise reader.wrong("columns", f"a list of {len(form.schema)} tensors")
    leaves: list[Leaf] = []
    for column, field in zip(columns, form.schema.fields, strict=True):
        if field.is_list and isinstance(column, list):
            shape = torch.Size((state.rows, *field.row_shape))
            if len(column) != shape.numel():
                raise reader.wrong("columns", f"lists of {shape.numel()} objects")
            leaves.append(Objects.of(copy.deepcopy(column), shape, field.blank))
        elif field.is_list or not isinstance(column, torch.Tensor):
            raise reader.wrong("columns", "tensors, and lists of objects")
        else:
            leaves.append(column)
    if 0 in state.batch_shape:
        raise reader.wrong("batch_shape", "sizes of 1 or more")
    lead = torch.Size([state.rows])
    form.schema.check(form.schema.as_lists(leaves, lead, "load_state_dict"), lead, "load_state_dict")
    check_all_storable([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], "load_state_dict")
    return Records(form, leaves, fresh=isinstance(columns, Fresh))


class RecordsCopy(ContentCopy):
    """A copy of a table's rows on its device, with some room for rows that come meanwhile."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._room = 0
        self._columns: list[Leaf] = []

    def take(self, rows: int, spans: list[tuple[int, int]]) -> None:
        """Copy ranges of rows; all of them if the copy has to move to where there is more room."""
        if rows > self._room or not self._columns:
            self._room = min(rows + rows // 8, self._table.columns.num_rows)
            self._columns = [_empty(self._room, column) for column in self._table.all]
            spans = [(0, rows)]
        for start, stop in spans:
            self._table.copy_rows(self._columns, start, stop)

    def done(self, rows: int) -> Records:
        """Return the rows without the room behind them: a tensor is saved with all of its memory."""
        return Records(self._table.form, [_first(column, rows) for column in self._columns])


def _empty(rows: int, like: Leaf) -> Leaf:
    if isinstance(like, Objects):
        return Objects.blanks((rows, *like.shape[1:]), like.blank)
    if not like.is_cpu:
        return torch.empty(rows, *like.shape[1:], dtype=like.dtype, device=like.device)
    array: np.ndarray[Any, Any] = np.empty((rows, *like.shape[1:]), numpy_dtype(like.dtype))
    return torch.from_numpy(array).view(like.dtype)


def _first(column: Leaf, rows: int) -> Leaf:
    if isinstance(column, Objects):
        return Objects.of(copy.deepcopy(column[:rows].items()), column[:rows].shape, column.blank)
    if rows == column.shape[0]:
        return column
    if not column.is_cpu:
        return column[:rows].clone()
    # A torch storage of its own over the first rows.
    return torch.from_numpy(numpy_view(column)[:rows]).view(column.dtype)
