"""Tensor storages: one column for each leaf, and all leaves of a batch fetched in one call.

`TensorStorage` keeps records in a `Table`, and saves and loads it. `LazyTensorStorage` keeps its columns in memory, and
`LazyMemmapStorage` keeps them in mapped files.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.devices import device_of, usable_device
from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.results import new_tuple
from gleanrl._arrays.schema import allocate
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key
from gleanrl._checkpoint.copy_on_write import CowSnapshot, copy_of
from gleanrl._checkpoint.reader import Stored
from gleanrl._os.interrupts import to_the_end
from gleanrl._state.state import StateReader
from gleanrl._util import positive
from gleanrl.data.replay_buffers.storages.allocators import (
    Allocator,
    ExistingColumns,
    FileAllocator,
    HeapAllocator,
    file_of,
)
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage, count_all_as_written
from gleanrl.data.replay_buffers.storages.columns import apart, column_store, plain, repeated
from gleanrl.data.replay_buffers.storages.compact import CompactStorage
from gleanrl.data.replay_buffers.storages.frame_stacks import Compact
from gleanrl.data.replay_buffers.storages.indexing import basic_index, column_of, is_key, slots_at
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat, in_memory
from gleanrl.data.replay_buffers.storages.record_formats import (
    as_tensor,
    check_all_storable,
    find_format,
    stack_records,
    swap_batch_dims,
)
from gleanrl.data.replay_buffers.storages.snapshots import (
    LiveRecords,
    Mark,
    Records,
    StorageState,
    read_records,
    stored_rows,
)
from gleanrl.data.replay_buffers.storages.table import StoreMaker, Table
from gleanrl.data.trajectories import take_rows
from gleanrl.errors import (
    EmptyBufferError,
    GleanError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)

_MARKS = 8  # number of earlier checkpoints for which a storage remembers its version


class TensorStorage(Storage):
    """Records of tensors: TensorDicts, single tensors, or dictionaries, lists and tuples of tensors.

    The first write fixes keys, shapes and dtypes and allocates the memory. Every later write must match exactly; only
    the device may differ. Keys that `sample` adds to records are ignored, and tensors are detached. Columns are
    ``[steps, *batch, *leaf]``, and zero until they are written.

    Memory: the columns, and 8 bytes for the generation of each row. Threads: see `Storage`. `fetch` may run during a
    write. Rows that are written meanwhile come out torn, and their generations show it.

    Args:
        storage: records ``[steps, *batch]`` to wrap, all of which count as stored. Contiguous tensors on `device` are
            used without a copy. Other tensors, and tensors that share memory, are copied. If it is a TensorDict without
            entries, the first write to it creates the columns, which are zero in all other records.
        max_size: the number of records, ``steps * batch``; any other number raises `InvalidArgumentError`.
        device: the device of the stored and of the fetched records; ``"auto"`` for the device of the data.
        ndim: the number of leading batch dimensions of the data that are slots; the first is time.
        compilable: has no effect, see `ListStorage`.

    Raises:
        InvalidArgumentError: `max_size`, `device` or `ndim` has a bad value.
        InvalidTypeError: the records are neither a TensorDict, a tensorclass nor a tree of tensors.
        SchemaError: columns can't hold a record, there is no record, or there are fewer than `ndim` dimensions.

    Examples:
        >>> import torch
        >>> storage = TensorStorage(torch.arange(4))
        >>> len(storage), storage.get([3, 0])
        (4, tensor([3, 0]))
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str | int = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        ndim = positive("ndim", ndim)
        where = f"storage (ndim={ndim})"
        form = find_format(storage, ndim, where)
        lead, leaves = form.read(storage, ndim, where)
        form.schema.check(leaves, lead, where)
        if max_size is not None and max_size != lead.numel():
            raise InvalidArgumentError(
                f"max_size: expected {lead.numel()}, the records in `storage`, got {max_size}"
            )
        target = device_of(leaves) if device == "auto" else usable_device(device)
        rows = [leaf.detach().to(target).contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        columns = [row.view(lead.numel(), *row.shape[ndim:]) for row in rows]
        lists = [objects.on(target) for objects in leaves if isinstance(objects, ObjectColumn)]
        flat = [objects.reshape(lead.numel(), *objects.shape[ndim:]) for objects in lists]
        self._wrap(form, lead, ExistingColumns([*apart(columns), *flat]), target)

    def _open(
        self, max_size: int, allocator: Allocator, device: torch.device, ndim: int, follows_data: bool = False
    ) -> None:
        """Initialise an empty storage, whose first write or load makes the `Table`. Constructors call it.

        Args:
            max_size: the number of transitions that fit, at least 1.
            allocator: makes the columns.
            device: the device of the columns.
            ndim: the number of batch dimensions, at least 1; the first is time.
            follows_data: whether the storage uses the device of the first data, and heap memory there, instead.
        """
        Storage.__init__(self, max_size, ndim=ndim)
        self.device = device
        self.allocator = allocator
        """Makes the columns. A subclass may set another one before the first write."""
        self._follows_data = follows_data
        self._table: Table | None = None

    def _wrap(
        self, form: RecordFormat, lead: torch.Size, existing: ExistingColumns, device: torch.device
    ) -> None:
        """Initialise a storage that is full of the records ``[*lead]`` in the `existing` columns."""
        self._open(lead.numel(), existing, device, len(lead))
        self._check_batch(lead[1:], lead[0], "storage")
        table, _ = first_table(self, form, lead[1:], ())
        self.allocator = HeapAllocator(self.device)  # for additional columns
        count_all_as_written(self, lead[0])
        table.watch_mask(existing.columns)

    @property
    def initialized(self) -> bool:
        """Whether a first write or load has fixed the schema and allocated the memory."""
        return self._table is not None

    @property
    def exposed(self) -> bool:
        """Whether live views were ever handed out, or the memory belongs to a user, to files or to other processes."""
        if self._table is None:
            return False
        views = self._table.columns.live_views
        return views.always or views.count > 0 or self._table.shared

    @property
    def has_user_memory(self) -> bool:
        """Whether a user may hold tensors over the columns' memory, and move it. Needs a schema (see `format`)."""
        return table_of(self).columns.live_views.always

    @property
    def format(self) -> RecordFormat:
        """The frozen structure of the records; `EmptyBufferError` before the first write."""
        return table_of(self).form

    def _settle(self, device: torch.device) -> None:
        """Use the device of the first data, if the storage follows it."""
        if self._follows_data:
            self.device = device
            self.allocator = HeapAllocator(device)

    def _make_table(self, form: RecordFormat, batch: torch.Size, leaves: Sequence[Leaf] = ()) -> Table:
        streams = batch.numel()
        rows, store = self.steps_that_fit(batch) * streams, self._store_for(form, streams, leaves)
        table = Table(form, rows, self.allocator, self.device, store)
        if self.ndim > 1:  # with one dimension, writes drop padding rows
            table.watch_mask()
        return table

    def _store_for(self, form: RecordFormat, streams: int, leaves: Sequence[Leaf]) -> StoreMaker:
        """Return the function that makes the columns, for steps of so many rows that begin with `leaves`."""
        return column_store

    def _begin(self, table: Table, batch: torch.Size) -> None:
        table.keep()
        self.fix_batch(batch)
        self.device, self._table, self.find_seams = table.device, table, table.find_seams

    _alone = True  # whether only this process writes to the storage
    _marks: dict[str, Mark] = {}

    def _current_content(self) -> Records | LiveRecords | None:
        """Return the records as a copy-on-write snapshot; copy them if other processes, too, write to the storage."""
        table, rows = self._table, len(self)
        if table is None:
            return None
        if not self._alone:
            table.columns.begin()
            return Records(table.form, [copy_of(column, rows) for column in table.columns.columns])
        views = table.columns.live_views
        mark = self._present()
        earlier = {
            name: self.changed_since(past.version)
            for name, past in self._marks.items()
            if past.num_views == views.count
        }
        columns = [self.generations.of_all(), *table.columns.columns]
        start = self.end * self.rows_per_step
        snapshot = CowSnapshot(columns, rows, start, earlier if mark else {}, table.columns.begin)
        self.open_snapshots = (*self.open_snapshots, weakref.ref(snapshot))
        return LiveRecords(table.form, snapshot, table.list_references(rows), mark)

    def copied(self, value: StorageState) -> StorageState:
        """Return a snapshot with its records in private memory (see `Storage.copied`)."""
        if not isinstance(value.content, LiveRecords):
            return value
        generations, records = value.content.copies()
        return replace(value, generations=generations, content=records)

    def _present(self) -> Mark | None:
        """Return the state of this moment for `_mark`; None if a user may change the content through a live view."""
        views = table_of(self).columns.live_views
        return None if views.alive else Mark(self.version, views.count)

    def _mark(self, name: str, mark: Mark | None) -> None:
        """Remember a checkpoint's name and the moment of its content, unless a user may have changed the content."""
        if mark is not None:
            self._marks = dict([*[*self._marks.items()][1 - _MARKS :], (name, mark)])

    def _remember(self, content: Any) -> None:
        if isinstance(content, Records) and content.identity is not None:
            self._mark(content.identity, self._present())

    def plain_state(self, value: StorageState, live: bool = False) -> dict[str, Any]:
        """Return a snapshot as plain values and tensors; with `live`, rows without lists stay in their snapshot."""
        content = value.content
        if not live or not isinstance(content, LiveRecords) or content.lists:
            return super().plain_state(value)
        with self.guard():
            self._mark(content.snapshot.identity, content.mark)
        state = super().plain_state(value, live=True)
        del state["generations"]
        return state

    def parse(self, state: Any) -> StorageState:
        """Return a foreign state's value (see `Storage.parse`). Records in files are read into new memory at once.

        A storage with ``device="auto"`` and no schema takes over the device of the state's records already here.
        """
        stored = state.get("columns") if isinstance(state, Mapping) else None
        if not isinstance(stored, Stored) or not self._alone:
            return super().parse(state)
        return self._read(stored, StateReader(state, f"a {type(self).__name__}"))

    def _read(self, stored: Stored, reader: StateReader) -> StorageState:
        """Return the value of a state whose records are in files, and read them into memory that no storage uses yet.

        The memory is new, so a failed or corrupt read changes nothing. Mapped files are read next to the present ones,
        because `settle` can then replace these by renaming.
        """
        saved, table = StorageState.read(reader), self._table
        value = saved.fitted_to(self)
        form = stored_rows(reader, value, None if table is None else table.form)
        target: Table | None = None
        if table is None:
            self._settle(torch.device("cpu"))
            target = self._make_table(form, torch.Size(value.batch_shape))
        else:
            self.check_form(form, value)
            if isinstance(self.allocator, FileAllocator):
                target = Table(table.form, table.columns.num_rows, self.allocator.another())
        if target is None:
            columns: list[Any] = [
                allocate((value.rows, *field.row_shape), field.dtype, self.device)
                for field in form.schema.fields
            ]
        else:
            own = [column[: value.rows] for column in target.all]
            columns = [own[target.form.schema.index(path)] for path in form.schema.paths]
        generations = allocate((value.rows,), torch.int64)
        try:
            stored.read([generations, *columns], value.moved or 0)
        except BaseException:
            if target is not None:
                target.discard()
            raise
        identity = None if value.moved else stored.identity
        rows = (
            replace(Records(form, columns), identity=identity).into(table_of(self))
            if target is None
            else Records(target.form, own, target, True, identity=identity)
        )
        return replace(value.with_generations(generations, reader), content=rows)

    def _turned(self, content: Records, rows: int) -> Records:
        return content.turned(rows)

    def check_form(self, form: RecordFormat, state: StorageState) -> None:
        """Raise `SchemaError` if such records can't be loaded, `UnsupportedError` if the columns are read-only."""
        table = table_of(self)
        if not table.form.same_as(form) or state.batch_shape != self.batch_shape:
            raise SchemaError(
                f"load_state_dict: the state's schema {form.schema!r} with batch {state.batch_shape} isn't "
                f"this storage's {table.form.schema!r} with batch {tuple(self.batch_shape)}; load it into a new storage"
            )
        table.columns.check_writable()

    def _plain_content(self, content: Records | LiveRecords | None) -> dict[str, Any]:
        if content is None:
            return {}
        if isinstance(content, LiveRecords):
            return {"format": content.form.state(), "columns": content.snapshot}
        columns = [
            column.items() if isinstance(column, ObjectColumn) else column for column in content.columns
        ]
        return {"format": content.form.state(), "columns": columns}

    def _parse_content(self, reader: StateReader, state: StorageState) -> Records | None:
        rows = read_records(reader, state, None if self._table is None else self._table.form)
        if rows is None:
            return None
        table = self._table
        if table is None:
            self._settle(device_of(rows.columns))
            batch = torch.Size(state.batch_shape)
            # Columns that no other object uses, and that fill the storage exactly, become its columns without a copy.
            full = state.rows == self.steps_that_fit(batch) * batch.numel()
            if (
                self._alone
                and rows.unshared
                and full
                and isinstance(self.allocator, HeapAllocator)
                and self.device.type == "cpu"
            ):
                new_table = Table(rows.form, state.rows, ExistingColumns(rows.columns, exclusive=True))
                if self.ndim > 1:
                    new_table.watch_mask()
                return replace(rows.into(new_table), there=True)
            table = self._make_table(rows.form, batch)
        else:
            self.check_form(rows.form, state)
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
        """Return the state for a pickle, with the stored records. Unpickling allocates new memory for them.

        Raises:
            UnsupportedError: the records are in files of a `scratch_dir`, or the pickle is for a spawned process.
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
        self.num_steps = 0  # the unpickled object has no rows yet, so `adopt` keeps the saved generations
        self.adopt(self.parse(saved))

    @property
    def _storage(self) -> Any:
        """All slots as one live view, ``[capacity_steps, *batch]``; None before the first write."""
        return None if self._table is None else self._view(self._table, (), self.capacity_steps)

    def _flattened(self) -> TensorStorage:
        """Return the stored part as a storage with one batch dimension that shares the columns."""
        table, count = table_of(self), len(self)
        flat = TensorStorage.__new__(TensorStorage)
        flat._wrap(table.form, torch.Size([count]), table.first_rows(count), self.device)
        return flat

    def join(self, records: list[Any], where: str) -> Any:
        """Return single records as one batch, time first; raise `SchemaError` if their structures differ."""
        return stack_records(records, where)

    def prepare(self, data: Any, *, single: bool, dim_extend: int, where: str) -> Prepared:
        """Check keys, shapes and dtypes of `data` (see `Storage.prepare`), and drop padding rows if ``ndim`` is 1."""
        try:
            if dim_extend >= self.ndim and not single:
                data, dim_extend = swap_batch_dims(data, dim_extend, where), 0
            dims, table = self.ndim - single, self._table
            form = find_format(data, dims, where) if table is None else table.form
            try:
                lead, leaves = form.read(data, dims, where)
            except SchemaError:
                if form.schema.paths or not (wider := form.wider(data, dims, where)):
                    raise
                form, (lead, leaves) = wider, wider.read(data, dims, where)  # the first keys of this storage
            widens = table is not None and form is not table.form
            is_ready = (
                table is not None and not table.lists and not widens and table.columns.fits(leaves, lead)
            )
            if not is_ready:
                self._check(form, data, leaves, lead, where)
            if dim_extend and not single:
                is_ready = False  # transposed leaves aren't contiguous
                leaves = [leaf.transpose(0, dim_extend) for leaf in leaves]
                lead = torch.Size((lead[dim_extend], *lead[1:dim_extend], lead[0], *lead[dim_extend + 1 :]))
            batch, num_steps = (lead, 1) if single else (lead[1:], lead[0])
            if table is None or not num_steps or batch != self.batch_shape:
                self._check_batch(batch, num_steps, where)
            kept = None
            if self.ndim == 1 and form.mask is not None:
                steps = in_memory(leaves[form.mask]).reshape(num_steps).cpu()
                if not steps.any():
                    return Prepared([], 0, steps)
                if not steps.all():
                    kept = steps.clone()  # the mask may be a view of a row that this write overwrites
                    leaves = [take_rows(leaf, 1, steps.nonzero()[:, 0]) for leaf in leaves]
                    num_steps = leaves[0].shape[0]
            if table is None:
                table, leaves = first_table(self, form, batch, leaves)
            elif widens:
                self._table = table = table.widened(form, self.allocator)
            return new_tuple(Prepared, (leaves if is_ready else table.ready(leaves), num_steps, kept))
        except GleanError:
            raise
        except Exception:
            check_all_storable(data, where)  # torch's error doesn't name the key of an unsuitable tensor
            raise

    def _check(self, form: RecordFormat, data: Any, leaves: list[Any], lead: torch.Size, where: str) -> None:
        """Raise `SchemaError` unless leaves match the schema. For rows of several steps it explains more."""
        try:
            form.schema.check(leaves, lead, where)
        except SchemaError as error:
            items = data.batch_size[len(lead) :] if is_tensor_collection(data) else form.item_shape
            if len(items) != len(form.item_shape) or items == form.item_shape:
                raise
            raise SchemaError(
                f"{error}. Each row of this storage holds {list(form.item_shape)} steps, got rows of {list(items)}: "
                "the last batch of a collector is shorter where total_frames is no multiple of frames_per_batch. "
                f"Build the storage with ndim={self.ndim + len(items)}, or extend by data.reshape(-1)"
            ) from error

    def _is_one(self, data: Any) -> bool:
        if self._table is not None:  # the schema gives the dimensions of a record
            form = self._table.form
            dims = form.read(data, self.ndim - 1, "set")[1][0].ndim - len(form.schema.fields[0].shape)
        elif is_tensor_collection(data):
            dims = data.batch_dims
        else:
            leaves = [as_tensor(leaf) for leaf in _pytree.tree_leaves(data)]
            dims = min((leaf.ndim for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)
        return dims < self.ndim

    def _check_batch(self, batch: torch.Size, num_steps: int, where: str) -> None:
        if not self.rows_per_step:
            if not batch.numel():
                raise SchemaError(f"{where}: expected batch dimensions of 1 or more, got {tuple(batch)}")
        elif batch != self.batch_shape:
            raise SchemaError(
                f"{where}: expected batch dimensions [time, {', '.join(map(str, self.batch_shape))}], got "
                f"{[num_steps, *batch]}; the first write fixed them"
            )
        if num_steps == 0:
            raise SchemaError(f"{where}: got no record at all; write at least one")

    def _copy_span(self, rows: list[torch.Tensor], skipped: int, start: int, count: int) -> None:
        per_step, table = self.rows_per_step, self._table or table_of(self)
        if not table.lists and not skipped:
            table.columns.write(start * per_step, count * per_step, rows)
        else:
            table.write(rows, skipped, start * per_step, count * per_step)

    def _copy_slots(self, rows: list[torch.Tensor], slots: torch.Tensor) -> None:
        table_of(self).put(rows, slots)

    def _pick(self, rows: list[torch.Tensor], positions: torch.Tensor) -> list[torch.Tensor]:
        return table_of(self).pick(rows, positions)

    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Check records that will be written to a selection of slots ``[*shape]``.

        TensorDicts that have only the last dimensions of `shape` are repeated over the first ones. New keys add columns
        to the storage at once, even if no write follows. `EmptyBufferError` is raised before the first write.
        """
        try:
            table = table_of(self)
            data = repeated(data, shape, table.form.item_shape)
            try:
                lead, leaves = table.form.read(data, len(shape), where)
            except SchemaError:
                # New keys are allowed here: assigning a column to stored records adds it.
                form = table.form.wider(data, len(shape), where)
                if form is None:
                    raise
                lead, leaves = form.read(data, len(shape), where)
                form.schema.check(leaves, shape, where)
                self._table = table = table.widened(form, self.allocator)
                self.find_seams = table.find_seams
            if lead != shape:
                raise SchemaError(
                    f"{where}: the index selects {tuple(shape)} records, got {tuple(lead)}; give records of that "
                    "shape, or of its last dimensions only, which are repeated over the others"
                )
            table.form.schema.check(leaves, lead, where)
            rows = table.ready(leaves)
            table.watch_mask(leaves)
            return Prepared(rows, shape.numel())
        except GleanError:
            raise
        except Exception:
            check_all_storable(data, where)
            raise

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> Any:
        """Return the records in `slots`, with all columns or only those at `paths`, on the storage's device."""
        table, lead = self._table or table_of(self), slots.shape
        if paths is None and not table.lists:  # the common case, without the call of `Table.fetch`
            return table.build(table.columns.gather(slots), lead, table.device)
        return table.fetch(slots, lead, paths)

    def fetch_again(
        self, records: Any, slots: torch.Tensor, renewed: torch.Tensor, paths: tuple[Path, ...] | None = None
    ) -> Any:
        """Return the records in `slots`: `records` with renewed rows replaced in place, or else a new fetch."""
        if not isinstance(records, torch.Tensor | TensorDict) or table_of(self).lists:
            return self.fetch(slots, paths)
        rows = renewed.nonzero().squeeze(1)
        records[rows] = self.fetch(slots[rows], paths)
        return records

    def columns_of(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the columns that `keys` name (see `Storage.columns_of`)."""
        return self.format.select(keys)

    def column(self, path: Path) -> torch.Tensor:
        """Return a live view of all slots of the column at `path`, for reading only: ``[num_slots, *field]``."""
        return table_of(self).column(path)

    def get(self, index: Any) -> Any:
        """Return records of the visible part ``[steps, *batch]``, or a whole column at a key.

        Ints, slices, tuples of them and keys give live views: a write into a view changes the storage, and later writes
        show in the view. Lists, tensors and masks give copies.

        Raises:
            EmptyBufferError: there is no schema yet.
            IndexRangeError: the index is outside the stored part, or a slice has a negative step.
            InvalidTypeError: the value isn't an index.
            MissingKeyError: no column has that key.
        """
        basic = basic_index(index, self.shape)
        if basic is None and is_key(index):
            return column_of(self.get(slice(None)), index)
        if basic is None:
            slots, shape = slots_at(index, self.shape)
            return self.fetch(slots) if len(shape) == 1 else table_of(self).fetch(slots, shape)
        return self._view(table_of(self), basic, self.num_steps)

    def _view(self, table: Table, index: tuple[int | slice, ...], num_steps: int) -> Any:
        """Return a view of the first `num_steps` time steps at a basic index."""
        for part in index:
            if isinstance(part, slice) and (part.step or 1) < 0:
                raise IndexRangeError(
                    f"index: expected a slice with a positive step, got step {part.step}; use a list of positions"
                )
        return table.view(torch.Size((num_steps, *self.batch_shape)), index)

    @property
    def has_mask(self) -> bool:
        """Whether the records have a mask that may mark some rows as padding."""
        return self._table is not None and self._table.mask is not None

    def masked(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return which of `slots` have a False ``("collector", "mask")``, on the CPU; None if `has_mask` is False."""
        mask = None if self._table is None else self._table.mask
        return None if mask is None else ~mask[slots.to(mask.device)].cpu()

    def check_valid(self) -> None:
        """Raise AssertionError if the storage's metadata are inconsistent; for tests."""
        assert 0 <= self.num_steps <= self.capacity_steps
        assert len(self) <= self.max_size
        if self._table is not None:
            for column, path in zip(self._table.all, self.format.schema.paths, strict=True):
                field = self.format.schema[path]
                assert column.shape == (self.max_size, *field.row_shape), as_key(path)
                if not field.is_list:
                    assert column.dtype == field.dtype and column.is_contiguous(), as_key(path)
        generations = self.generations.of_all()
        assert bool((generations[: len(self)] > 0).all()), "a stored row was never written"

    def __repr__(self) -> str:
        """Return the class, the size and the schema, with one key on a line."""
        schema = "no schema yet" if self._table is None else self._table.form.schema.on_lines()
        return f"{type(self).__name__}({len(self)} of {self.max_size} rows, {schema})"


class LazyTensorStorage(TensorStorage):
    """A tensor storage in memory, which is allocated and zeroed at the first write.

    Args:
        max_size: the number of transitions that fit.
        device: the device of the stored and of the fetched records; ``"auto"`` for the device of the first data.
        ndim: the number of leading batch dimensions of the data that are slots; the first is time.
        compilable: has no effect, see `ListStorage`.
        consolidated: has no effect, because all columns are in one region of memory anyway.
        compact: whether an outcome ``("next", key)`` that the following step's ``key`` repeats is stored once, and
            each frame of a stack of frames (see `CompactColumns`); a `Compact` names the stacks. Entries whose rows
            have 16 bytes or more and are no end flags are compared, bit for bit. Batches are the same. Indexing returns
            copies of these entries instead of live views, and keys can't be added after the first write.

    Raises:
        InvalidArgumentError: `max_size`, `device` or `ndim` has a bad value; at the first write, a compact storage has
            2**30 or more rows.
        UnsupportedError: the device is ``"meta"``, or `compact` is used with another device than the CPU or in a
            derived class.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> storage = LazyTensorStorage(100, ndim=2)
        >>> storage.set(slice(4), TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
        >>> storage.max_size, storage.shape, len(storage)
        (102, torch.Size([4, 3]), 12)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | int = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        compact: bool | Compact = False,
    ) -> None:
        target = usable_device("cpu" if device == "auto" else device)
        if target.type == "meta":
            raise UnsupportedError("device: meta tensors hold no data; use a real device")
        if compact:
            if target.type != "cpu" or device == "auto":
                raise UnsupportedError(f'compact: expected device="cpu", got {device!r}; leave out compact')
            _compacted(self, LazyTensorStorage, CompactTensorStorage, compact)
        self._open(max_size, HeapAllocator(target), target, ndim, device == "auto")


class LazyMemmapStorage(TensorStorage):
    """A tensor storage in memory-mapped files. The first write creates them and reserves their space on the disk.

    The operating system keeps the pages in use in memory and all others on the disk. So the storage may be larger than
    memory.

    Args:
        max_size: the number of transitions that fit.
        scratch_dir: the directory of the files, ``next/reward.memmap`` for ``("next", "reward")``. None for files
            without a name in the system's temporary directory, which are deleted with the storage. Existing files are
            refused, unless `existsok` is True.
        device: the CPU; mapped files support no other device.
        ndim: the number of leading batch dimensions of the data that are slots; the first is time.
        existsok: whether the first write replaces existing files in `scratch_dir`. Their content is lost. A storage
            that has the old files mapped keeps them.
        compilable: has no effect, see `ListStorage`.
        compact: see `LazyTensorStorage`. Forked processes can't read a compact storage.

    The tensors in ``storage._storage`` have an attribute `filename`, which is None for files without a name.

    Raises:
        InvalidArgumentError: the device isn't the CPU, or `max_size` or `ndim` isn't a positive integer.
        InvalidTypeError: `scratch_dir` isn't a path.
        CapacityError: at the first write, the disk is too full, or a file can't be made.
        UnsupportedError: at the first write, a file exists already and `existsok` is False.

    Examples:
        >>> import torch
        >>> storage = LazyMemmapStorage(10)
        >>> storage.set(range(3), torch.arange(3.0))
        >>> storage.get(2)
        tensor(2.)
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        compact: bool | Compact = False,
    ) -> None:
        if str(device).partition(":")[0] != "cpu":
            raise InvalidArgumentError(
                f"device: expected the CPU for memory-mapped files, got {device!r}; use LazyTensorStorage"
            )
        if scratch_dir is not None and not isinstance(scratch_dir, (str, os.PathLike)):
            raise InvalidTypeError(f"scratch_dir: expected a path, got {scratch_dir!r}")
        if compact:
            _compacted(self, LazyMemmapStorage, CompactMemmapStorage, compact)
        self.scratch_dir = None if scratch_dir is None else FilePath(scratch_dir)
        allocator = FileAllocator(self.scratch_dir, existsok)
        self._open(max_size, allocator, torch.device("cpu"), ndim)

    @property
    def _storage(self) -> Any:
        """All slots as one live view, whose tensors have the attribute `filename`; None before the first write."""
        rows = super()._storage
        if rows is not None:
            form = self.format
            for path, leaf in zip(form.schema.paths, form.read(rows, self.ndim, "storage")[1], strict=True):
                if isinstance(leaf, torch.Tensor):
                    named = None if self.scratch_dir is None else str(file_of(self.scratch_dir, path))
                    leaf.filename = named  # type: ignore[attr-defined]
        return rows


def table_of(storage: TensorStorage) -> Table:
    """Return a storage's table; raise `EmptyBufferError` before the first write."""
    if storage._table is None:
        raise EmptyBufferError("the storage is empty and has no schema yet: write records first")
    return storage._table


def first_table(
    storage: TensorStorage, form: RecordFormat, batch: torch.Size, leaves: Sequence[Leaf]
) -> tuple[Table, list[Leaf]]:
    """Allocate a storage's memory for records like the first ones, and fix its schema.

    The storage changes only after every column exists, except that it may follow the device of the leaves.

    Args:
        storage: a storage without a table.
        form: the format of the records.
        batch: the records' batch dimensions after time.
        leaves: the records' leaves, in the format's order.

    Returns:
        The table, and the leaves on the storage's device.

    Raises:
        CapacityError: there is too little memory or disk space.
        UnsupportedError: a file of a column exists already (see `FileAllocator`).
    """
    storage._settle(device_of(leaves))
    # Everything that can fail comes before the schema is fixed.
    there = [plain(leaf, storage.device) for leaf in leaves]
    table = storage._make_table(form, batch, there)
    to_the_end(lambda: storage._begin(table, batch))
    return table, there


class CompactTensorStorage(CompactStorage, LazyTensorStorage):
    """The class of ``LazyTensorStorage(compact=True)``."""


class CompactMemmapStorage(CompactStorage, LazyMemmapStorage):
    """The class of ``LazyMemmapStorage(compact=True)``."""


def _compacted(
    storage: TensorStorage, plain_kind: type[TensorStorage], kind: type[TensorStorage], compact: Any
) -> None:
    """Make a storage compact before its first write."""
    if compact is not True and not isinstance(compact, Compact):
        raise InvalidTypeError(f"compact: expected True, False or a Compact, got {compact!r}")
    if type(storage) not in (plain_kind, kind):
        raise UnsupportedError(
            f"compact: expected a {plain_kind.__name__}, got the derived class {type(storage).__name__}; leave out "
            "compact"
        )
    storage.__class__ = kind
    storage.compact = Compact() if compact is True else compact  # type: ignore[attr-defined]
