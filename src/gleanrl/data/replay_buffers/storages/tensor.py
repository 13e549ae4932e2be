"""Tensor storages: one column per leaf, all leaves of many records fetched in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch.utils import _pytree

from gleanrl.arguments import positive
from gleanrl.data.replay_buffers.storages.base import count_all_as_written
from gleanrl.data.replay_buffers.storages.columns import apart
from gleanrl.data.replay_buffers.storages.direct import Prepared
from gleanrl.data.replay_buffers.storages.formats import (
    check_all_storable,
    find_format,
    stack_records,
    swap_batch_dims,
)
from gleanrl.data.replay_buffers.storages.indexing import basic_index, column_of, is_key, slots_at
from gleanrl.data.replay_buffers.storages.memory import GivenColumns, HeapAllocator
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat, in_memory
from gleanrl.data.replay_buffers.storages.table import Table
from gleanrl.data.replay_buffers.storages.tabled import TabledStorage, first_table, table_of
from gleanrl.data.replay_buffers.storages.tree_format import as_tensor
from gleanrl.data.rows import take_rows
from gleanrl.devices import device_of, usable_device
from gleanrl.errors import GleanError, IndexRangeError, InvalidArgumentError, SchemaError
from gleanrl.objects import Objects
from gleanrl.records import new_tuple
from gleanrl.tree import NestedKey, Path, as_key


class TensorStorage(TabledStorage):
    """Records of tensors: TensorDicts, single tensors, or dictionaries, lists and tuples of tensors.

    The first write fixes keys, shapes and dtypes and takes the memory; every later write must match exactly
    (only the device may differ). Columns are ``[steps, *batch, *leaf]``, zero where nothing was written yet.

    Memory: the columns and 8 bytes for each row (its generation).

    Threads: see `Storage`. `fetch` may run beside a write; the rows that the write touches come out torn, and
    their generations say so.

    Args:
        storage: records ``[steps, *batch]`` to wrap, all of which count as stored. Contiguous tensors on
            `device` are used without a copy; others, and tensors that share memory, are copied. The first
            write makes the columns of a TensorDict without entries: they are zero in its other records.
        max_size: their number, if you want it checked.
        device: where the records are kept and come back; ``"auto"`` for the device of the data.
        ndim: leading batch dimensions of the data that are slots; the first is time.
        compilable: has no effect, see `ListStorage`.

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
        place = device_of(leaves) if device == "auto" else usable_device(device)
        rows = [leaf.detach().to(place).contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        columns = [row.view(lead.numel(), *row.shape[ndim:]) for row in rows]
        lists = [objects.on(place) for objects in leaves if isinstance(objects, Objects)]
        flat = [objects.reshape(lead.numel(), *objects.shape[ndim:]) for objects in lists]
        self._wrap(form, lead, GivenColumns([*apart(columns), *flat]), place)

    def _wrap(self, form: RecordFormat, lead: torch.Size, given: GivenColumns, device: torch.device) -> None:
        """Set up a storage that is full of `given` columns' records ``[*lead]``."""
        super().__init__(lead.numel(), given, device, len(lead))
        self._check_batch(lead[1:], lead[0], "storage")
        table, _ = first_table(self, form, lead[1:], ())
        self.allocator = HeapAllocator(self.device)  # for later columns: these ones are somebody's
        count_all_as_written(self, lead[0])
        table.watch_mask(given.columns)

    @property
    def _storage(self) -> Any:
        """All slots as one live view, ``[capacity_steps, *batch]``; None before the first write."""
        return None if self._table is None else self._view(self._table, (), self.capacity_steps)

    def _flattened(self) -> TensorStorage:
        """Return the stored part as a storage with one batch dimension; the columns are shared."""
        table, count = table_of(self), len(self)
        flat = TensorStorage.__new__(TensorStorage)
        flat._wrap(table.form, torch.Size([count]), table.first_rows(count), self.device)
        return flat

    # Writing

    def join(self, records: list[Any], where: str) -> Any:
        """Return single records as one batch, time first; `SchemaError` if their structures differ."""
        return stack_records(records, where)

    def prepare(self, data: Any, *, single: bool, dim_extend: int, where: str) -> Prepared:
        """Check keys, shapes and dtypes of `data` (see `Storage.prepare`)."""
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
                form, (lead, leaves) = wider, wider.read(data, dims, where)
            widens = table is not None and form is not table.form
            is_ready = (
                table is not None and table.is_plain and not widens and table.columns.fits(leaves, lead)
            )
            if not is_ready:
                self._check(form, data, leaves, lead, where)
            if dim_extend and not single:
                is_ready = False  # not in one piece any more
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
                    kept = steps.clone()  # it may stand in a row that is written over
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
            check_all_storable(data, where)
            raise

    def _check(self, form: RecordFormat, data: Any, leaves: list[Any], lead: torch.Size, where: str) -> None:
        """Raise `SchemaError` unless leaves are of the schema; of rows that hold several steps the error tells more."""
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
        if self._table is not None:  # the schema says
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
                raise SchemaError(f"{where}: the batch dimensions {tuple(batch)} hold no transition")
        elif batch != self.batch_shape:
            raise SchemaError(
                f"{where}: expected batch dimensions [time, {', '.join(map(str, self.batch_shape))}], got "
                f"{[num_steps, *batch]}; the first write fixed them"
            )
        if num_steps == 0:
            raise SchemaError(f"{where}: got no record at all; write at least one")

    def _copy_span(self, rows: list[torch.Tensor], skipped: int, start: int, count: int) -> None:
        per_step, table = self.rows_per_step, self._table or table_of(self)
        if table.is_plain and not skipped:
            table.columns.write(start * per_step, count * per_step, rows)
        else:
            table.write(rows, skipped, start * per_step, count * per_step)

    def _copy_slots(self, rows: list[torch.Tensor], slots: torch.Tensor) -> None:
        table_of(self).put(rows, slots)

    def _pick(self, rows: list[torch.Tensor], positions: torch.Tensor) -> list[torch.Tensor]:
        return table_of(self).pick(rows, positions)

    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Check records that are to go to a selection of slots ``[*shape]``.

        They are ``[*shape]``, or have its last dimensions only: then each of the first ones gets the same.
        """
        try:
            table = table_of(self)
            data = _repeated(data, shape, table.form.item_shape)
            try:
                lead, leaves = table.form.read(data, len(shape), where)
            except SchemaError:
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

    # Reading

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> Any:
        """Return the records in `slots`, whole or with some columns only, on the storage's device."""
        table, lead = self._table or table_of(self), slots.shape
        if paths is None and table.is_plain:
            return table.build(table.columns.gather((slots,)), lead, table.device)
        return table.fetch(slots, lead, paths)

    def fetch_again(
        self, records: Any, slots: torch.Tensor, renewed: torch.Tensor, paths: tuple[Path, ...] | None = None
    ) -> Any:
        """Return the records in `slots`; tensors and TensorDicts have the renewed ones laid over those before."""
        if not isinstance(records, torch.Tensor | TensorDict) or table_of(self).lists:
            return self.fetch(slots, paths)
        rows = renewed.nonzero().squeeze(1)
        records[rows] = self.fetch(slots[rows], paths)
        return records

    def columns_of(self, keys: Iterable[NestedKey]) -> tuple[Path, ...]:
        """Return the columns that `keys` name (see `Storage.columns_of`)."""
        return self.format.select(keys)

    def column(self, path: Path) -> torch.Tensor:
        """Return the live column at `path` for reading, every slot of it: ``[num_slots, *field]``."""
        return table_of(self).column(path)

    def get(self, index: Any) -> Any:
        """Return records of the visible part ``[steps, *batch]``, or a column of all of it at a key.

        Ints, slices and tuples of them give live views: writing into them writes the storage, and a later
        write shows in them. Lists, tensors and masks give copies.

        Raises:
            IndexRangeError: outside the stored part.
            MissingKeyError: a key that isn't stored.
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
                    f"a view can't run backwards (step {part.step}); use a list of positions"
                )
        return table.view(torch.Size((num_steps, *self.batch_shape)), index)

    @property
    def has_mask(self) -> bool:
        """Whether a mask is stored that tells steps from other rows."""
        return self._table is not None and self._table.mask is not None

    def masked(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return which of `slots` hold rows that are no steps (``("collector", "mask")`` is False there)."""
        mask = None if self._table is None else self._table.mask
        return None if mask is None else ~mask[slots.to(mask.device)].cpu()

    def check_valid(self) -> None:
        """Raise AssertionError if the storage's books don't agree; for tests."""
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
        """Show class, size and schema."""
        schema = "no schema yet" if self._table is None else repr(self._table.form.schema)
        return f"{type(self).__name__}({len(self)} of {self.max_size} rows, {schema})"


def _repeated(data: Any, shape: torch.Size, item_shape: torch.Size) -> Any:
    """Return a TensorDict ``[*shape[n:], *item_shape]`` as ``[*shape, *item_shape]``, anything else unchanged."""
    if not isinstance(data, TensorDictBase):
        return data
    missing = len(shape) + len(item_shape) - data.ndim
    whole = torch.Size((*shape, *item_shape))
    if not 0 < missing < len(shape) or data.batch_size != whole[missing:]:
        return data
    return data.expand(whole)
