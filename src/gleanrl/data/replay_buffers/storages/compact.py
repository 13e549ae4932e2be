"""Columns in which observations and their frames are stored once: the store of ``compact=True``.

Row t of ``("next", key)`` is read from the column of ``key``. If its bits equal the root of the following step, it is
read at that step's slot, otherwise at a spare row behind the ring. A stack of frames is read from the newest frames of
its step and of the steps before, or at a spare row. Each write decides this by content.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl._arrays.native import Columns as NativeColumns
from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.results import Placement
from gleanrl._arrays.schema import Field, allocate, numpy_view
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._checkpoint.reader import Stored
from gleanrl._checkpoint.row_segments import bytes_of
from gleanrl._os import proc
from gleanrl._os.interrupts import ForkSafeLock, renew_in_child
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.storages.allocators import Allocator, FileAllocator, HeapAllocator
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.columns import (
    ColumnStore,
    HostColumns,
    NoColumns,
    OwnColumns,
    column_store,
    written_by_core,
)
from gleanrl.data.replay_buffers.storages.frame_stacks import (
    Compact,
    FrameStack,
    declared_stacks,
    find_stacks,
)
from gleanrl.data.replay_buffers.storages.indexing import column_of, is_key
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.snapshots import Records, StorageState, read_records, stored_rows
from gleanrl.data.replay_buffers.storages.table import StoreMaker, Table
from gleanrl.data.trajectories import same_bits, twins
from gleanrl.errors import CapacityError, InvalidArgumentError, UnsupportedError

Rows: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_LEAST_BYTES = 16  # shorter rows are stored twice: the map of the rows would cost as much
_STEP_BYTES = 64 << 20  # by which the spare rows grow
_FREE_CHECK_BYTES = 64 << 20  # copies below this size are made without a look at the free memory
_LOOK_ROWS = 1024  # read at once to compare them with new rows
_LOGGED = 256  # number of writes whose rows a reader can still find
_FOLLOWS = 0xFFFF0000  # a head from here on is no spare row; as in the core
_address = torch.Tensor.data_ptr
_MOST_ROWS = (1 << 30) - 1  # the core numbers rows, spare rows included, in 32 bits
_TRIES = 4  # number of times that a reader reads rows again, before it makes writers wait


class SharedColumn:
    """A column of outcomes or stacks for reading: an index of rows, or a slice, returns copies.

    Snapshots read it like any column. A row that a writer moves during a read is read again, so writers only have to
    keep the rows that they overwrite.
    """

    is_cpu = True
    device = torch.device("cpu")

    def __init__(self, columns: CompactColumns, position: int, field: Field, num_rows: int) -> None:
        self._columns, self._position = weakref.ref(columns), position
        self.dtype, self.shape = field.dtype, torch.Size((num_rows, *field.shape))
        self.itemsize = field.dtype.itemsize

    def _store(self) -> CompactColumns:
        found = self._columns()
        if found is None:
            raise UnsupportedError(
                "column: its storage was deleted, or has loaded other records; read column(path) again"
            )
        return found

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """Return copies of rows, ``[*index, *field]``, at an index that a tensor of one dimension takes."""
        if isinstance(rows, tuple) or rows is None or rows is ...:
            raise self._refused(f"the index {rows!r}")
        if isinstance(rows, slice):
            slots = torch.arange(*rows.indices(self.shape[0]), device="cpu")
        else:
            slots = torch.arange(self.shape[0], device="cpu")[rows]
        store = self._store()
        store.check_room(slots.numel(), [self._position])
        copies = store.gather(slots.reshape(-1).contiguous(), (self._position,))[0]
        return copies.view(*slots.shape, *self.shape[1:])

    def numel(self) -> int:
        """Return the number of elements that are stored for this column alone."""
        return self._store().elements(self._position)

    def is_contiguous(self) -> bool:
        """Return True."""
        return True

    def __getattr__(self, name: str) -> Any:
        """Raise `UnsupportedError`: only rows can be read."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refused(repr(name))

    def _refused(self, use: str) -> UnsupportedError:
        return UnsupportedError(
            f"column: a compact storage has no tensor of these entries, so it can't serve {use}; read rows by "
            "column(path)[slots], or build the storage without compact"
        )


class Arriving:
    """The destination of a column of outcomes or stacks that a reader of files writes piece by piece."""

    is_cpu = False  # so that the reader copies

    def __init__(self, field: Field, shape: torch.Size, arrive: Callable[[int, torch.Tensor], None]) -> None:
        self.dtype, self.shape, self._arrive = field.dtype, shape, arrive
        self._start = 0

    def __getitem__(self, rows: slice) -> Arriving:
        """Return the destination of the rows from the start of the slice on."""
        self._start = rows.start
        return self

    def copy_(self, piece: torch.Tensor) -> None:
        """Take the rows, ``[n, *field]``."""
        self._arrive(self._start, piece)


class CompactColumns(HostColumns):
    """Columns in CPU memory or in mapped files, in which outcomes that following roots repeat are stored once.

    Frames of stacks are stored once too.

    `SharedRows` in the core compares, writes and reads rows. Its header describes the spare rows.

    Threads: one thread writes, and any thread reads at any time. A reader notes which writes are complete and copies
    the rows. Afterwards it reads outcomes and stacks again that a later write may have moved. The caller finds torn
    records by their generations, as for all columns.

    Args:
        fields: the leaves.
        columns: the column of each leaf; None for outcomes that are stored with their roots. Roots of these have
            further rows up to `limit`. The column of a stack holds frames.
        pairs: the outcomes and their roots, by position.
        stacks: the roots that are stacks, by position.
        num_rows: the number of slots.
        streams: the slots of one step. The outcome of a slot is compared with the root so many slots later.
        limit: the row after the last spare row.
        reach: see `HeapAllocator.sparse`.
    """

    can_widen = False

    def __init__(
        self,
        fields: Sequence[Field],
        columns: Sequence[torch.Tensor | None],
        pairs: Sequence[tuple[int, int]],
        stacks: Mapping[int, FrameStack],
        num_rows: int,
        streams: int,
        limit: int,
        reach: Callable[[int], None],
    ) -> None:
        self._pairs, self.stacks, self.streams = pairs, stacks, streams
        self._limit, self._reach = limit, reach
        self._of = dict(pairs)
        self._moving = frozenset([*self._of, *stacks])
        """The leaves whose rows a write of other rows may move."""
        self._memory = {position: column for position, column in enumerate(columns) if column is not None}
        """The column of each leaf that isn't an outcome."""
        seen: list[Any] = [
            SharedColumn(self, position, field, num_rows)
            if column is None or position in stacks
            else column[:num_rows]
            for position, (field, column) in enumerate(zip(fields, columns, strict=True))
        ]
        self._usable = num_rows + 1  # the row after the last one that has memory
        self._places: Rows = np.empty(num_rows, np.uint32)
        """The row of each slot's outcomes in the columns of their roots."""
        self._heads: Rows = np.empty(num_rows if stacks else 0, np.uint32)
        """The spare row of each slot's stacks, or how they follow from the slots before."""
        self._most_frames = max((stack.frames for stack in stacks.values()), default=1)
        self._log: deque[tuple[int, Any]] = deque(maxlen=_LOGGED)
        """The number of each last write, and the slots whose rows it may move: first and count, or an array."""
        self._begun = self._done = 0
        self._lock = ForkSafeLock()  # held during a write
        super().__init__(fields, seen)
        self.live_views = self._alone.live_views
        renew_in_child(self)

    def after_fork(self, lineage: tuple[int, ...]) -> None:
        """Find spare rows that a write of another thread had just taken; the child doesn't finish that write."""
        if self._begun != self._done:
            self.apart.recount()
            self._done = self._begun

    def _register(self) -> None:
        """Make the stores of parts of the columns."""
        roots, leaves = [root for _, root in self._pairs], range(len(self.fields))
        starts = {position: column.data_ptr() for position, column in self._memory.items()}
        stacks = [self.stacks.get(position) for position in leaves]
        self.apart = NativeColumns.sharing(
            [starts.get(position, 0) for position in leaves],
            [field.row_bytes for field in self.fields],
            [*self._of],
            roots,
            [1 if stack is None else stack.frames for stack in stacks],
            [
                1 if stack is None else stack.pieces(field)
                for stack, field in zip(stacks, self.fields, strict=True)
            ],
            self.num_rows,
            self.streams,
            self._places.ctypes.data,
            self._heads.ctypes.data if self.stacks else 0,
        )
        """Compares, writes and reads the rows."""
        self._ranges = [
            (column.data_ptr(), column.data_ptr() + column.nbytes) for column in self._memory.values()
        ]
        self._low, self._high = min(low for low, _ in self._ranges), max(high for _, high in self._ranges)
        self._unpaired = [position for position in self._memory if position not in roots]
        self._alone: ColumnStore = (
            OwnColumns([self.fields[p] for p in self._unpaired], [self.columns[p] for p in self._unpaired])
            if self._unpaired
            else NoColumns(self.num_rows)
        )
        """The columns whose live views users may have."""
        # Only shapes and dtypes count here: the column of a stack has more than enough memory.
        by_leaf = [
            self._memory[self._of.get(position, position)].reshape(-1)[: self.num_rows * field.shape.numel()]
            for position, field in enumerate(self.fields)
        ]
        self._by_core = written_by_core(
            [
                column.view(self.num_rows, *field.shape)
                for column, field in zip(by_leaf, self.fields, strict=True)
            ]
        )

    def fits(self, leaves: list[torch.Tensor], lead: torch.Size) -> bool:
        """Let the core compare the leaves' shapes and dtypes; see `ColumnStore.fits`."""
        return self._by_core is not None and self._by_core.fits(leaves, lead)

    # Reading

    def gather(self, slots: torch.Tensor, wanted: tuple[int, ...] | None = None) -> list[torch.Tensor]:
        """Fetch all leaves in one native call; then fetch rows again that a writer moved meanwhile."""
        count, done = slots.shape[0], self._done
        make = self.makers.get((count, wanted)) or self.prepared(count, wanted)
        leaves, to = make()
        self.apart.gather(slots.data_ptr(), count, to, wanted)
        if self._begun != done:
            self._read_again(slots, done, leaves, wanted or range(len(leaves)))
        return leaves

    def _read_again(
        self, slots: torch.Tensor, done: int, leaves: list[torch.Tensor], positions: Sequence[int]
    ) -> None:
        """Read rows again that a write after the write number `done` may have moved, in place.

        Args:
            slots: the slots that were read.
            done: the last write that was complete before.
            leaves: the rows that were read.
            positions: the position of each of these leaves.
        """
        moving = [(leaf, p) for leaf, p in zip(leaves, positions, strict=True) if p in self._moving]
        for attempt in range(_TRIES if moving else 0):
            stale = torch.from_numpy(self._moved_since(slots.numpy(), done).nonzero()[0])
            if not len(stale):
                return
            done = self._done
            if attempt == _TRIES - 1:
                with self._lock.lock:
                    self._replace(slots, stale, moving)
            else:
                self._replace(slots, stale, moving)

    def _replace(
        self, slots: torch.Tensor, stale: torch.Tensor, moving: list[tuple[torch.Tensor, int]]
    ) -> None:
        at = slots[stale]
        for leaf, position in moving:
            rows = torch.empty(len(at), *leaf.shape[1:], dtype=leaf.dtype, device="cpu")
            self.apart.gather(at.data_ptr(), len(at), [rows.data_ptr()], [position])
            numpy_view(leaf)[stale.numpy()] = numpy_view(rows)

    def _moved_since(self, slots: Rows, done: int) -> Rows:
        """Return whether a write after the write `done` may have moved rows of slots, ``(n,)`` bool."""
        log = self._logged()
        if log[0][0] > done + 1:  # too many writes to remember
            return np.ones(len(slots), bool)
        moved = np.zeros(len(slots), bool)
        for touched in (touched for number, touched in log if number > done):
            if isinstance(touched, tuple):
                moved |= (slots - touched[0]) % self.num_rows < touched[1]
            else:
                moved |= np.isin(slots, touched)
        return moved

    def _logged(self) -> tuple[tuple[int, Any], ...]:
        while True:
            with suppress(RuntimeError):  # a writer added an entry during the copy
                return tuple(self._log)

    def check_room(self, num_rows: int, positions: Iterable[int]) -> None:
        """Raise `CapacityError` if copies of rows of these leaves would take more than half of the free memory."""
        needed = num_rows * sum(self.fields[position].row_bytes for position in positions)
        room = proc.available_memory() if needed > _FREE_CHECK_BYTES else None
        if room is not None and needed > room // 2:
            raise CapacityError(
                f"copies of {num_rows} rows need {needed:,} bytes, {room:,} are free, and a compact storage has no "
                "views of entries that it stores once: read fewer rows at once, or fetch single keys"
            )

    def views(
        self,
        lead: torch.Size,
        index: tuple[int | slice, ...] = (),
        leaves: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Return copies of the outcomes that are stored once and of their roots, and live views of all other leaves.

        A write into a view of a root would also change the outcome of the step before.

        Args:
            lead: see `ColumnStore.views`.
            index: see `ColumnStore.views`.
            leaves: the wanted leaves; None for all.
        """
        leaves = range(len(self.fields)) if leaves is None else leaves
        positions = tuple(position for position in leaves if position in chain.from_iterable(self._pairs))
        slots = torch.arange(lead.numel(), device="cpu").view(lead)[(*index, ...)]
        self.check_room(slots.numel(), positions)
        copies = self.gather(slots.reshape(-1).contiguous(), positions) if positions else []
        found = dict(zip(self._unpaired, self._alone.views(lead, index), strict=True))
        for position, copy in zip(positions, copies, strict=True):
            found[position] = copy.view(*slots.shape, *copy.shape[1:])
        return [found[position] for position in leaves]

    def view(self, position: int) -> Any:
        """Return a live view of a column, for reading only; a `SharedColumn` for outcomes and stacks."""
        column = self.columns[position]
        if isinstance(column, SharedColumn):
            return column
        return torch.from_numpy(numpy_view(column)).view(column.dtype)  # with a separate torch storage

    # Writing

    def make_room(self, count: int, by_slot: bool = False, look: Callable[[], int] | None = None) -> None:
        """Make sure that a write of `count` rows finds spare rows. Call it before each write.

        Args:
            count: the number of rows.
            by_slot: whether `put` writes them.
            look: looks at the rows, and returns the row after the last spare row that they may use. Without it, or
                for few rows, all of them may need spare rows.

        Raises:
            CapacityError: there is too little memory or disk space for further spare rows. Nothing changed.
        """
        stop = self.apart.reach(count, by_slot)
        if stop <= self._usable:
            return
        step = _STEP_BYTES // sum(self.fields[root].row_bytes for _, root in self._pairs)
        if look is not None and stop > self._usable + step:
            stop = look()
            if stop <= self._usable:
                return
        further = max(stop, min(self._usable + step, self._limit))
        try:
            self._reach(further)
        except CapacityError:
            self._reach(stop)
            further = stop
        self._usable = further

    def reach_of_put(self, slots: torch.Tensor, leaves: Sequence[torch.Tensor]) -> int:
        """Return the row after the last spare row that `put` may use. Rows that change nothing need none."""
        count, written = slots.shape[0], slots.numpy()
        if len(np.unique(written)) < count:
            return self.apart.reach(count, True)
        changed = 0
        paired = tuple(dict.fromkeys(chain.from_iterable(self._pairs)))
        for part in torch.arange(count, device="cpu").split(_LOOK_ROWS):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            differs = torch.from_numpy(self._places[written[rows]] == self.num_rows)  # never written
            for position, now in zip(paired, self.gather(slots[rows], paired), strict=True):
                new = leaves[position].reshape(count, *now.shape[1:])[rows]
                differs |= ~same_bits(now, new, 1)
            changed += int(differs.sum())
        return self.apart.reach(changed, True)

    def write(self, start: int, count: int, leaves: list[torch.Tensor]) -> None:
        """Write rows of a ring, and share outcomes with roots. An interrupted call may be repeated."""
        touched = (start - self.streams) % self.num_rows, count + self.streams * self._most_frames
        self._change(touched, self.apart.write, start, count, leaves)

    def put(self, slots: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Write rows in the order of `slots`, and share outcomes with roots. An interrupted call may be repeated."""
        written = slots.numpy()
        steps = np.arange(-1, self._most_frames)[:, None]
        touched = ((written + steps * self.streams) % self.num_rows).reshape(-1)
        self._change(touched, self.apart.put, slots.data_ptr(), len(written), leaves)

    def _change(
        self,
        touched: Any,
        write: Callable[[int, int, list[int]], bool],
        at: int,
        count: int,
        leaves: list[torch.Tensor],
    ) -> None:
        with self._lock.lock:
            number = self._done + 1
            self._log.append((number, touched))
            self._begun = number  # before the first byte changes: readers look at it after their last one
            if not write(at, count, list(map(_address, leaves))):
                write(at, count, self.addresses(leaves))
            self._done = number

    def forget(self) -> None:
        """Forget all rows. An interrupted call may be repeated."""
        self.apart.forget()

    def watched(
        self, outcomes: list[int], roots: list[int], flags: list[int]
    ) -> Callable[[int, int, int, list[torch.Tensor]], bytes | None]:
        """Return a function that finds seams; see `ColumnStore.watched`."""
        self.apart.watch(outcomes, roots, flags)
        return self._seams

    def _seams(self, newest: int, steps: int, streams: int, leaves: list[torch.Tensor]) -> bytes | None:
        return self.apart.seams(newest, steps, streams, self.addresses(leaves))

    def take(self, columns: Sequence[torch.Tensor]) -> None:
        """Write the first rows of new columns, piece by piece; see `ColumnStore.take`."""
        step = max(_STEP_BYTES // sum(field.row_bytes for field in self.fields), self.streams)
        rows = columns[0].shape[0]
        for start in range(0, rows, step):
            leaves = self.ready([column[start : min(start + step, rows)] for column in columns])
            self.make_room(leaves[0].shape[0])
            self.write(start, leaves[0].shape[0], leaves)

    def arriving(self) -> list[torch.Tensor | Arriving]:
        """Return columns for a reader of files: it copies outcomes and stacks in pieces, and fills others in place."""
        pieces: dict[int, dict[int, torch.Tensor]] = {}  # by their first row and column

        def arrive(position: int, start: int, piece: torch.Tensor) -> None:
            found = pieces.setdefault(start, {})
            found[position] = piece
            if len(found) == len(self._moving):
                count = piece.shape[0]
                leaves = [
                    found.get(p, column[start : start + count]) for p, column in enumerate(self.columns)
                ]
                del pieces[start]
                self.make_room(count)
                self.apart.write(start, count, [leaf.data_ptr() for leaf in leaves], in_place=True)

        return [
            Arriving(self.fields[position], column.shape, partial(arrive, position))
            if isinstance(column, SharedColumn)
            else column
            for position, column in enumerate(self.columns)
        ]

    def check_writable(self) -> None:
        """Do nothing; see `ColumnStore.check_writable`."""

    def check_valid(self) -> None:
        """Raise AssertionError if two rows share a spare row, or a free one is in use; for tests."""
        spares = [*self._outcomes_apart, *self._stacks_apart, *self.apart.free()]
        assert len(spares) == len(set(spares)), "a spare row is used twice"
        assert set(spares) == set(range(self.num_rows + 1, self.apart.used)), (
            "a spare row is lost or out of range"
        )
        assert self.apart.used <= self._usable, "a spare row has no memory"
        for root in self._of.values():
            assert not bool(bytes_of(self._memory[root][self.num_rows]).any()), "the row of zeros was written"

    def elements(self, position: int) -> int:
        """Return the number of elements that are stored for an outcome or a stack alone."""
        size, stack = self.fields[position].shape.numel(), self.stacks.get(position)
        if stack is None:
            return size * len(self._outcomes_apart)
        return size * len(self._stacks_apart) + size // stack.frames * self.num_rows

    @property
    def _outcomes_apart(self) -> Rows:
        return self._places[self._places > self.num_rows]

    @property
    def _stacks_apart(self) -> Rows:
        return self._heads[self._heads < _FOLLOWS]

    def texts(self, num_rows: int) -> list[str]:
        """Return which entries of `num_rows` stored rows are stored once, for the storage's repr."""
        texts = [f"{len(self._outcomes_apart)} of {num_rows} outcomes stored apart"]
        if self.stacks:
            found = ", ".join(f"{as_key(stack.path)!r}: {stack.frames}" for stack in self.stacks.values())
            texts += [f"stack={{{found}}}, {len(self._stacks_apart)} of {num_rows} stacks stored apart"]
        return texts

    def of_parent(self) -> ParentsCompactColumns:
        """Return columns for a forked child, which refuse all use of the mapped files."""
        return ParentsCompactColumns(self)


class ParentsCompactColumns(ColumnStore):
    """Mapped compact columns in a forked child. The parent moves outcomes unseen, so the child can't read them."""

    def __init__(self, columns: CompactColumns) -> None:
        self.fields, self.columns, self.num_rows = columns.fields, list(columns.columns), columns.num_rows
        self._lasting = columns  # `SharedColumn` refers to them weakly
        self.live_views = columns.live_views

    def _refuse(self, *args: Any) -> Any:
        raise UnsupportedError(
            "a compact LazyMemmapStorage can't be used in a forked process, because its parent moves rows in the "
            "shared files; use LazyTensorStorage, or send state_dict() to the process"
        )

    begin = ready = part = write = put = gather = _refuse  # type: ignore[assignment]
    views = view = check_writable = take = make_room = _refuse  # type: ignore[assignment]


def compact_store(
    streams: int,
    stacks: Callable[[dict[Path, Field]], Iterable[FrameStack]],
    allocate: Allocator,
    paths: Sequence[Path],
    fields: Sequence[Field],
    num_rows: int,
) -> ColumnStore:
    """Make the columns of a compact storage; like `column_store` if no outcome can be stored with its root.

    Args:
        streams: the rows of one time step.
        stacks: returns the stacks among roots.
        allocate: makes the columns.
        paths: the paths of the leaves with columns.
        fields: their fields.
        num_rows: the number of slots.

    Raises:
        CapacityError: there is too little memory or disk space.
        InvalidArgumentError: there are too many slots for the numbers of the core.
        SchemaError: a stack that the user names isn't there.
    """
    number = {path: position for position, path in enumerate(paths)}
    repeated = twins(dict(zip(paths, fields, strict=True)))
    long = {path: path[1:] for path in repeated if fields[number[path]].row_bytes >= _LEAST_BYTES}
    # A root that is itself the outcome of another entry, as in ("next", "next", key), has no column.
    pairs = {number[outcome]: number[root] for outcome, root in long.items() if root not in long}
    found = {
        number[stack.path]: stack for stack in stacks({paths[root]: fields[root] for root in pairs.values()})
    }
    if not pairs:
        return column_store(allocate, paths, fields, num_rows)
    if num_rows > _MOST_ROWS:
        raise InvalidArgumentError(
            f"max_size: expected at most {_MOST_ROWS:,} transitions in a compact storage, got {num_rows:,}; lower "
            "max_size, split the records over the storages of a ReplayBufferEnsemble, or leave out compact"
        )
    stored = [position for position in range(len(paths)) if position not in pairs]
    own_fields = [found[p].frame(fields[p]) if p in found else fields[p] for p in stored]
    limit = NativeColumns.sharing_limit(num_rows, streams, bool(found))
    spares = [fields[position].row_bytes if position in pairs.values() else 0 for position in stored]
    assert isinstance(allocate, (HeapAllocator, FileAllocator))
    columns, reach = allocate.sparse(
        [paths[p] for p in stored], own_fields, num_rows, spares, limit - num_rows
    )
    by_position = dict(zip(stored, columns, strict=True))
    in_order = [by_position.get(p) for p in range(len(paths))]
    return CompactColumns(fields, in_order, [*pairs.items()], found, num_rows, streams, limit, reach)


class CompactStorage(Storage):
    """The part of ``compact=True`` that a storage of columns needs in addition to `CompactColumns`.

    It finds room for spare rows before a write begins. It loads records into new columns, since a load that has begun
    can't fail, and could need more spare rows than there is room for.
    """

    _table: Table | None
    compact: Compact
    """The settings."""

    def _store_for(self, form: RecordFormat, streams: int, leaves: Sequence[Leaf]) -> StoreMaker:
        """Return the function that makes the columns, for steps of so many rows that begin with `leaves`."""
        return partial(compact_store, streams, partial(self._stacks, form, streams, leaves))

    def _stacks(
        self, form: RecordFormat, streams: int, leaves: Sequence[Leaf], roots: dict[Path, Field]
    ) -> list[FrameStack]:
        """Return the stacks among `roots`: the present ones, or else declared ones, or else stacks that leaves show."""
        columns, stack = self._once, self.compact.stack
        if columns is not None:
            return [*columns.stacks.values()]
        if stack is not None:
            return declared_stacks(stack, roots)
        return find_stacks(roots, dict(zip(form.schema.paths, leaves, strict=bool(leaves))), streams)

    @property
    def _once(self) -> CompactColumns | None:
        """The columns; None if there are none yet, or none of them can be stored once."""
        columns = None if self._table is None else self._table.columns
        return columns if isinstance(columns, CompactColumns) else None

    def write(self, prepared: Prepared, placement: Placement, end: int | None = None) -> None:
        """Find room for spare rows, and then write as every storage does; see `Storage.write`.

        Raises:
            CapacityError: there is no room for further spare rows. Nothing changed.
        """
        columns = self._once
        if columns is not None:
            count = placement.num_steps * self.rows_per_step
            columns.make_room(count, False, partial(self._reach_of, columns, prepared, placement))
        super().write(prepared, placement, end)

    def _reach_of(self, columns: CompactColumns, prepared: Prepared, placement: Placement) -> int:
        """Return the row after the last spare row that a write may use, by a look at the rows."""
        per_step = self.rows_per_step
        at = [
            leaf.data_ptr() + placement.skipped * per_step * field.row_bytes
            for leaf, field in zip(_dense(prepared.rows), columns.fields, strict=True)
        ]
        return columns.apart.reach_of(placement.start * per_step, placement.num_steps * per_step, at)

    def _put(
        self, rows: Any, slots: torch.Tensor, amended: bool, num_steps: int, end: int, ordered: bool
    ) -> None:
        columns = self._once
        if columns is not None and slots.shape[0]:
            columns.make_room(slots.shape[0], True, partial(columns.reach_of_put, slots, _dense(rows)))
        super()._put(rows, slots, amended, num_steps, end, ordered)

    def _forget(self) -> None:
        super()._forget()
        columns = self._once
        if columns is not None:
            columns.forget()

    @property
    def stored_apart(self) -> int:
        """The number of outcomes and stacks in spare rows."""
        columns = self._once
        return 0 if columns is None else columns.apart.num_apart

    def get(self, index: Any) -> Any:
        """Return records or a column (see `TensorStorage.get`). Entries that are stored once come as copies.

        Raises:
            CapacityError: these copies would take more than half of the free memory.
        """
        columns, table = self._once, self._table
        if columns is None or table is None or table.lists or not is_key(index):
            return super().get(index)  # type: ignore[safe-super]
        paths = self.columns_of([index])
        leaves = columns.views(self.shape, (), [table.form.schema.index(path) for path in paths])
        return column_of(table.form.narrow(paths).build(leaves, self.shape, table.device), index)

    def _flattened(self) -> Any:
        raise UnsupportedError("flatten: a compact storage has no columns to share; build it without compact")

    def _loading_table(
        self, form: RecordFormat, streams: int, num_rows: int, leaves: Sequence[Leaf]
    ) -> Table:
        """Make a table for records to load, next to the present one."""
        table: Table | None = self._table
        allocator: Any = self.allocator  # type: ignore[attr-defined]
        if table is not None and isinstance(allocator, FileAllocator):
            allocator = allocator.another()
        known = form if table is None else table.form
        store = self._store_for(form, streams, leaves)
        made = Table(known, num_rows, allocator, self.device, store)  # type: ignore[attr-defined]
        if self.ndim > 1:
            made.watch_mask()
        return made

    def _loaded(self, records: Records, streams: int, num_rows: int) -> Records:
        """Return records in a new table."""
        table = self._loading_table(records.form, streams, num_rows, records.columns)
        try:
            found = records.into(table)
            table.take(found.columns)
        except BaseException:
            table.discard()
            raise
        return replace(found, there=True)

    def _parse_content(self, reader: StateReader, state: StorageState) -> Records | None:
        table = self._table
        records = read_records(reader, state, None if table is None else table.form)
        if records is None:
            return None
        if table is not None:
            self.check_form(records.form, state)  # type: ignore[attr-defined]
        streams = torch.Size(state.batch_shape).numel()
        return self._loaded(records, streams, self.steps_that_fit(torch.Size(state.batch_shape)) * streams)

    def _turned(self, content: Records, rows: int) -> Records:
        table = content.table
        assert table is not None
        table.discard()
        turned = replace(content.turned(rows), table=None)
        return self._loaded(turned, _streams_of(table), table.columns.num_rows)

    def _read(self, stored: Stored, reader: StateReader) -> StorageState:
        """Return the value of a state whose records are in files, and read them into new columns piece by piece."""
        saved, table = StorageState.read(reader), self._table
        value = saved.fitted_to(self)
        form = stored_rows(reader, value, None if table is None else table.form)
        if table is not None:
            self.check_form(form, value)  # type: ignore[attr-defined]
        streams = torch.Size(value.batch_shape).numel()
        num_rows = self.steps_that_fit(torch.Size(value.batch_shape)) * streams
        looks = table is None and self.compact.stack is None
        target = self._loading_table(form, streams, num_rows, stored.first_rows()[1:] if looks else ())
        try:
            columns = target.columns
            own = columns.arriving() if isinstance(columns, CompactColumns) else columns.columns
            order: list[Any] = [own[target.form.schema.index(path)] for path in form.schema.paths]
            generations = allocate((value.rows,), torch.int64)
            stored.read([generations, *order], value.moved or 0)
        except BaseException:
            target.discard()
            raise
        seen = [
            column[: value.rows] if isinstance(column, torch.Tensor) else column for column in columns.columns
        ]
        identity = None if value.moved else stored.identity
        return replace(
            value.with_generations(generations, reader),
            content=Records(target.form, seen, target, True, identity=identity),
        )

    def check_valid(self) -> None:
        """Raise AssertionError if the storage's metadata are inconsistent; for tests."""
        super().check_valid()  # type: ignore[misc]
        columns = self._once
        if columns is not None:
            columns.check_valid()

    def __repr__(self) -> str:
        """Return the class, the size, the schema, the stacks, and how many outcomes and stacks are stored apart."""
        columns = self._once
        text = super().__repr__().replace("Compact", "Lazy", 1)
        texts = [] if columns is None else columns.texts(len(self))
        return ", ".join([text[:-1], "compact=True", *texts]) + ")"


def _dense(rows: Iterable[Leaf]) -> list[torch.Tensor]:
    return [leaf for leaf in rows if isinstance(leaf, torch.Tensor)]


def _streams_of(table: Table) -> int:
    return table.columns.streams if isinstance(table.columns, CompactColumns) else 1
