"""Columns: the memory of a tensor storage, with one tensor for each leaf, and the ways to read and write it.

A row of a column is a slot, with time and batch dimensions flattened. On the CPU one call of the native core copies the
rows of all leaves. On other devices torch copies leaf by leaf.

The core works with addresses, but torch can move memory. `share_memory_`, `resize_` and multiprocessing queues give a
torch storage, and all tensors over it, new memory and free the old one. Two rules keep the addresses valid:

- The library's own columns (`OwnColumns`) never move, because only the storage holds tensors over their torch storages.
  Users get views with separate torch storages over the same memory. Moving such a view copies it.
- The user's own tensors (`UserColumns`) may move, so their addresses are checked before every use.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.devices import StreamOrder
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import Columns as NativeColumns
from gleanrl._arrays.native import TensorColumns
from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.sample_tensors import Made, maker
from gleanrl._arrays.schema import Field, numpy_twin, numpy_view
from gleanrl._arrays.tensordicts import Path
from gleanrl.data.replay_buffers.storages.allocators import Allocator
from gleanrl.data.replay_buffers.storages.record_format import in_memory
from gleanrl.errors import SchemaError, UnsupportedError


class LiveViews:
    """Keeps track of live views that users hold. A user may write into such a view without the storage's knowledge.

    Attributes:
        count: how often views were handed out.
        always: whether other objects hold the memory in any case, as for the user's own tensors.
    """

    def __init__(self, always: bool = False) -> None:
        self.count = 0
        self.always = always
        self._views: list[weakref.ref[Any]] = []
        self._most = 64

    def note(self, views: Iterable[Any]) -> None:
        """Add arrays that are handed out."""
        self.count += 1
        self._views.extend(map(weakref.ref, views))
        if len(self._views) > self._most:
            self._views = [view for view in self._views if view() is not None]
            self._most = max(64, 2 * len(self._views))

    @property
    def alive(self) -> bool:
        """Whether a user may still hold a view."""
        return self.always or any(view() is not None for view in self._views)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle no views, because they belong to other memory than the copy."""
        return {**self.__dict__, "_views": []}


class ColumnStore(ABC):
    """Columns ``[num_rows, *field]``, one for each field, with rows in the order of slots.

    Any thread may call `gather` at any time. Rows that are written meanwhile come out torn, which the caller detects by
    their generations. Only one thread at a time may write.

    Args:
        fields: the leaves.
        columns: their memory, contiguous, ``[num_rows, *field]`` each. The store keeps these tensors and never replaces
            them. They are never handed to users (see `views`).
    """

    can_widen = True
    """Whether columns can be added to these."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        self.fields = tuple(fields)
        self.columns = list(columns)
        self.num_rows = columns[0].shape[0]
        self.live_views = LiveViews(always=True)

    @abstractmethod
    def begin(self) -> None:
        """Prepare for direct use of the columns, without the methods below: see `StreamOrder`."""

    def fits(self, leaves: list[torch.Tensor], lead: torch.Size) -> bool:
        """Return whether `leaves` are ``[*lead, *field]`` with the fields' dtypes, and need no conversion by `ready`.

        If True, the caller skips `Schema.check` and `ready`. False also means that this class can't tell.
        """
        return False

    @abstractmethod
    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `leaves` in the form that the copy needs: contiguous and on the right device. May copy.

        Raises:
            RuntimeError: a leaf has no memory.
            SchemaError: the user made a tensor under a column too small.
            UnsupportedError: the columns are read-only.
        """

    def check_writable(self) -> None:
        """Raise what `ready` would raise for columns that can't be written."""
        self.ready(self.columns)

    def take(self, columns: Sequence[torch.Tensor]) -> None:
        """Copy the rows of other columns, ``[rows, *field]``, to the first rows."""
        self.begin()
        for column, source in zip(self.columns, columns, strict=True):
            column[: source.shape[0]].copy_(source)

    @abstractmethod
    def part(self, leaves: list[torch.Tensor]) -> None:
        """Replace leaves in the list that are views of these columns by copies; `write` and `put` do this themselves.

        Without the copies, a write could overwrite rows that it has yet to read.
        """

    @abstractmethod
    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy `count` rows of ready leaves to the rows from `start` on, around the end of the columns."""

    @abstractmethod
    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy ready leaves to `slots`, ``(n,)`` int64. If a slot occurs twice, the last row is kept."""

    @abstractmethod
    def gather(self, slots: torch.Tensor, wanted: tuple[int, ...] | None = None) -> list[torch.Tensor]:
        """Return rows of columns as fresh contiguous tensors ``[n, *field]``.

        Args:
            slots: the rows, ``(n,)`` int64 on the CPU.
            wanted: the positions of the columns to return; None for all columns in order.
        """

    def watched(
        self, outcomes: list[int], roots: list[int], flags: list[int]
    ) -> Callable[[int, int, int, list[torch.Tensor]], bytes | None] | None:
        """Return a function of the core that finds seams (see `Seams.find`), or None if the core can't.

        Args:
            outcomes: columns of the outcomes to compare.
            roots: the column of the root for each of them.
            flags: columns of end flags.
        """
        return None

    def of_parent(self) -> ColumnStore:
        """Return the columns for a forked child whose parent keeps writing to them, for reading only."""
        return ParentsColumns(self.fields, self.columns)

    def views(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> list[torch.Tensor]:
        """Return live views of the first rows in the shape ``[*lead, *field]``, at a basic index of `lead`."""
        self.begin()
        rows = lead.numel()
        return [column[:rows].view(*lead, *column.shape[1:])[(*index, ...)] for column in self.columns]

    def view(self, position: int) -> torch.Tensor:
        """Return a live view of one column, ``[num_rows, *field]``."""
        self.begin()
        return self.columns[position]


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed dtypes in place of dtypes that torch can't index."""


def _indexable(column: torch.Tensor) -> torch.Tensor:
    """Return `column`, or a view of its bits in a dtype that torch can index."""
    twin = _SIGNED.get(column.dtype)
    return column if twin is None else column.view(twin)


class DeviceColumns(ColumnStore):
    """Columns on an accelerator, or on any other device that torch supports."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.device = columns[0].device
        self._stream_order = StreamOrder(self.device)

    def begin(self) -> None:
        """Order the next use after all earlier uses, in any stream."""
        self._stream_order.begin()

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves detached and on the columns' device."""
        return [in_memory(leaf).detach().to(self.device) for leaf in leaves]

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Replace leaves in the list that share a torch storage with a column by copies."""
        own_addresses = {column.untyped_storage().data_ptr() for column in self.columns}
        for position, leaf in enumerate(leaves):
            if leaf.untyped_storage().data_ptr() in own_addresses:
                leaves[position] = leaf.clone()

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy at most two ranges for each column."""
        self.begin()
        self.part(leaves)
        head = min(count, self.num_rows - start)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            rows = leaf.reshape(count, *field.shape)
            column[start : start + head].copy_(rows[:head])
            if head < count:
                column[: count - head].copy_(rows[head:])

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy with one indexed write for each column."""
        self.begin()
        self.part(leaves)
        # A device writes equal indices in any order, so only the last row of each slot is written.
        last = {slot: position for position, slot in enumerate(slots.tolist())}
        where = torch.tensor(list(last), dtype=torch.int64, device=self.device)
        which = torch.tensor(list(last.values()), dtype=torch.int64, device=self.device)
        for column, leaf, field in zip(self.columns, leaves, self.fields, strict=True):
            rows = leaf.reshape(slots.shape[0], *field.shape)
            _indexable(column)[where] = _indexable(rows)[which]

    def gather(self, slots: torch.Tensor, wanted: tuple[int, ...] | None = None) -> list[torch.Tensor]:
        """Fetch each leaf with one `index_select` on the device."""
        self.begin()
        rows = slots.to(self.device)
        columns = self.columns if wanted is None else [self.columns[position] for position in wanted]
        return [_indexable(column).index_select(0, rows).view(column.dtype) for column in columns]


class NoColumns(ColumnStore):
    """The store of a schema without columns: its leaves are lists, or it has no leaves."""

    def __init__(self, num_rows: int) -> None:
        self.fields, self.columns, self.num_rows = (), [], num_rows
        self.live_views = LiveViews()

    def begin(self) -> None:
        """Do nothing."""

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return an empty list."""
        return []

    def take(self, columns: Sequence[torch.Tensor]) -> None:
        """Do nothing."""

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Do nothing."""

    def gather(self, slots: torch.Tensor, wanted: tuple[int, ...] | None = None) -> list[torch.Tensor]:
        """Return an empty list."""
        return []


def plain(leaf: Leaf, device: torch.device) -> Leaf:
    """Return `leaf` detached, on `device`, contiguous, with lazy conjugations and negations resolved. May copy."""
    if isinstance(leaf, ObjectColumn):
        return leaf.on(device)
    return leaf.detach().to(device).resolve_conj().resolve_neg().contiguous()


def apart(columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous `columns`, with a copy of each one whose memory overlaps a column at a lower address.

    A write into one column must not change another one.
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
_MAKERS = 64  # number of batch sizes for which the allocation is prepared and cached
# Dtypes whose tensors may have a lazy negation. `dlpack::is_float` in the core must agree.
_MAY_BE_LAZY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_address = torch.Tensor.data_ptr


class HostColumns(ColumnStore):
    """Columns in CPU memory or in mapped files.

    Args:
        fields: see `ColumnStore`.
        columns: see `ColumnStore`.
        num_rows: the row numbers to accept, if columns differ in length. The caller then checks them for short columns.
    """

    def __init__(
        self, fields: Sequence[Field], columns: Sequence[torch.Tensor], num_rows: int | None = None
    ) -> None:
        super().__init__(fields, columns)
        self.num_rows = self.num_rows if num_rows is None else num_rows
        self._register()
        self._lazy = [
            dtype in _MAY_BE_LAZY or dtype.is_complex for dtype in (field.dtype for field in fields)
        ]
        self.makers: dict[tuple[int, tuple[int, ...] | None], Callable[[], Made]] = {}
        self._pool = BufferPool()

    def begin(self) -> None:
        """Do nothing, because the CPU needs no order of streams."""

    def _register(self) -> None:
        """Register the addresses of the columns with the core."""
        starts = [column.data_ptr() for column in self.columns]
        self._native = NativeColumns(starts, [field.row_bytes for field in self.fields], self.num_rows)
        self._ranges = [
            (start, start + column.nbytes) for start, column in zip(starts, self.columns, strict=True)
        ]
        self._low = min(starts)
        self._high = max(high for _, high in self._ranges)

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous CPU leaves, with lazy conjugations and negations resolved."""
        found = list(leaves)
        for position, (leaf, lazy) in enumerate(zip(leaves, self._lazy, strict=True)):
            in_memory(leaf)
            if not (leaf.is_cpu and leaf.is_contiguous()) or (lazy and (leaf.is_neg() or leaf.is_conj())):
                found[position] = plain(leaf, _CPU)
        return found

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy with at most two memory copies for each column."""
        self._native.write(start, count, self.addresses(leaves))

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy row by row in the order of `slots`."""
        self._native.put(slots.data_ptr(), slots.shape[0], self.addresses(leaves))

    def gather(self, slots: torch.Tensor, wanted: tuple[int, ...] | None = None) -> list[torch.Tensor]:
        """Fetch all leaves in one native call, which releases the interpreter lock."""
        count = slots.shape[0]
        make = self.makers.get((count, wanted)) or self.prepared(count, wanted)
        leaves, to = make()
        self._native.gather(slots.data_ptr(), count, to, wanted)
        return leaves

    def part(self, leaves: list[torch.Tensor]) -> None:
        """Replace leaves in the list whose memory begins inside a column by copies."""
        self.addresses(leaves)

    def addresses(self, leaves: list[torch.Tensor]) -> list[int]:
        """Replace leaves inside the columns by copies, as `part` does, and return the addresses of all leaves."""
        low, high = self._low, self._high
        addresses = list(map(_address, leaves))
        for position, address in enumerate(addresses):
            if low <= address < high and any(first <= address < last for first, last in self._ranges):
                # The caller's list keeps the copy alive until its write is done, or repeated after an interrupt.
                leaves[position] = _copied(leaves[position])
                addresses[position] = leaves[position].data_ptr()
        return addresses

    def prepared(self, count: int, wanted: tuple[int, ...] | None) -> Callable[[], Made]:
        """Return a function that allocates `count` rows of the wanted columns, and keep it in `makers`."""
        if len(self.makers) >= _MAKERS:
            self.makers.clear()
        fields = self.fields if wanted is None else [self.fields[position] for position in wanted]
        make = maker([((count, *field.shape), field.dtype) for field in fields], self._pool)
        self.makers[count, wanted] = make
        return make


class OwnColumns(HostColumns):
    """Columns over torch storages that only this store holds, so they never move."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.live_views = LiveViews()
        self._arrays = [numpy_view(column) for column in columns]
        self._by_core = written_by_core(self.columns)

    def fits(self, leaves: list[torch.Tensor], lead: torch.Size) -> bool:
        """Let the core compare the leaves' shapes and dtypes; see `ColumnStore.fits`."""
        return self._by_core is not None and self._by_core.fits(leaves, lead)

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Let the core read the leaves' addresses and write them; if it can't, write as `HostColumns` does."""
        if self._by_core is None or not self._by_core.write(start, count, leaves):
            super().write(start, count, leaves)

    def watched(
        self, outcomes: list[int], roots: list[int], flags: list[int]
    ) -> Callable[[int, int, int, list[torch.Tensor]], bytes | None] | None:
        """Return the core's function that finds seams; None if the core can't read these columns."""
        if self._by_core is None:
            return None
        self._by_core.watch(outcomes, roots, flags)
        return self._by_core.seams

    def views(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> list[torch.Tensor]:
        """Return live views with separate torch storages, which cover only the rows and columns in view."""
        rows = lead.numel()
        arrays = [array[:rows].reshape(*lead, *array.shape[1:])[(*index, ...)] for array in self._arrays]
        self.live_views.note(arrays)
        return [torch.from_numpy(array).view(f.dtype) for array, f in zip(arrays, self.fields, strict=True)]

    def view(self, position: int) -> torch.Tensor:
        """Return a live view with a separate torch storage, for reading only."""
        return torch.from_numpy(self._arrays[position]).view(self.fields[position].dtype)


def _copied(leaf: torch.Tensor) -> torch.Tensor:
    """Return a copy of a contiguous tensor, including dtypes that torch can't copy."""
    return leaf.view(numpy_twin(leaf.dtype)).clone().view(leaf.dtype)


def written_by_core(columns: list[torch.Tensor]) -> TensorColumns | None:
    """Return a writer that reads tensors' addresses in the core, or None if the core can't read these columns."""
    if EXCHANGE is None or any(column.is_complex() for column in columns):  # leaves may be lazy conjugates
        return None
    try:
        return TensorColumns(EXCHANGE, torch.Tensor, columns)
    except RuntimeError:  # torch's exchange interface doesn't support the dtype
        return None


class UserColumns(HostColumns):
    """Columns over tensors that the user holds too and may move. Views share their torch storages, and move with them.

    If the user moves a tensor while another thread reads or writes the storage, the result is undefined, as for any
    tensor.
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
        """Return the address and the size of each torch storage."""
        return [(memory.data_ptr(), memory.nbytes()) for memory in self._memory]

    def _follow(self) -> None:
        if self._look() != self._seen:
            self._register()

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves in the form that the copy needs, after a check of the columns' addresses.

        The check is here, so that a column that was shrunk raises an error before anything changes.
        """
        self._follow()
        return super().ready(leaves)

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Copy to the present addresses of the columns."""
        self._follow()
        super().write(start, count, leaves)

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Copy to the present addresses of the columns."""
        self._follow()
        super().put(slots, leaves)

    def gather(self, slots: torch.Tensor, wanted: tuple[int, ...] | None = None) -> list[torch.Tensor]:
        """Fetch from the present addresses of the columns."""
        self._follow()
        return super().gather(slots, wanted)


class ParentsColumns(OwnColumns):
    """Mapped columns of the parent process after a fork. They are read-only, and views are copies."""

    def __init__(self, fields: Sequence[Field], columns: Sequence[torch.Tensor]) -> None:
        super().__init__(fields, columns)
        self.live_views = LiveViews(always=True)  # the parent may write at any time
        self._by_core = None  # so that writes call `ready`, which raises

    def ready(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Raise `UnsupportedError`, because a write would change the parent's records."""
        raise UnsupportedError(
            "can't write: these memory-mapped files belong to the parent of this forked process, which wouldn't notice "
            "the write; make the buffer with shared=True, or send the records to the parent"
        )

    def views(self, lead: torch.Size, index: tuple[int | slice, ...] = ()) -> list[torch.Tensor]:
        """Return copies."""
        return [view.clone() for view in super().views(lead, index)]


def column_store(
    allocate: Allocator, paths: Sequence[Path], fields: Sequence[Field], num_rows: int
) -> ColumnStore:
    """Make columns and return their store, on the CPU or on another device.

    Args:
        allocate: makes the columns.
        paths: the paths of the leaves.
        fields: the leaves.
        num_rows: the number of rows of each column.

    Raises:
        CapacityError: there is too little memory or disk space.
        UnsupportedError: a file of a column exists already.
    """
    columns = allocate(paths, fields, num_rows)
    if not columns:
        return NoColumns(num_rows)
    if not columns[0].is_cpu:
        return DeviceColumns(fields, columns)
    return OwnColumns(fields, columns) if allocate.exclusive else UserColumns(fields, columns)


def repeated(data: Any, shape: torch.Size, item_shape: torch.Size) -> Any:
    """Return a TensorDict ``[*shape[n:], *item_shape]`` as ``[*shape, *item_shape]``, and any other value unchanged."""
    if not isinstance(data, TensorDictBase):
        return data
    missing = len(shape) + len(item_shape) - data.ndim
    full_shape = torch.Size((*shape, *item_shape))
    if not 0 < missing < len(shape) or data.batch_size != full_shape[missing:]:
        return data
    return data.expand(full_shape)
