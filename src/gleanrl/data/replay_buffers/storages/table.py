"""The content of a tensor storage with a schema: the records' format, and the columns that hold the records."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.schema import Field, new_column
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._os.interrupts import renew_in_child
from gleanrl.data.replay_buffers.storages.allocators import Allocator, ExistingColumns
from gleanrl.data.replay_buffers.storages.columns import ColumnStore, column_store
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.seams import Seams
from gleanrl.data.trajectories import take_rows
from gleanrl.errors import UnsupportedError

_CPU = torch.device("cpu")
StoreMaker: TypeAlias = Callable[[Allocator, Sequence[Path], Sequence[Field], int], ColumnStore]


class Table:
    """Rows of records in columns. A table knows nothing of time steps and generations.

    Args:
        form: the format of the records.
        num_rows: the number of rows.
        allocate: makes the columns.
        device: the device of tensors in lists, if there are no columns; otherwise they are on the columns' device.
        store: makes the columns by the allocator and returns their store.

    Raises:
        CapacityError: there is too little memory or disk space.
    """

    def __init__(
        self,
        form: RecordFormat,
        num_rows: int,
        allocate: Allocator,
        device: torch.device = _CPU,
        store: StoreMaker = column_store,
    ) -> None:
        self.form = form
        self.build = form.builder()
        """Makes records from leaves, a batch size and a device."""
        self._allocate = allocate
        dense = {path: field for path, field in form.schema.items().items() if not field.is_list}
        self.columns = store(allocate, [*dense], [*dense.values()], num_rows)
        self.device = self.columns.columns[0].device if self.columns.columns else device
        """The device of the columns, with its index: ``cuda:0``."""
        self.lists: dict[Path, ObjectColumn] = dict(
            zip(
                form.schema.lists,
                allocate.lists or [new_column((num_rows,), form.schema[path]) for path in form.schema.lists],
                strict=True,
            )
        )
        """The leaves that tensor columns can't hold, by path: ``[num_rows, *field]`` objects each."""
        self.mask: torch.Tensor | None = None
        """Which rows are steps, ``(num_rows,)`` bool; None while all rows are steps."""
        self.shared = allocate.shared
        """Whether a forked child would write into the same columns."""
        # Seams compare a written leaf with the column at the same position.
        seams = None if self.lists else Seams.of(form.schema, self.columns)
        self.find_seams = None if seams is None else seams.find
        """Finds seams between writes; None if the schema allows no comparison."""
        if allocate.shared:
            renew_in_child(self)  # a child must not write into columns that it shares with its parent
        # A table that is dropped before use, for example by a failed load, must leave no files. `keep` cancels this.
        self._undo = weakref.finalize(self, allocate.discard)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Make the columns read-only in a forked child, and leave their files to the parent."""
        if self.columns.columns:
            self.columns = self.columns.of_parent()
        self._undo.detach()

    def widened(self, form: RecordFormat, allocate: Allocator) -> Table:
        """Return a table with these columns and the additional ones of `form`, a wider format. New columns are zero.

        Raises:
            CapacityError: there is too little memory or disk space.
            UnsupportedError: a file of a new column exists already (see `FileAllocator`), or the columns are compact.
        """
        rows, schema = self.columns.num_rows, form.schema
        if not self.columns.can_widen:  # readers that hold no lock would still use the old columns
            raise UnsupportedError(
                "a compact storage can't get new keys after the first write; write the keys with the first records, or "
                "build the storage without compact"
            )
        new = schema.paths[len(self.form.schema) :]
        dense = [path for path in new if path not in schema.lists]
        columns = allocate(dense, [schema[path] for path in dense], rows) if dense else []
        lists = [new_column((rows,), schema[path]) for path in new if path in schema.lists]
        both = [*self.columns.columns, *columns, *self.lists.values(), *lists]
        exclusive = self._allocate.exclusive and allocate.exclusive
        existing = ExistingColumns(both, exclusive, self.shared or allocate.shared)
        table = Table(form, rows, existing, self.device)
        table.mask = self.mask
        if self.form.mask is None:
            table.watch_mask()  # a new mask column is False in all rows that were written before
        table.columns.live_views = self.columns.live_views  # handed-out views show the new table's memory too
        return table

    def first_rows(self, count: int) -> ExistingColumns:
        """Return columns for another table that shares the memory of the first `count` rows."""
        lists = [objects[:count] for objects in self.lists.values()]
        columns = [*self.columns.views(torch.Size([count])), *lists]
        return ExistingColumns(columns, self._allocate.exclusive, self.shared)

    def settle(self, rows: Sequence[Leaf]) -> None:
        """Move the columns to the place of the table that this one replaces (see `Allocator.settle`).

        Args:
            rows: the rows that this table already holds. If some are padding, the mask is used from now on.
        """
        self._allocate.settle()
        self.watch_mask(rows)

    def discard(self) -> None:
        """Remove the files of a table that won't be used."""
        self._undo()

    def keep(self) -> None:
        """Mark the table as used. The files of an unused table are removed when the table is deleted."""
        self._undo.detach()

    def watch_mask(self, leaves: Sequence[torch.Tensor] | None = None) -> None:
        """Use the mask column from now on if some rows in `leaves` aren't steps, or in any case if `leaves` is None."""
        mask = self.form.mask
        if mask is not None and self.mask is None and (leaves is None or not leaves[mask].all()):
            self.mask = self.all[mask].view(-1)

    @property
    def all(self) -> list[Leaf]:
        """Columns and lists, in the schema's order."""
        self.columns.begin()
        columns = iter(self.columns.columns)
        return [self.lists[path] if path in self.lists else next(columns) for path in self.form.schema.paths]

    def ready(self, leaves: list[Leaf]) -> list[Leaf]:
        """Return the rows to copy into columns and lists, in the schema's order, from leaves in the same order."""
        if not self.lists:
            return self.columns.ready(leaves)
        dense = iter(self.columns.ready([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        return [leaf.on(self.device) if isinstance(leaf, ObjectColumn) else next(dense) for leaf in leaves]

    def write(self, rows: list[Leaf], skipped: int, start: int, count: int) -> None:
        """Copy ready rows, without the first `skipped` ones, to `count` rows from `start` on, around the end."""
        columns = self.columns
        dense, lists = self._parted(rows)
        if skipped:
            columns.part(dense)
            dense, lists = ([leaf[skipped:] for leaf in leaves] for leaves in (dense, lists))
        columns.write(start, count, dense)
        head = min(count, columns.num_rows - start)
        for objects, leaf in zip(self.lists.values(), lists, strict=True):
            values = leaf.reshape(-1, *objects.shape[1:])
            objects[start : start + head].copy_(values[:head])
            objects[: count - head].copy_(values[head:count])

    def put(self, rows: list[Leaf], slots: torch.Tensor) -> None:
        """Copy ready rows to `slots`, ``(n,)`` int64. If a slot occurs twice, the last row is kept."""
        dense, lists = self._parted(rows)
        self.columns.put(slots, dense)
        for objects, leaf in zip(self.lists.values(), lists, strict=True):
            objects.put(slots, leaf.reshape(-1, *objects.shape[1:]))

    def _parted(self, rows: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        """Return the part of ready rows that goes into columns, and the part that goes into lists."""
        dense = [leaf for leaf in rows if isinstance(leaf, torch.Tensor)]
        return dense, [leaf for leaf in rows if isinstance(leaf, ObjectColumn)]

    def pick(self, rows: list[Leaf], positions: torch.Tensor) -> list[Leaf]:
        """Return a selection of ready rows, by their positions, ``(n,)`` int64."""
        # A single record has no time dimension, so it gets one.
        many = [
            leaf if leaf.ndim > len(field.row_shape) else leaf.unsqueeze(0)
            for leaf, field in zip(rows, self.form.schema.fields, strict=True)
        ]
        return [take_rows(leaf, 1, positions) for leaf in many]

    def fetch(self, slots: torch.Tensor, lead: torch.Size, paths: tuple[Path, ...] | None = None) -> Any:
        """Return the records in `slots`, ``(n,)`` int64, in fresh memory.

        Their batch size is `lead`, which has n elements.
        """
        if self.lists:
            form, leaves = self._fetch_with_lists(slots, paths)
        else:
            form = self.form if paths is None else self.form.narrow(paths)
            index = self.form.schema.index
            leaves = self.columns.gather(slots, None if paths is None else tuple(map(index, paths)))
        if len(lead) != 1:
            leaves = [leaf.reshape(*lead, *leaf.shape[1:]) for leaf in leaves]
        return (self.build if paths is None else form.build)(leaves, lead, self.device)

    def _fetch_with_lists(
        self, slots: torch.Tensor, paths: tuple[Path, ...] | None
    ) -> tuple[RecordFormat, list[Leaf]]:
        form = self.form if paths is None else self.form.narrow(paths)
        wanted = tuple(self._number(path) for path in form.schema.paths if path not in self.lists)
        columns = iter(self.columns.gather(slots, wanted) if wanted else ())
        return form, [
            self.lists[path].take(slots) if path in self.lists else next(columns)
            for path in form.schema.paths
        ]

    def _number(self, path: Path) -> int:
        """Return the position of the leaf at `path` among the columns, without counting lists."""
        position = self.form.schema.index(path)
        return position - sum(own in self.lists for own in self.form.schema.paths[:position])

    def view(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> Any:
        """Return a live view of the first rows in the shape ``[*lead]``, at a basic index of `lead`."""
        leaves: list[Leaf] = self.columns.views(lead, index)
        if self.lists:
            views, rows = iter(leaves), lead.numel()
            seen = {p: o[:rows].reshape(*lead, *o.shape[1:])[(*index, ...)] for p, o in self.lists.items()}
            leaves = [seen[path] if path in seen else next(views) for path in self.form.schema.paths]
        # Index an expanded tensor, which takes no memory, to get the selection's shape.
        shape = torch.empty(1, device="cpu").expand(lead)[index].shape if index else lead
        return self.form.build(leaves, shape, self.device)

    def column(self, path: Path) -> torch.Tensor:
        """Return a live view of the column at `path`, ``[num_rows, *field]``.

        Raises:
            UnsupportedError: the leaf is a list.
            KeyError: no leaf has this path.
        """
        if path in self.lists:
            raise UnsupportedError(f"key {as_key(path)!r} isn't a tensor of one shape, it has no column")
        return self.columns.view(self._number(path))

    def list_references(self, rows: int) -> list[tuple[int, ObjectColumn]]:
        """Return the objects in the first rows of each list, and the list's position in `all`."""
        return [
            (position, ObjectColumn(self.lists[path].array[:rows].copy(), self.lists[path].blank))
            for position, path in enumerate(self.form.schema.paths)
            if path in self.lists
        ]

    def take(self, columns: Sequence[Leaf]) -> None:
        """Copy the rows of other columns, ``[rows, *field]``, to the first rows; use the mask if some are padding."""
        dense, lists = self._parted(list(columns))
        self.columns.take(dense)
        for objects, source in zip(self.lists.values(), lists, strict=True):
            objects[: source.shape[0]].copy_(source)
        self.watch_mask(columns)
