"""Columns on the CPU: the native core reads and writes them.

The core knows addresses, and torch moves memory in place: `share_memory_`, `resize_` and a multiprocessing queue
give a tensor's storage (and so every tensor that shares it) other memory and free the old one. Memory of our own
therefore never moves, because nobody else gets a tensor of its storage: views have storages of their own over the same
memory, and moving a view copies it. Of tensors that the user gave, the address is looked at before every use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gleanrl.data.replay_buffers.storages.columns import ColumnStore, DeviceColumns, Lent, NoColumns, plain
from gleanrl.data.replay_buffers.storages.record_format import in_memory
from gleanrl.data.replay_buffers.storages.stored import Sources
from gleanrl.errors import SchemaError, UnsupportedError
from gleanrl.exchange import EXCHANGE
from gleanrl.fresh import Made, maker
from gleanrl.native import Columns as NativeColumns
from gleanrl.native import TensorColumns
from gleanrl.pool import BufferPool
from gleanrl.schema import Field, numpy_twin, numpy_view

_CPU = torch.device("cpu")
_PLANS = 64  # batch sizes whose allocations are remembered
_MAY_BE_LAZY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dlpack::is_float knows, too

_address = torch.Tensor.data_ptr


class Plan(NamedTuple):
    """How a batch is fetched."""

    make: Callable[[], Made]
    """Makes the leaves' tensors."""
    columns: list[int] | None
    """The leaves' columns; None for all in order."""
    arrays_read: list[int] | None
    """The leaves' index arrays; None where all are read at the first."""


class HostColumns(ColumnStore):
    """Columns in the CPU's memory or in mapped files."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self._register()
        self._lazy = [
            dtype in _MAY_BE_LAZY or dtype.is_complex for dtype in (field.dtype for field in fields)
        ]
        self._plans: dict[tuple[int, Sources | None], Plan] = {}
        self._pool = BufferPool()

    def begin(self) -> None:
        """Do nothing: the processor has one order."""

    def _register(self) -> None:
        """Tell the core where the columns are."""
        starts = [column.data_ptr() for column in self.columns]
        self._native = NativeColumns(starts, [field.row_bytes for field in self.fields], self.num_rows)
        self._ranges = [
            (start, start + column.nbytes) for start, column in zip(starts, self.columns, strict=True)
        ]
        self._low = min(starts)
        self._high = max(high for _, high in self._ranges)

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous CPU leaves, with lazy conjugations and negations carried out."""
        found = list(leaves)
        for position, (leaf, lazy) in enumerate(zip(leaves, self._lazy, strict=True)):
            in_memory(leaf)
            if not (leaf.is_cpu and leaf.is_contiguous()) or (lazy and (leaf.is_neg() or leaf.is_conj())):
                found[position] = plain(leaf, _CPU)
        return found

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy with at most two memory moves per column."""
        self._native.write(start, count, self._sources(leaves))

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy row by row in the order of `slots`."""
        self._native.put(slots.data_ptr(), slots.shape[0], self._sources(leaves))

    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Fetch all leaves in one native call, the interpreter lock released."""
        count = indices[0].shape[0]
        plan = self._plans.get((count, wanted)) or self._plan(count, wanted)
        leaves, to = plan.make()
        if plan.arrays_read is None:
            self._native.gather(indices[0].data_ptr(), count, to, plan.columns)
        else:
            at = [index.data_ptr() for index in indices]
            self._native.gather_at(at, count, to, plan.columns or (), plan.arrays_read)
        return leaves

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Look at the leaves' addresses."""
        self._sources(leaves)

    def _sources(self, leaves: list[torch.Tensor]) -> list[int]:
        """Return the leaves' addresses, after a `part`."""
        low, high = self._low, self._high
        addresses = list(map(_address, leaves))
        for position, address in enumerate(addresses):
            if low <= address < high and any(first <= address < last for first, last in self._ranges):
                # `leaves` keeps the copy alive until the caller's copy is done, and for doing that again.
                leaves[position] = _copied(leaves[position])
                addresses[position] = leaves[position].data_ptr()
        return addresses

    def _plan(self, count: int, wanted: Sources | None) -> Plan:
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        fields = self.fields if wanted is None else [self.fields[source.column] for source in wanted]
        make = maker([((count, *field.shape), field.dtype) for field in fields], self._pool)
        columns = None if wanted is None else [source.column for source in wanted]
        read = [source.array for source in wanted or ()]
        plan = Plan(make, columns, read if any(read) else None)
        self._plans[count, wanted] = plan
        return plan


class OwnColumns(HostColumns):
    """Columns in torch storages that nobody else holds: they never move."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.lent = Lent()
        self._arrays = [numpy_view(column) for column in columns]
        self._by_core = _written_by_core(self.columns)

    def fits(self, leaves: list[torch.Tensor], lead: torch.Size) -> bool:
        """Have the core look at them."""
        return self._by_core is not None and self._by_core.fits(leaves, lead)

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Have the core ask for the leaves' addresses, if it can."""
        if self._by_core is None or not self._by_core.write(start, count, leaves):
            super().write(start, count, leaves)

    def watched(
        self, outcomes: list[int], roots: list[int], flags: list[int]
    ) -> Callable[[int, int, int, list[torch.Tensor]], bytes | None] | None:
        """Have the core look, if it sees these columns."""
        if self._by_core is None:
            return None
        self._by_core.watch(outcomes, roots, flags)
        return self._by_core.seams

    def views(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> list[torch.Tensor]:
        """Return live views in torch storages of their own, which hold no more than they show."""
        rows = lead.numel()
        arrays = [array[:rows].reshape(*lead, *array.shape[1:])[(*index, ...)] for array in self._arrays]
        self.lent.note(arrays)
        return [torch.from_numpy(array).view(f.dtype) for array, f in zip(arrays, self.fields, strict=True)]

    def view(self, position: int) -> torch.Tensor:
        """Return a live view in a torch storage of its own, for reading."""
        return torch.from_numpy(self._arrays[position]).view(self.fields[position].dtype)


def _copied(leaf: torch.Tensor) -> torch.Tensor:
    """Return a copy of a contiguous tensor, also of dtypes that torch doesn't copy."""
    return leaf.view(numpy_twin(leaf.dtype)).clone().view(leaf.dtype)


def _written_by_core(columns: list[torch.Tensor]) -> TensorColumns | None:
    """Return what writes tensors without their being asked in Python; None if the core can't see these columns."""
    if EXCHANGE is None or any(column.is_complex() for column in columns):  # these may be conjugated
        return None
    try:
        return TensorColumns(EXCHANGE, torch.Tensor, columns)
    except RuntimeError:  # a dtype that torch doesn't show
        return None


class BorrowedColumns(HostColumns):
    """Columns in tensors that the user holds as well and may move; views share their storages, and move along.

    Moving them while another thread reads or writes the storage is the user's race, as with any tensor.
    """

    def _register(self) -> None:
        self._memory = [column.untyped_storage() for column in self.columns]
        seen = self._look()
        for position, (column, memory) in enumerate(zip(self.columns, self._memory, strict=True)):
            needed = column.storage_offset() * column.itemsize + column.nbytes
            if memory.nbytes() < needed:
                raise SchemaError(
                    f"column {position}: the tensor given to the storage was resized to {memory.nbytes()} bytes, its "
                    f"records take {needed}; resize a clone instead"
                )
        super()._register()
        self._seen = seen

    def _look(self) -> list[tuple[int, int]]:
        """Return where the tensors are and how large."""
        return [(memory.data_ptr(), memory.nbytes()) for memory in self._memory]

    def _follow(self) -> None:
        if self._look() != self._seen:
            self._register()

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves, after a look at the columns: what is wrong shows before anything changes."""
        self._follow()
        return super().ready(leaves)

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy to where the columns are."""
        self._follow()
        super().write(start, count, leaves)

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy to where the columns are."""
        self._follow()
        super().put(slots, leaves)

    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Fetch from where the columns are."""
        self._follow()
        return super().gather(indices, wanted)


class ParentsColumns(OwnColumns):
    """Mapped columns of the process that this one was forked from: they are read, and views are copies."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.lent = Lent(always=True)  # the parent writes
        self._by_core = None  # `ready` is asked, and raises

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Raise: nothing is to be written."""
        raise UnsupportedError(
            "these memory-mapped files belong to the process that this one was forked from: a write here would change "
            "its records behind its back; make the buffer with shared=True, or send the records to the parent"
        )

    def views(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> list[torch.Tensor]:
        """Return copies."""
        return [view.clone() for view in super().views(lead, index)]


def column_store(
    fields: Sequence[Field], columns: Sequence[torch.Tensor], exclusive: bool, num_rows: int
) -> ColumnStore:
    """Return the store for columns on the CPU or on another device.

    Args:
        fields: the leaves.
        columns: see `ColumnStore`.
        exclusive: whether nobody else holds a tensor of the columns' storages.
        num_rows: of each column.
    """
    if not columns:
        return NoColumns(num_rows)
    if not columns[0].is_cpu:
        return DeviceColumns(fields, columns)
    return OwnColumns(fields, columns) if exclusive else BorrowedColumns(fields, columns)
