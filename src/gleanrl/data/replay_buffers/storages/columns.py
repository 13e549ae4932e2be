"""Columns: the memory of a tensor storage, one tensor per leaf, and the ways in and out of it.

Rows are slots with time and batch dimensions flattened. On the CPU the native core copies all leaves in one
call (`host_columns.py`); on other devices torch does it leaf by leaf.

The stored schema: which column holds each leaf of a record.

Columns on the CPU: the native core reads and writes them.

The core knows addresses, and torch moves memory in place: `share_memory_`, `resize_` and a multiprocessing queue
give a tensor's storage (and so every tensor that shares it) other memory and free the old one. Memory of our own
therefore never moves, because nobody else gets a tensor of its storage: views have storages of their own over the same
memory, and moving a view copies it. Of tensors that the user gave, the address is looked at before every use.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.devices import StreamOrder
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import Columns as NativeColumns
from gleanrl._arrays.native import TensorColumns
from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.sample_tensors import Made, maker
from gleanrl._arrays.schema import Field, Schema, numpy_twin, numpy_view
from gleanrl._arrays.tensordicts import Path
from gleanrl.data.replay_buffers.storages.record_format import in_memory
from gleanrl.errors import SchemaError, UnsupportedError


class ColumnSource(NamedTuple):
    """Where a leaf is read: a column, at the rows of one of the index arrays that a fetch is made with."""

    column: int
    """Position of the column."""
    array: int = 0
    """Which index array; 0 for the slots themselves."""


Sources: TypeAlias = tuple[ColumnSource, ...]


class StoredSchema:
    """The leaves of records, and the columns that hold them: mostly a column for each leaf, in the same order.

    Leaves that would hold the same values in other rows (an observation and the one after it) can share a column: each
    is read at an index array of its own, all by one call of the native core. What is stored is the leaf that is
    read at the slots themselves.

    Args:
        schema: the leaves.
        sources: where each leaf is read; None for a column for each.

    Raises:
        SchemaError: columns aren't numbered from 0 without a gap, or one isn't read at the slots by any leaf.
    """

    def __init__(self, schema: Schema, sources: Sequence[ColumnSource] | None = None) -> None:
        self.schema = schema
        own = tuple(ColumnSource(position) for position in range(len(schema)))
        self.sources: Sources = own if sources is None else tuple(sources)
        self.is_plain = self.sources == own
        """Whether there is a column for each leaf, in the same order."""
        holders = {
            source.column: leaf for leaf, source in reversed([*enumerate(self.sources)]) if not source.array
        }
        columns = {source.column for source in self.sources}
        if columns != set(range(len(columns))) or columns != holders.keys():
            raise SchemaError(
                f"sources: every column from 0 on is read at the slots by one leaf, got {self.sources}"
            )
        self._holders = tuple(holders[column] for column in range(len(columns)))
        self.paths = tuple(schema.paths[leaf] for leaf in self._holders)
        """The columns' names."""
        self.fields = tuple(schema.fields[leaf] for leaf in self._holders)
        """The columns' rows."""

    def to_store(self, leaves: list[Leaf]) -> list[Leaf]:
        """Return what goes into the columns, of leaves in the schema's order; the very list if it `is_plain`."""
        return leaves if self.is_plain else [leaves[leaf] for leaf in self._holders]

    def column_of(self, path: Path) -> int:
        """Return the column that the leaf at `path` is read from (KeyError if there is none)."""
        return self.sources[self.schema.index(path)].column

    def wanted(self, paths: Sequence[Path] | None = None) -> Sources | None:
        """Return where some leaves are read, or all; None for all columns in order."""
        if paths is None:
            return None if self.is_plain else self.sources
        return tuple(self.sources[self.schema.index(path)] for path in paths)


class Lent:
    """What is known of views that were given to others, who may write into them, and nobody notices.

    Attributes:
        count: how often some were given.
        always: whether others hold the memory in any case.
    """

    def __init__(self, always: bool = False) -> None:
        self.count = 0
        self.always = always
        self._views: list[weakref.ref[Any]] = []
        self._most = 64

    def note(self, views: Iterable[Any]) -> None:
        """Note arrays that are given."""
        self.count += 1
        self._views.extend(map(weakref.ref, views))
        if len(self._views) > self._most:
            self._views = [view for view in self._views if view() is not None]
            self._most = max(64, 2 * len(self._views))

    @property
    def alive(self) -> bool:
        """Whether somebody may be holding one."""
        return self.always or any(view() is not None for view in self._views)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle none: they are views of other memory."""
        return {**self.__dict__, "_views": []}


class ColumnStore(ABC):
    """Columns ``[num_rows, *field]``, one for each field, all rows in slot order.

    `gather` may run in any thread beside anything else (rows written meanwhile come out torn: compare
    generations); the writing calls one at a time.

    Args:
        fields: the leaves.
        columns: their memory, contiguous, ``[num_rows, *field]`` each. Kept alive and never replaced, and not for
            handing out (see `views`).
    """

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        self.fields = tuple(fields)
        self.columns = list(columns)
        self.num_rows = columns[0].shape[0]
        self.lent = Lent(always=True)

    @abstractmethod
    def begin(self) -> None:
        """Say that the columns are about to be used past the calls below: see `StreamOrder`."""

    def fits(self, leaves: list[torch.Tensor], lead: torch.Size) -> bool:
        """Return whether `leaves` are known to be ``[*lead, *field]`` of the fields' dtypes, and what `ready` returns.

        Where they are, neither `Schema.check` nor `ready` is asked. False also where nobody can tell, as here.
        """
        return False

    @abstractmethod
    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `leaves` as the copies need them: on the right device, contiguous. May copy.

        Raises:
            RuntimeError: a leaf without memory.
        """

    @abstractmethod
    def part(self, leaves: list[torch.Tensor]) -> None:
        """Put copies in the place of those leaves that are views of these very columns; `write` and `put` do."""

    @abstractmethod
    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy `count` rows of ready leaves to row `start` and the following, around the end."""

    @abstractmethod
    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy ready leaves to `slots`, ``(n,)`` int64; of equal slots the last one wins."""

    @abstractmethod
    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Return rows of columns as fresh contiguous tensors ``[n, *field]``.

        Args:
            indices: index arrays, ``(n,)`` int64 on the CPU, of one length.
            wanted: the leaves, each a column and the index array that it is read at; None for all columns in order at
                the first array.
        """

    def watched(
        self, outcomes: list[int], roots: list[int], flags: list[int]
    ) -> Callable[[int, int, int, list[torch.Tensor]], bytes | None] | None:
        """Return what finds seams in the core (see `Seams.find`), by pairs of columns and those of flags; or None."""
        return None

    def views(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> list[torch.Tensor]:
        """Return live views of the first rows, seen as ``[*lead, *field]``, at a basic index of `lead`."""
        self.begin()
        rows = lead.numel()
        return [column[:rows].view(*lead, *column.shape[1:])[(*index, ...)] for column in self.columns]

    def view(self, position: int) -> torch.Tensor:
        """Return a live view of one column, ``[num_rows, *field]``."""
        self.begin()
        return self.columns[position]


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Stand-ins of dtypes that torch's indexing doesn't know."""


def _indexable(column: torch.Tensor) -> torch.Tensor:
    """Return `column`, or a view of its bits in a dtype that torch can index."""
    twin = _SIGNED.get(column.dtype)
    return column if twin is None else column.view(twin)


class DeviceColumns(ColumnStore):
    """Columns on an accelerator, or on any device that torch knows."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.device = columns[0].device
        self._in_turn = StreamOrder(self.device)

    def begin(self) -> None:
        """Come after what was asked for before."""
        self._in_turn.begin()

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves on the columns' device."""
        return [in_memory(leaf).detach().to(self.device) for leaf in leaves]

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Look at the leaves' torch storages."""
        mine = {column.untyped_storage().data_ptr() for column in self.columns}
        for position, leaf in enumerate(leaves):
            if leaf.untyped_storage().data_ptr() in mine:
                leaves[position] = leaf.clone()

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy at most two ranges per column."""
        self.begin()
        self.part(leaves)
        head = min(count, self.num_rows - start)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            rows = leaf.reshape(count, *field.shape)
            column[start : start + head].copy_(rows[:head])
            if head < count:
                column[: count - head].copy_(rows[head:])

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy with one indexed write per column."""
        self.begin()
        self.part(leaves)
        # On a device the order of equal indices is open: keep the last of each slot.
        last = {slot: position for position, slot in enumerate(slots.tolist())}
        where = torch.tensor(list(last), dtype=torch.int64, device=self.device)
        which = torch.tensor(list(last.values()), dtype=torch.int64, device=self.device)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            rows = leaf.reshape(slots.shape[0], *field.shape)
            _indexable(column)[where] = _indexable(rows)[which]

    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Fetch with one `index_select` per leaf on the device."""
        self.begin()
        where = [index.to(self.device) for index in indices]
        if wanted is None:
            wanted = tuple(ColumnSource(number) for number in range(len(self.columns)))
        found = [(self.columns[column], where[array]) for column, array in wanted]
        return [_indexable(column).index_select(0, rows).view(column.dtype) for column, rows in found]


class NoColumns(ColumnStore):
    """No column at all: records that are lists, or hold nothing."""

    def __init__(self, num_rows: int) -> None:
        self.fields, self.columns, self.num_rows = (), [], num_rows
        self.lent = Lent()

    def begin(self) -> None:
        """Do nothing."""

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return nothing."""
        return []

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def gather(self, indices: tuple[torch.Tensor, ...], wanted: Sources | None = None) -> list[torch.Tensor]:
        """Return nothing."""
        return []


def plain(leaf: Leaf, device: torch.device) -> Leaf:
    """Return `leaf` on `device`, contiguous, with lazy conjugations and negations carried out."""
    if isinstance(leaf, ObjectColumn):
        return leaf.on(device)
    return leaf.detach().to(device).resolve_conj().resolve_neg().contiguous()


def apart(columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous `columns`, with copies of those that lie in another one's memory.

    What is written into one column must not show in another.
    """
    found = list(columns)
    end = 0
    for position in sorted(range(len(found)), key=lambda position: found[position].data_ptr()):
        start = found[position].data_ptr()
        if start < end and found[position].nbytes:
            found[position] = found[position].clone()
        else:
            end = max(end, start + found[position].nbytes)
    return found


_CPU = torch.device("cpu")
_PLANS = 64  # batch sizes whose allocations are remembered
_MAY_BE_LAZY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dlpack::is_float knows, too

_address = torch.Tensor.data_ptr


class CopyPlan(NamedTuple):
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
        self._plans: dict[tuple[int, Sources | None], CopyPlan] = {}
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

    def _plan(self, count: int, wanted: Sources | None) -> CopyPlan:
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        fields = self.fields if wanted is None else [self.fields[source.column] for source in wanted]
        make = maker([((count, *field.shape), field.dtype) for field in fields], self._pool)
        columns = None if wanted is None else [source.column for source in wanted]
        read = [source.array for source in wanted or ()]
        plan = CopyPlan(make, columns, read if any(read) else None)
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
