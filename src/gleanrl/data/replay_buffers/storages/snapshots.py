"""Snapshots of storages: what they hold as one value, copied beside their writers.

The records of a tensor storage in a snapshot, and in a state that is checked before anything is changed by it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.schema import numpy_dtype, numpy_view
from gleanrl._checkpoint.row_segments import Fresh
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.change_log import Version, version_from, version_state
from gleanrl.data.replay_buffers.storages.copy_on_write import CowSnapshot
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.record_formats import check_all_storable, format_from_state
from gleanrl.data.replay_buffers.storages.slots import Slots
from gleanrl.data.replay_buffers.storages.table import Table
from gleanrl.errors import SchemaError

_ROUNDS = 4


@dataclass(frozen=True)
class RingState:
    """How far a ring of time steps is written."""

    num_steps: int
    end: int
    rows_written: int
    ordered: bool
    seams: torch.Tensor
    """Slots of rows that begin a piece (see `Seams`), ``(n,)`` int64."""


@dataclass(frozen=True)
class StorageState(RingState):
    """What a storage holds at one moment."""

    max_size: int
    """The size that was asked for."""
    ndim: int
    batch_shape: tuple[int, ...]
    """0 in each dimension before the first write."""
    version: Version | None
    """Which content this is, or a copy of which."""
    generations: torch.Tensor
    """Of the stored rows, ``(rows,)`` int64, 1 or more."""
    vacated: torch.Tensor
    """Of the slots behind these that held rows before they were emptied, ``(n,)`` int64, 1 or more."""
    content: Any
    """The records, in the storage's own form; None where there are none and no schema."""
    moved: int | None = None
    """Of a state that was saved by a storage of another size: by how many rows all moved, around the ring, towards the
    first one; None for a state of this very size."""

    @property
    def capacity_steps(self) -> int:
        """Time steps that fit."""
        return -(-self.max_size // max(prod(self.batch_shape), 1))

    @property
    def rows(self) -> int:
        """Transitions stored."""
        return self.num_steps * prod(self.batch_shape)

    def plain(self) -> dict[str, Any]:
        """Return everything but the content as plain values; the generations aren't copied."""
        empty = {name for name in ("vacated", "seams") if not getattr(self, name).numel()}
        left_out = {"content", "moved", *empty}
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**fields, "batch_shape": list(self.batch_shape), "version": version_state(self.version)}

    @classmethod
    def read(cls, reader: StateReader) -> StorageState:
        """Return what `plain` made plain, without content and generations; `SchemaError` for whatever doesn't fit."""
        ndim = reader.integer("ndim", 1)
        sizes = reader.get("batch_shape")
        if (
            not isinstance(sizes, Sequence)
            or len(sizes) != ndim - 1
            or not all(type(n) is int and n >= 0 for n in sizes)
        ):
            raise reader.wrong("batch_shape", f"a list of {ndim - 1} sizes")
        read = cls(
            max_size=reader.integer("max_size", 1),
            ndim=ndim,
            batch_shape=tuple(sizes),
            num_steps=reader.integer("num_steps"),
            end=reader.integer("end"),
            rows_written=reader.integer("rows_written"),
            ordered=reader.flag("ordered"),
            seams=torch.empty(0, dtype=torch.int64, device="cpu"),
            version=_version(reader),
            generations=torch.empty(0, dtype=torch.int64, device="cpu"),
            vacated=torch.empty(0, dtype=torch.int64, device="cpu"),
            content=None,
        )
        capacity = read.capacity_steps
        if read.num_steps > capacity or (read.num_steps and not prod(sizes)):
            raise reader.wrong("num_steps", f"at most {capacity}, in rows of {prod(sizes)}")
        if read.end >= capacity or (read.num_steps < capacity and read.end != read.num_steps):
            raise reader.wrong(
                "end", f"a step that leaves no gap behind the {read.num_steps} of {capacity} stored"
            )
        if read.rows_written < read.rows:
            raise reader.wrong("rows_written", f"at least the {read.rows} stored")
        if "seams" in reader:
            seams = reader.tensor("seams", torch.int64, (None,))
            if seams.numel() and not 0 <= int(seams.min()) <= int(seams.max()) < read.rows:
                raise reader.wrong("seams", f"slots in [0, {read.rows})", seams)
            read = replace(read, seams=seams)
        if "vacated" not in reader:
            return read
        vacated = reader.tensor("vacated", torch.int64, (None,))
        if vacated.numel() and int(vacated.min()) < 1:
            raise reader.wrong("vacated", "generations of 1 or more", vacated)
        return replace(read, vacated=vacated)

    def fitted_to(self, storage: Slots) -> StorageState:
        """Return this state for that storage's size (see `fitted`).

        Raises:
            SchemaError: another number of dimensions, or more than fits.
        """
        if self.ndim != storage.ndim:
            raise SchemaError(
                f"load_state_dict: the state has ndim={self.ndim}, this storage {storage.ndim}: build it with the same"
            )
        return self.fitted(storage.requested_size)

    def fitted(self, max_size: int) -> StorageState:
        """Return this state for a storage of that size, as if these steps, the oldest first, were all it ever got.

        Rows stay where they are unless the ring had come around; records in no order of time always do.

        Raises:
            SchemaError: more is stored than fits.
        """
        fitted = replace(self, max_size=max_size)
        capacity, before = fitted.capacity_steps, self.capacity_steps
        if capacity == before:
            return fitted
        per_step = prod(self.batch_shape)
        if self.num_steps > capacity:
            raise SchemaError(
                f"load_state_dict: the state has {self.rows} records, of a storage with max_size={self.max_size}; this "
                f"one has room for {capacity * per_step}: give it a max_size of {self.rows} or more"
            )
        steps = self.end if self.ordered and self.num_steps == before else 0
        return replace(
            fitted,
            end=self.num_steps % capacity,
            moved=steps * per_step,
            seams=(self.seams - steps * per_step) % max(self.rows, 1),
            version=None if steps else self.version,
            generations=self.generations.roll(-steps * per_step, 0),
        )

    def counters(self, slots: int) -> torch.Tensor:
        """Return the generations of stored and vacated slots, ``(slots or less,)``; without the latter not copied."""
        vacated = self.vacated[: slots - self.generations.shape[0]]
        return torch.cat([self.generations, vacated]) if vacated.numel() else self.generations

    def counted(self, reader: StateReader) -> StorageState:
        """Return this state with the generations that a foreign one says."""
        fresh = "columns" in reader and isinstance(reader.get("columns"), Fresh)
        generations = reader.tensor("generations", torch.int64, (self.rows,), copy=not fresh)
        return self.with_generations(generations, reader)

    def with_generations(self, generations: torch.Tensor, reader: StateReader) -> StorageState:
        """Return this state with these generations, ``(rows,)`` int64 on the CPU, which aren't copied."""
        if generations.numpy().min(initial=1) < 1:  # an eighth of the time of torch's comparison
            raise reader.wrong("generations", "1 or more for every stored row", generations)
        return replace(self, generations=generations)


def _version(reader: StateReader) -> Version | None:
    saved = reader.get("version")
    version = version_from(saved)
    if version is None and saved is not None:
        raise reader.wrong("version", "two integers, or None")
    return version


class ContentCopy(ABC):
    """A copy of a storage's records that is brought up to date by slots."""

    @abstractmethod
    def take(self, rows: int, spans: list[tuple[int, int]]) -> None:
        """Copy ``[start, stop)`` ranges of slots; from now on there are `rows` rows. Takes no lock."""

    @abstractmethod
    def done(self, rows: int) -> Any:
        """Return the first `rows` rows as a snapshot's content."""


class Ahead(Protocol):
    """A snapshot of much data that has begun."""

    def end(self) -> tuple[Any, int]:
        """Come to the end, under the lock of the storage's buffer.

        Returns:
            The content, and how many rows' generations aren't in it.
        """


class AtEnd(NamedTuple):
    """A snapshot for which nothing is done before it comes to the end."""

    end: Callable[[], tuple[Any, int]]


class Copying:
    """The copying of a storage for a snapshot, in rounds beside its writers.

    A round notes the storage's version under the lock of its buffer, and copies without it what had changed until
    then. Rows that are written meanwhile may come out torn; the version says so, and the next round copies them
    again. The last one is made under the lock, so that the snapshot is of that moment.

    Args:
        storage: what is copied.
        start: returns an empty copy of the storage's present content; None where there isn't a schema yet.
    """

    def __init__(self, storage: Slots, start: Callable[[], ContentCopy | None]) -> None:
        self._storage = storage
        self._start = start
        self._copy: ContentCopy | None = None
        self._version: Version | None = None

    def ahead(self) -> Copying:
        """Copy until little is left to the last round, or the writers are too fast."""
        for _ in range(_ROUNDS):
            if 8 * self._round() <= len(self._storage):
                break
        return self

    def end(self) -> tuple[Any, int]:
        """Make the last round, under the lock of the storage's buffer.

        Returns:
            The content, and how many rows' generations aren't in it.
        """
        self._round()
        rows = len(self._storage)
        return (None if self._copy is None else self._copy.done(rows)), rows

    def _round(self) -> int:
        """Copy what changed since the last round; return how many rows that were."""
        storage = self._storage
        with storage.guard():
            version, rows = storage.version, len(storage)
            changes = None if self._version is None else storage.changed_since(self._version)
            if self._copy is None or changes is None:
                self._copy, changes = self._start(), None
        if self._copy is None:
            return 0
        spans = (
            [(0, rows)]
            if changes is None
            else [(c.start, min(c.stop, rows)) for c in changes if c.start < rows]
        )
        self._copy.take(rows, spans)
        self._version = version
        return sum(stop - start for start, stop in spans)


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
            columns.append(column.take(order) if isinstance(column, ObjectColumn) else column.roll(-rows, 0))
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
    moment: CowSnapshot


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
            leaves.append(ObjectColumn.of(copy.deepcopy(column), shape, field.blank))
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
    if isinstance(like, ObjectColumn):
        return ObjectColumn.blanks((rows, *like.shape[1:]), like.blank)
    if not like.is_cpu:
        return torch.empty(rows, *like.shape[1:], dtype=like.dtype, device=like.device)
    array: np.ndarray[Any, Any] = np.empty((rows, *like.shape[1:]), numpy_dtype(like.dtype))
    return torch.from_numpy(array).view(like.dtype)


def _first(column: Leaf, rows: int) -> Leaf:
    if isinstance(column, ObjectColumn):
        return ObjectColumn.of(copy.deepcopy(column[:rows].items()), column[:rows].shape, column.blank)
    if rows == column.shape[0]:
        return column
    if not column.is_cpu:
        return column[:rows].clone()
    # A torch storage of its own over the first rows.
    return torch.from_numpy(numpy_view(column)[:rows]).view(column.dtype)
