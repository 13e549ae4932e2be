"""Ring writers, which overwrite the oldest record first."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensordict import TensorDict, is_tensor_collection

from gleanrl._arrays.results import Placement, new_tuple
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import SchemaError


class Cursor(NamedTuple):
    """The time step that the next write of a ring starts at."""

    cursor: int


class _OtherName:
    """Alias of a writer's cursor; without `__set__`, so that a subclass may assign an attribute of this name."""

    def __get__(self, writer: RoundRobinWriter | None, owner: type[Any]) -> Any:
        return self if writer is None else writer.cursor


class RoundRobinWriter(Writer):
    """Writes one time step after the other and starts again at the first when the storage is full.

    If a write is longer than the storage, only its newest steps are stored. They get the same slots as if all steps
    were written one by one. The position is the storage's own (`Storage.end`). So after a storage was written, cleared
    or loaded without the writer, it continues after the newest record.

    Examples:
        >>> import torch
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(5), writer=RoundRobinWriter())
        >>> buffer.extend(torch.arange(4))
        tensor([0, 1, 2, 3])
        >>> buffer.extend(torch.arange(4, 7))
        tensor([4, 0, 1])
    """

    @property
    def cursor(self) -> int:
        """The time step that the next write starts at; `UnsupportedError` without a storage."""
        return self.storage.end

    _cursor = _OtherName()  # a private name of other releases that programs use

    def place(self, prepared: Prepared) -> Placement:
        """Return the next steps of the ring; of more steps than fit, only the newest are placed."""
        storage, num_steps = self.storage, prepared.num_steps
        capacity, stored, end = storage.capacity_steps, storage.num_steps, storage.end
        start, skipped, count = end, 0, num_steps
        if num_steps > capacity:
            skipped, count = num_steps - capacity, capacity
            start = (start + skipped) % capacity
        length = min(end + num_steps, capacity) if stored < capacity else capacity
        evicted = min(max(stored + num_steps - capacity, 0), stored)
        return new_tuple(Placement, (start, count, skipped, evicted, length, capacity))

    def snapshot(self) -> Cursor:
        """Return the storage's cursor."""
        return Cursor(self.cursor)

    def parse(self, state: Any, stored: Storage | StorageState | None = None) -> Cursor:
        """Return the saved cursor; raise `SchemaError` if it leaves a gap after the stored steps.

        If a load moved the records to another ring size, return the storage's end instead.
        """
        stored = self.storage if stored is None else stored
        capacity, num_steps = stored.capacity_steps, stored.num_steps
        reader = StateReader(state, f"a {type(self).__name__}")
        # The saved cursor counts steps of the old ring, whose records have other slots now.
        if isinstance(stored, StorageState) and stored.moved is not None:
            reader.integer("cursor")
            return Cursor(stored.end)
        cursor = reader.integer("cursor", 0, capacity - 1)
        if num_steps < capacity and cursor != num_steps:
            raise reader.wrong(
                "cursor",
                f"{num_steps}, after the {num_steps} of {capacity} time steps stored; load the storage's state too",
            )
        return Cursor(cursor)

    def adopt(self, value: Cursor) -> None:
        """Set the storage's end to a cursor. If that moves the end, all stored records count as changed."""
        self.storage.end = value.cursor

    def check_valid(self) -> None:
        """Raise AssertionError if the cursor leaves the ring or a gap after the stored steps; for tests."""
        stored, capacity = self.storage.num_steps, self.storage.capacity_steps
        assert 0 <= self.cursor < capacity
        assert stored == capacity or self.cursor == stored


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A `RoundRobinWriter` for TensorDicts and tensorclasses; it refuses other records.

    It writes nothing into the data: the ``index`` of a sample is set at its draw.
    """

    def check_write(self, data: Any, where: str) -> None:
        """Raise `SchemaError` unless `data` is a TensorDict, a tensorclass or a list of them."""
        if type(data) is not TensorDict:
            check_collections(self, data, where)


def check_collections(writer: Any, data: Any, where: str) -> None:
    """Raise `SchemaError` unless `data` is a TensorDict, a tensorclass or a list of them.

    Args:
        writer: the writer that checks; the message names its class.
        data: the data to be written.
        where: the call that the message names.
    """
    for record in data if isinstance(data, list) else (data,):
        if not is_tensor_collection(record):
            raise SchemaError(
                f"{where}: a {type(writer).__name__} takes TensorDicts, got {type(record).__name__}; make it a "
                "TensorDict, or use RoundRobinWriter, which takes any data"
            )
