"""Writing of records and priorities into a buffer."""

from __future__ import annotations

from collections.abc import Callable
from operator import length_hint
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path, leaf_at
from gleanrl._os.interrupts import to_the_end
from gleanrl.data.replay_buffers.components import Parts
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.samplers.priority_table import reduce_priority
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import is_key, slots_at, slots_of_update, swapped
from gleanrl.data.replay_buffers.writers.base import no_index
from gleanrl.errors import (
    GleanError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)

_ALL_ROWS = slice(None)


class Inserter:
    """Writes records through transforms, writer and storage, and updates the sampler.

    All checks of a record come before the first change, and a write that has begun completes.

    Args:
        gate: the buffer's lock.
        parts: the buffer's parts.
    """

    only_tensordicts = False
    """Whether records must be TensorDicts."""
    put: Callable[..., Any] | None = None
    """Replaces `Writer.store` if the user's subclass of the buffer overrides `_add` or `_extend`."""

    def __init__(self, gate: BufferLock, parts: Parts) -> None:
        self._gate = gate
        self._parts = parts

    def store(self, data: Any, single: bool, where: str, prioritize: bool = False) -> Any:
        """Store one record or many and return their index (see `ReplayBuffer.add` and `extend`).

        The rate limiter may make the call wait. Then the buffer claims its storage.

        Args:
            data: one record or many.
            single: whether it is one record.
            where: the name of the call in error messages.
            prioritize: whether to use priorities that the records carry.
        """
        if self.only_tensordicts and type(data) is not TensorDict:
            _check_tensordicts(data, single, where)
        parts = self._parts
        # Snapshots that are being saved need copies of the slots to be overwritten. Copying before the lock is taken
        # delays no other thread.
        if parts.storage.open_snapshots:
            parts.storage.preserve_next(1 if single else length_hint(data))
        if self._gate.learner_waits:
            self._gate.give_way()
        undo: Callable[[], None] | None = None
        # The lock's block holds no `try`: an interrupt at that line would leave the lock held (CPython 3.11).
        try:
            with self._gate.inserting:
                if not parts.writes:
                    parts.claim()
                storage, transforms = parts.storage, parts.transforms
                if transforms.writes:
                    undo = self._undoing()
                dim_extend = 0 if single else parts.dim_extend
                if not single and isinstance(data, list):
                    data, dim_extend = storage.join(data, where), 0
                if transforms.writes or (transforms.reads and not transforms.settled):
                    slot_dims = storage.ndim - single
                    transforms.settle(data, slot_dims)
                    data = transforms.write(data, slot_dims)
                    if data is None:
                        return no_index(storage)
                takes = prioritize and parts.sampler.takes_priorities
                priorities = self._brought(data, single, dim_extend, where) if takes else None
                index = (self.put or parts.writer.store)(data, single, dim_extend, where)
                transforms.settled = True
                if parts.follows:
                    parts.sampler.follow(storage)
                if priorities is not None:
                    slots = slots_of_update(index, storage.shape)
                    stored = slots >= 0
                    slots, priorities = slots[stored], priorities[stored]
                    parts.sampler.prioritize(storage, slots, priorities, storage.generation(slots))
                return index
        except BaseException:
            if undo is not None:
                undo()
            raise

    def _undoing(self) -> Callable[[], None]:
        """Return a function that restores the transforms' present state, unless rows were stored meanwhile.

        Transforms act before the storage checks the data, so a refused write has already changed held steps and counted
        values. If an interrupted write stored its rows, the old steps would be stored twice.
        """
        storage, restore = self._parts.storage, self._parts.transforms.restorer()
        written = storage.rows_written

        def undo() -> None:
            with self._gate.lock:
                if storage.rows_written == written:
                    to_the_end(restore)

        return undo

    def _brought(self, data: Any, single: bool, dim_extend: int, where: str) -> torch.Tensor | None:
        """Return the priorities that records carry, one each, time first; None if they carry none."""
        return None

    def replace(self, index: Any, value: Any) -> None:
        """Claim the storage, and replace stored records or a column of them (see `ReplayBuffer.__setitem__`)."""
        undo: Callable[[], None] | None = None
        try:  # outside of the lock's block, as in `store`
            with self._gate.lock:
                if not self._parts.writes:
                    self._parts.claim()
                if self._parts.transforms.writes:
                    undo = self._undoing()
                self._replace(index, value)
        except BaseException:
            if undo is not None:
                undo()
            raise

    def _replace(self, index: Any, value: Any) -> None:
        """Carry out `replace` under the lock."""
        parts, replaces_column = self._parts, is_key(index)
        storage, time = parts.storage, parts.written_time
        if replaces_column:
            index, value = _ALL_ROWS, _with_column(storage, time, index, value)
        slots, shape = slots_at(index, storage.shape, time)
        if value is None:
            raise InvalidTypeError("__setitem__: expected records, got None")
        value = parts.transforms.write(value, len(shape))
        if value is None:
            return
        parts.writer.check_write(value, "__setitem__")
        prepared = storage.prepare_selection(value, shape, "__setitem__")
        if slots.shape[0]:
            storage.write_slots(prepared, slots, amended=replaces_column)
            parts.sampler.follow(storage)

    def update_priority(self, index: Any, priority: Any, generation: Any) -> None:
        """Set priorities (see `ReplayBuffer.update_priority`)."""
        self._gate.learner_waits = True
        with self._gate.lock:
            self._gate.learner_waits = False
            storage, sampler = self._parts.storage, self._parts.sampler
            # With generations, an index may name a record that is no longer stored: its update is dropped, not refused.
            # A tuple, because creating the torch.Size of `storage.shape` takes longer.
            steps = storage.num_steps if generation is None else storage.capacity_steps
            slots = slots_of_update(index, (steps, *storage.batch_shape), not sampler.takes_priorities)
            sampler.prioritize(storage, slots, priority, generation)

    def mark_update(self, index: Any) -> None:
        """Give records the priority of new ones (see `ReplayBuffer.mark_update`)."""
        with self._gate.lock:
            storage = self._parts.storage
            slots = slots_of_update(index, storage.shape)
            slots = slots[slots >= 0]
            to_the_end(lambda: self._parts.sampler.mark(storage, slots))

    def generation(self, index: Any) -> torch.Tensor:
        """Return the generations of slots (see `ReplayBuffer.generation`)."""
        with self._gate.lock:
            storage = self._parts.storage
            slots = slots_of_update(index, storage.shape)
            if (slots < 0).any():
                raise IndexRangeError(
                    "generation: got the index -1, which marks a record that wasn't stored; pass index[index >= 0]"
                )
            return storage.generation(slots)


class TensorDictInserter(Inserter):
    """An `Inserter` of TensorDicts, which may carry their priorities.

    Args:
        gate: see `Inserter`.
        parts: see `Inserter`.
        priority_key: the key of the priorities.
    """

    only_tensordicts = True

    def __init__(self, gate: BufferLock, parts: Parts, priority_key: NestedKey) -> None:
        super().__init__(gate, parts)
        self.priority_key = priority_key

    def _brought(self, data: Any, single: bool, dim_extend: int, where: str) -> torch.Tensor | None:
        """Return the checked priorities that records carry; None if any record of a list carries none.

        Raises:
            SchemaError: the entry doesn't have one or more values for each record.
            InvalidArgumentError: a priority is negative, infinite or NaN.
        """
        sampler, dims = self._parts.sampler, self._parts.storage.ndim - single
        if isinstance(data, list):  # records of a list storage
            found = [self._brought(record, True, 0, where) for record in data]
            known = [value for value in found if value is not None]
            return torch.cat(known) if known and len(known) == len(found) else None
        priority = leaf_at(data, as_path(self.priority_key))
        if priority is None:
            return None
        lead = data.batch_size[: max(dims, dim_extend + 1)]
        if dim_extend and priority.shape[: len(lead)] == lead:
            priority, lead = priority.transpose(0, dim_extend), swapped(lead, dim_extend)
        values = self._reduced(priority, lead[:dims].numel(), sampler.reduction, where)
        sampler.check_priorities(values)
        return values

    def _reduced(self, priority: Any, count: int, reduction: str, where: str) -> torch.Tensor:
        """Return one priority for each of `count` records from an entry with one or more values per record."""
        size = priority.numel() if isinstance(priority, torch.Tensor) else -1
        if size < count or (size % count if count else size):
            raise SchemaError(
                f"{where}: {as_key(as_path(self.priority_key))!r} expected values for {count} records, got shape "
                f"{tuple(getattr(priority, 'shape', ()))}"
            )
        return reduce_priority(priority.detach().reshape(count, size // max(count, 1)), count, reduction)

    def take_priorities(
        self, data: TensorDictBase, mark: Callable[[Any], None], update: Callable[[Any, Any, Any], None]
    ) -> None:
        """Set the priorities of a batch's records (see `TensorDictReplayBuffer.update_tensordict_priority`).

        Calls `mark` if the batch has no priorities, otherwise `update`, under the lock.

        Args:
            data: the batch.
            mark: the buffer's `mark_update`, which a user's subclass may override.
            update: the buffer's `update_priority`, which a user's subclass may override.
        """
        with self._gate.lock:
            sampler, ndim = self._parts.sampler, self._parts.storage.ndim
            if not sampler.takes_priorities:
                return
            try:
                index, priority, generation = self._priorities(data, ndim, sampler.reduction)
            except RuntimeError as error:
                if isinstance(error, GleanError) or not isinstance(data, LazyStackedTensorDict):
                    raise
                # Records of different lengths: their entries can't be stacked.
                found = [self._priorities(record, ndim, sampler.reduction) for record in data.unbind(0)]
                index, priority, generation = (
                    None if any(part is None for part in column) else torch.cat(column)
                    for column in zip(*found, strict=True)
                )
            if priority is None:
                mark(index)
            else:
                update(index, priority, generation)

    def _priorities(self, data: TensorDictBase, ndim: int, reduction: str) -> tuple[Any, Any, Any]:
        """Return the indices in a batch or record, its priorities or None, and its generations or None."""
        where = "update_tensordict_priority"
        index = data.get("index", None)
        if index is None:
            raise MissingKeyError(f"{where}: the batch has no 'index'; pass a batch that sample() returned")
        index = index.reshape(-1, ndim) if ndim > 1 else index.reshape(-1)
        priority, generation = data.get(as_path(self.priority_key), None), data.get("_generation", None)
        if priority is not None:
            priority = self._reduced(priority, index.shape[0], reduction, where)
        return index, priority, None if generation is None else generation.reshape(-1)


def _check_tensordicts(data: Any, single: bool, where: str) -> None:
    for record in data if isinstance(data, list) and not single else (data,):
        if not isinstance(record, TensorDictBase):
            raise InvalidArgumentError(
                f"{where}: expected a TensorDict, got {type(record).__name__}; use a ReplayBuffer for other data"
            )


def _with_column(storage: Storage, time: int, key: Any, column: Any) -> Any:
    """Return a shallow copy of the whole content, in the written layout, with a new tensor at `key`."""
    content = storage.get(_ALL_ROWS)
    if not is_tensor_collection(content):
        raise UnsupportedError(
            f"__setitem__: got the key {key!r}, but only a tensor storage of TensorDicts has columns; pass a position"
        )
    content = content.transpose(0, time) if time else content
    changed = content.clone(recurse=False)
    try:
        changed.set(key, column)
    except (RuntimeError, KeyError, TypeError, ValueError) as cause:
        raise SchemaError(
            f"__setitem__: expected a tensor with {tuple(content.batch_size)} rows for the column {key!r}: {cause}"
        ) from cause
    return changed
