"""A storage that several processes of one machine read and write at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch

from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.results import Placement
from gleanrl._arrays.tensordicts import as_key
from gleanrl._os import files
from gleanrl._os.shared_memory import SharedMemory
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.change_log import Version
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.record_format import RecordFormat
from gleanrl.data.replay_buffers.storages.record_formats import format_from_state
from gleanrl.data.replay_buffers.storages.seams import Numbers, Pieces
from gleanrl.data.replay_buffers.storages.shared_segment import (
    ORDERED,
    OVERWRITTEN,
    SegmentAllocator,
    SharedMetadata,
    StorageSegment,
)
from gleanrl.data.replay_buffers.storages.slots import Generations
from gleanrl.data.replay_buffers.storages.snapshots import Records, StorageState
from gleanrl.data.replay_buffers.storages.table import Table
from gleanrl.data.replay_buffers.storages.tensor import LazyMemmapStorage, LazyTensorStorage, TensorStorage
from gleanrl.errors import SchemaError, UnsupportedError


class SharedTensorStorage(LazyTensorStorage):
    """A tensor storage in shared memory, made by `share`. Records, metadata and change log are in a `StorageSegment`.

    A thread that holds the lock of the storage's buffer uses it like any other storage. Taking the lock calls `pull`,
    which updates this object from the segment. For other processes each change is all or nothing, even if this process
    is killed in the middle.
    """

    _segment: StorageSegment
    _alone = False

    @property
    def segment(self) -> StorageSegment:
        """The storage's part of the shared memory."""
        return self._segment

    @property
    def memory(self) -> SharedMemory:
        """The shared memory and its lock."""
        return self._segment.memory

    def next_copy(self) -> int:
        """Return a number that no other copy has received. Takes the lock."""
        with self.guard():
            return self._segment.next_copy()

    def use_segment(self, segment: StorageSegment) -> None:
        """Use the records in `segment` from now on. This object shows none of them before the next `pull`."""
        self._segment, self.change_log = segment, segment.log
        self._table = self._pieces = self.find_seams = None
        self.generations = Generations()
        self.num_steps = self._end = self._rows_written = 0

    exposed = True  # other processes may write through live views

    def _new_pieces(self) -> Numbers:
        self._segment.number_pieces(True)
        self._see_pieces()
        assert self._pieces is not None
        return self._pieces

    def _forget_pieces(self) -> None:
        self._segment.number_pieces(False)
        self._pieces = None

    def _see_pieces(self) -> None:
        """Update the view of the piece numbers from the segment. Their memory doesn't move while they are in use."""
        if not self._segment.numbers_pieces:
            self._pieces = None
        elif self._pieces is None:
            self._pieces = self._segment.pieces.reshape(-1, self.rows_per_step)

    def pull(self) -> None:
        """Update this object from the segment, after taking back a change that a process left unfinished.

        The caller holds the lock.
        """
        segment = self._segment
        if segment.is_ready and self._table is None:
            state, batch = segment.schema()
            form, shape = format_from_state(state), torch.Size(batch)
            super()._begin(self._make_table(form, shape), shape)
            self.generations = Generations(segment.generations)
        if segment.changing:
            segment.undo()
        self.num_steps, self._end, self._rows_written, flags = segment.metadata()
        self.ordered, self.overwritten = bool(flags & ORDERED), bool(flags & OVERWRITTEN)
        self._see_pieces()

    def settle(self) -> None:
        """Take back a failed change of this process, before the caller releases the lock."""
        if self._segment.changing:
            self.pull()

    def _changing(
        self, slots: torch.Tensor | None, change: Callable[[], None], done: Callable[[], bool]
    ) -> None:
        """Make a change that other processes see completely or not at all. It may have begun before, if it is repeated.

        Args:
            slots: the slots that the change overwrites, each once; the journal keeps their rows. None for no slots.
            change: makes the change to this object and to the rows.
            done: returns whether the rows are complete. Then the metadata are published, even if an interrupt was
                raised.
        """
        if not self._segment.changing:
            if slots is not None:
                slots = slots[slots < len(self)]  # rows that aren't stored yet needn't be restored
            self._segment.begin(slots)
        try:
            change()
        finally:
            if done():
                flags = ORDERED * self.ordered | OVERWRITTEN * self.overwritten
                self._segment.commit(SharedMetadata(self.num_steps, self._end, self._rows_written, flags))

    def _write(
        self, rows: Any, placement: Placement, end: int, written: int, before: Version, pieces: Pieces | None
    ) -> None:
        per_step = self.rows_per_step
        start, count = placement.start * per_step, placement.num_steps * per_step
        self._changing(
            torch.arange(start, start + count, device="cpu") % self.max_size,
            lambda: super(SharedTensorStorage, self)._write(rows, placement, end, written, before, pieces),
            lambda: self._rows_written == written,
        )

    def _put(
        self, rows: Any, slots: torch.Tensor, amended: bool, num_steps: int, end: int, ordered: bool
    ) -> None:
        copied, some = self._copied, len(slots) > 0
        self._changing(
            slots.unique(),
            lambda: super(SharedTensorStorage, self)._put(rows, slots, amended, num_steps, end, ordered),
            lambda: not some or self._copied is not copied,
        )

    _copied: object = None

    def _copy_slots(self, rows: list[torch.Tensor], slots: torch.Tensor) -> None:
        super()._copy_slots(rows, slots)
        # A new object tells `_put` that all rows are copied: only the counts remain to be published.
        self._copied = object()

    def _go_on_at(self, step: int) -> None:
        self._changing(None, lambda: super(SharedTensorStorage, self)._go_on_at(step), lambda: True)

    def clear(self) -> None:
        """Remove every record, in all processes."""
        self._changing(None, super().clear, lambda: not self.num_steps)

    def adopt(self, value: StorageState) -> None:
        """Replace content and counters by the values in a snapshot, in all processes."""
        if self._table is None and value.content is not None:
            batch = torch.Size(value.batch_shape)
            self._begin(value.content.table or self._make_table(value.content.form, batch), batch)
        stored = torch.arange(len(self), device="cpu")
        version = self.version
        self._changing(
            stored,
            lambda: super(SharedTensorStorage, self).adopt(value),
            lambda: self.version != version and self._rows_written == value.rows_written,
        )

    def _parse_content(self, reader: StateReader, state: StorageState) -> Records | None:
        with self.guard():  # so that no other process fixes another schema at the same time
            return super()._parse_content(reader, state)

    def _take_content(self, content: Records | None, rows: int) -> None:
        if content is not None and not self.format.same_as(content.form):
            raise SchemaError(
                "load_state_dict: another process has meanwhile written records of another schema: expected "
                f"{self.format.schema!r}, got {content.form.schema!r}; load before other processes write"
            )
        super()._take_content(content, rows)

    def _make_table(self, form: RecordFormat, batch: torch.Size, leaves: Sequence[Leaf] = ()) -> Table:
        if form.schema.lists:
            raise UnsupportedError(
                f"a shared storage holds only tensors of one shape for each key, unlike "
                f"{as_key(form.schema.lists[0])!r}; leave that key out, or use shared=False"
            )
        self.allocator = SegmentAllocator(self._segment, (form.state(by_name=False), tuple(batch)))
        table = super()._make_table(form, batch, leaves)
        table.watch_mask()  # another process may have written padding rows
        return table

    def _begin(self, table: Table, batch: torch.Size) -> None:
        super()._begin(table, batch)
        self._segment.ready()
        self.generations = Generations(self._segment.generations)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference to the shared memory: copies use the same records.

        A process must load the pickle while this process lives; later, loading raises `FileNotFoundError`.
        """
        return _attached, (type(self), self._segment, self.requested_size, self.ndim)


def share(storage: Storage) -> SharedTensorStorage:
    """Convert a storage in place into one that several processes may use, and return it. Do nothing if it is one.

    Its records move to shared memory. For a `LazyMemmapStorage` that is a file without a name in its `scratch_dir`, and
    the storage's earlier files there are removed.

    Raises:
        UnsupportedError: the storage is neither a `LazyTensorStorage` on the CPU nor a `LazyMemmapStorage`. Objects of
            derived classes and records with lists are refused, too. The storage is unchanged.
        CapacityError: there is too little memory or disk space. The storage is unchanged.
    """
    if isinstance(storage, SharedTensorStorage):
        return storage
    if not is_shareable(storage):
        raise UnsupportedError(
            "shared: a buffer that processes share needs a LazyTensorStorage on the CPU or a LazyMemmapStorage, got "
            f"{storage!r}"
        )
    folder = None
    if isinstance(storage, LazyMemmapStorage):
        folder = storage.scratch_dir or files.system_temp_dir()
        files.make_dir(folder)
    kind, before, segment = type(storage), dict(storage.__dict__), StorageSegment(folder)
    saved = storage.copied(storage.snapshot()) if storage.initialized else None
    shared = _opened(storage, segment)
    try:
        if saved is not None:
            with shared.guard():
                shared.adopt(saved)
    except BaseException:  # restore the storage: the caller may keep using it, or try again
        storage.__dict__.clear()
        storage.__dict__.update(before)
        storage.__class__ = kind
        raise
    before["allocator"].discard()  # only now: after an error the storage still needs these files
    return shared


def is_shareable(storage: Storage) -> TypeGuard[TensorStorage]:
    """Return whether `share` accepts a storage of this class and device; objects of derived classes are refused."""
    kinds = LazyTensorStorage, LazyMemmapStorage, SharedTensorStorage
    return isinstance(storage, kinds) and type(storage) in kinds and storage.device.type == "cpu"


def _opened(storage: Any, segment: StorageSegment) -> SharedTensorStorage:
    storage.__class__ = SharedTensorStorage
    shared: SharedTensorStorage = storage
    shared.use_segment(segment)
    return shared


def _attached(
    kind: type[SharedTensorStorage], segment: StorageSegment, max_size: int, ndim: int
) -> SharedTensorStorage:
    return _opened(LazyTensorStorage(max_size, ndim=ndim), segment)
