"""What a tensor storage holds once it has a schema: the records' format, and the columns that hold them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gleanrl.data.replay_buffers.storages.columns import ParentsColumns, column_store
from gleanrl.data.replay_buffers.storages.memory import Allocator
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.stored import StoredSchema
from gleanrl.data.rows import take_rows
from gleanrl.system.forks import renew_in_child
from gleanrl.tree import Path


class Table:
    """Rows of records in columns; it knows nothing of time steps and generations.

    Args:
        form: how records look.
        num_rows: its size.
        allocate: where the columns come from.

    Raises:
        CapacityError: too little memory or disk.
    """

    def __init__(self, form: RecordFormat, num_rows: int, allocate: Allocator) -> None:
        self.form = form
        self.stored = StoredSchema(form.schema)
        columns = allocate(self.stored.paths, self.stored.fields, num_rows)
        self.columns = column_store(self.stored.fields, columns, allocate.exclusive)
        self.device = columns[0].device
        """Where the columns are, with its number: ``cuda:0``."""
        self.mask: torch.Tensor | None = None
        """Which rows are steps, ``(num_rows,)`` bool, all columns' rows; None while all are."""
        self._all = self.stored.wanted()
        if allocate.shared:
            renew_in_child(self)
        self._undo = weakref.finalize(self, allocate.discard)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Leave the columns to the parent."""
        self.columns = ParentsColumns(self.columns.fields, self.columns.columns)
        self._undo.detach()

    def keep(self) -> None:
        """Say that the table is used: files that nobody took into use are removed."""
        self._undo.detach()

    def watch_mask(self, leaves: Sequence[torch.Tensor] | None = None) -> None:
        """Look at the mask from now on, if there is one: if rows of `leaves` are no steps, or at once for None."""
        mask = self.form.mask
        if mask is not None and self.mask is None and (leaves is None or not leaves[mask].all()):
            self.mask = self.columns.columns[self.stored.sources[mask].column].view(-1)

    def ready(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is copied into the columns, of leaves in the format's order."""
        return self.columns.ready(self.stored.to_store(leaves))

    def pick(self, rows: list[torch.Tensor], positions: torch.Tensor) -> list[torch.Tensor]:
        """Return some of ready rows, by their positions, ``(n,)`` int64."""
        # A single record comes without its time dimension.
        many = [
            leaf if leaf.ndim > len(field.shape) else leaf.unsqueeze(0)
            for leaf, field in zip(rows, self.columns.fields, strict=True)
        ]
        return [take_rows(leaf, 1, positions) for leaf in many]

    def fetch(self, slots: torch.Tensor, lead: torch.Size, paths: tuple[Path, ...] | None = None) -> Any:
        """Return the records in `slots`, ``(n,)`` int64, as ``[*lead]`` with n elements, in fresh memory."""
        if paths is None:
            form, leaves = self.form, self.columns.gather((slots,), self._all)
        else:
            form, leaves = self.form.narrow(paths), self.columns.gather((slots,), self.stored.wanted(paths))
        if len(lead) != 1:
            leaves = [leaf.view(*lead, *leaf.shape[1:]) for leaf in leaves]
        return form.build(leaves, lead, self.device)

    def view(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> Any:
        """Return a live view of the first rows, seen as ``[*lead]``, at a basic index of `lead`."""
        leaves = self.columns.views(lead, index)
        # The selection's shape, from a tensor of no memory.
        shape = torch.empty(1, device="cpu").expand(lead)[index].shape if index else lead
        return self.form.build(leaves, shape, self.device)

    def column(self, path: Path) -> torch.Tensor:
        """Return a live view of the column at `path`, ``[num_rows, *field]``."""
        return self.columns.view(self.stored.column_of(path))

    def copy_rows(self, to: Sequence[torch.Tensor], start: int, stop: int) -> None:
        """Copy rows ``[start, stop)`` of all columns to the same rows of others, one for each column."""
        for column, target in zip(self.columns.columns, to, strict=True):
            target[start:stop].copy_(column[start:stop])

    def take(self, columns: Sequence[torch.Tensor]) -> None:
        """Copy other columns' rows, ``[rows, *field]``, to the first rows."""
        for column, source in zip(self.columns.columns, columns, strict=True):
            column[: source.shape[0]].copy_(source)
        self.watch_mask(columns)
