"""Snapshots of storages: all stored records and counters as one value.

Also reads the records in a saved state, and checks them before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._checkpoint.row_segments import PrivateColumns
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.change_log import Version, version_from, version_state
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.record_formats import check_all_storable, format_from_state
from gleanrl.data.replay_buffers.storages.slots import Slots
from gleanrl.data.replay_buffers.storages.table import Table
from gleanrl.errors import SchemaError


@dataclass(frozen=True)
class RingState:
    """The fill state of a ring of time steps."""

    num_steps: int
    end: int
    rows_written: int
    ordered: bool
    overwritten: bool
    """See `Slots.overwritten`. The default, also in older states: whether a ring in order of time is full."""
    seams: torch.Tensor
    """Slots of the rows that begin a piece (see `Seams`), ``(n,)`` int64."""


@dataclass(frozen=True)
class StorageState(RingState):
    """The records and counters of a storage at one moment."""

    max_size: int
    """The size that the user requested."""
    ndim: int
    batch_shape: tuple[int, ...]
    """0 in each dimension before the first write."""
    version: Version | None
    """The version of this content, or of the content that it is a copy of."""
    generations: torch.Tensor
    """Generations of the stored rows, ``(rows,)`` int64, each at least 1; empty if `LiveRecords` have them."""
    vacated: torch.Tensor
    """Generations of the slots behind these that held rows before a clear, ``(n,)`` int64, each at least 1."""
    content: Any
    """The records in the storage's own form; None if there are no records and no schema."""
    moved: int | None = None
    """Number of rows by which all rows were moved towards the first one, around the ring.

    It is set if a storage of another size saved the state, and None otherwise.
    """

    @property
    def capacity_steps(self) -> int:
        """Number of time steps that fit."""
        return -(-self.max_size // max(prod(self.batch_shape), 1))

    @property
    def is_full_ring(self) -> bool:
        """Whether every slot is filled, in the order of time."""
        return self.ordered and self.num_steps == self.capacity_steps

    @property
    def rows(self) -> int:
        """Number of transitions stored."""
        return self.num_steps * prod(self.batch_shape)

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain values, without `content`, `moved`, and fields that have their default.

        The generations aren't copied.
        """
        empty = {name for name in ("vacated", "seams") if not getattr(self, name).numel()}
        as_usual = {"overwritten"} if self.overwritten == self.is_full_ring else ()
        left_out = {"content", "moved", *empty, *as_usual}
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**fields, "batch_shape": list(self.batch_shape), "version": version_state(self.version)}

    @classmethod
    def read(cls, reader: StateReader) -> StorageState:
        """Return the state from the result of `plain`, without content and generations.

        The values may come from a broken or foreign file. Each is checked here, so that a load fails before it changes
        the storage.

        Raises:
            SchemaError: a value has a wrong type or contradicts the others.
        """
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
            overwritten=False,
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
        overwritten = reader.flag("overwritten") if "overwritten" in reader else read.is_full_ring
        read = replace(read, overwritten=overwritten) if overwritten else read
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
        """Return this state for the size of `storage` (see `fitted`).

        Raises:
            SchemaError: the number of dimensions differs, or more records are stored than fit.
        """
        if self.ndim != storage.ndim:
            raise SchemaError(
                f"load_state_dict: the state has ndim={self.ndim}, this storage {storage.ndim}: build it with "
                f"ndim={self.ndim}"
            )
        return self.fitted(storage.requested_size)

    def fitted(self, max_size: int) -> StorageState:
        """Return this state for a storage of another size, as if only the stored steps had been written to it in order.

        Rows move only if the ring had wrapped around; the version is then None. Rows that aren't in the order of time
        never move. The content isn't changed here.

        Raises:
            SchemaError: more records are stored than fit.
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
        """Return the generations of the stored slots, then of the vacated ones, at most `slots` of them.

        Without vacated slots the result is `generations` itself.
        """
        vacated = self.vacated[: slots - self.generations.shape[0]]
        return torch.cat([self.generations, vacated]) if vacated.numel() else self.generations

    def counted(self, reader: StateReader) -> StorageState:
        """Return this state with the generations in a foreign state; raise `SchemaError` if they are broken."""
        unshared = "columns" in reader and isinstance(reader.get("columns"), PrivateColumns)
        generations = reader.tensor("generations", torch.int64, (self.rows,), copy=not unshared)
        return self.with_generations(generations, reader)

    def with_generations(self, generations: torch.Tensor, reader: StateReader) -> StorageState:
        """Return this state with the given generations, ``(rows,)`` int64 on the CPU, without a copy.

        Raises:
            SchemaError: a generation is below 1.
        """
        if generations.numpy().min(initial=1) < 1:  # NumPy takes an eighth of the time of torch's comparison
            raise reader.wrong("generations", "1 or more for every stored row", generations)
        return replace(self, generations=generations)


def _version(reader: StateReader) -> Version | None:
    saved = reader.get("version")
    version = version_from(saved)
    if version is None and saved is not None:
        raise reader.wrong("version", "two integers, or None")
    return version


@dataclass(frozen=True)
class Records:
    """Records in separate columns."""

    form: RecordFormat
    columns: list[Leaf]
    """Columns ``[rows, *field]``, including lists, in the order of a table's columns."""
    table: Table | None = None
    """The table that the records will be copied to; None if it isn't known yet."""
    there: bool = False
    """Whether the table holds the records already: the columns are then views of its columns, in its order."""
    unshared: bool = False
    """Whether no other object uses the columns' memory."""
    identity: str | None = None
    """The records' name, if they come from a checkpoint (see `Segmented`)."""

    def turned(self, rows: int) -> Records:
        """Return copies of the records with the first `rows` rows moved to the end."""
        columns: list[Leaf] = []
        for column in self.columns:
            order = torch.arange(column.shape[0], device="cpu").roll(-rows)
            columns.append(column.take(order) if isinstance(column, ObjectColumn) else column.roll(-rows, 0))
        return replace(self, columns=columns, there=False, identity=None)

    def into(self, table: Table) -> Records:
        """Return the records with their columns in the order of `table`, to which they will be copied."""
        index = self.form.schema.index
        columns = [self.columns[index(path)] for path in table.form.schema.paths]
        return replace(self, form=table.form, columns=columns, table=table)


class Mark(NamedTuple):
    """The state of a storage when its rows were named in a checkpoint."""

    version: Version
    """The storage's version at that moment."""
    num_views: int
    """How often views had been handed to users until then."""


@dataclass(frozen=True)
class LiveRecords:
    """Records in a copy-on-write snapshot, with the generations as its first column.

    Each row is copied when it is saved, or before a writer overwrites it. Objects in lists are referred to, because
    writers replace objects and never change them.
    """

    form: RecordFormat
    snapshot: CowSnapshot
    lists: list[tuple[int, ObjectColumn]]
    """Each list with its position among the columns, in order."""
    mark: Mark | None
    """The state of the storage at this moment; None if a user may change the rows through a live view."""

    def copies(self) -> tuple[torch.Tensor, Records]:
        """Return the generations and the records in private memory. May be called once."""
        generations, *dense = self.snapshot.copies()
        columns: list[Leaf] = [*dense]
        for position, objects in self.lists:
            items = copy.deepcopy(objects.items())
            columns.insert(position, ObjectColumn.of(items, objects.shape, objects.blank))
        return generations, Records(self.form, columns)


def layout_fields(form: RecordFormat) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Return dtype and shape of each column of rows in segments: the generations, then the records' leaves."""
    leaves = ((field.dtype, tuple(field.row_shape)) for field in form.schema.fields)
    return (torch.int64, ()), *leaves


def stored_rows(reader: StateReader, state: StorageState, known: RecordFormat | None) -> RecordFormat:
    """Return the format of records that are still in the files of a checkpoint.

    Raises:
        SchemaError: the files don't contain such records.
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
    """Return the records in a state; None if it has no records and no schema.

    The state may come from a broken or foreign file, so its columns are checked against its own schema. Objects are
    copied, tensors aren't.

    Raises:
        SchemaError: the records are broken.
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
    return Records(form, leaves, unshared=isinstance(columns, PrivateColumns))
