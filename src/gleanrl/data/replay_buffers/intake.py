"""Records and priorities on their way into a buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from gleanrl.data.replay_buffers.gate import Gate
from gleanrl.data.replay_buffers.parts import Parts
from gleanrl.data.replay_buffers.samplers.priority_values import reduce_priority
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.indexing import is_key, slots_of_update
from gleanrl.data.replay_buffers.writers.base import no_index
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)
from gleanrl.system.interrupts import to_the_end
from gleanrl.tree import NestedKey, as_key, as_path

_WHOLE = slice(None)


class Intake:
    """Takes records in, through transforms, writer and storage; the sampler follows.

    A record is checked before anything changes; a write that has begun ends.

    Args:
        gate: the buffer's.
        parts: the buffer's.
        dim_extend: the batch dimension of extended data that is time; None for the last one that is slots.
    """

    put: Callable[..., Any] | None = None
    """What writes in place of `Writer.store`: a user's own `_add` and `_extend` of the buffer."""

    def __init__(self, gate: Gate, parts: Parts, dim_extend: int | None) -> None:
        self._gate = gate
        self._parts = parts
        self._dim_extend = dim_extend

    @property
    def dim_extend(self) -> int:
        """The batch dimension of extended data that is time."""
        return self._parts.storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    def store(self, data: Any, single: bool, where: str) -> Any:
        """Store one record or many; return their index (see `ReplayBuffer.add` and `extend`)."""
        with self._gate.lock:
            parts = self._parts
            storage, transforms = parts.storage, parts.transforms
            dim_extend = 0 if single else self._dim_extend
            if dim_extend is None:
                dim_extend = storage.ndim - 1
            if not single and isinstance(data, list):
                data, dim_extend = storage.join(data, where), 0
            if transforms.writes or (transforms.reads and not transforms.settled):
                slot_dims = storage.ndim - single
                transforms.settle(data, slot_dims)
                data = transforms.write(data, slot_dims)
                if data is None:
                    return no_index(storage)
            index = (self.put or parts.writer.store)(data, single, dim_extend, where)
            transforms.settled = True
            parts.sampler.follow(storage)
            return index

    def replace(self, index: Any, value: Any) -> None:
        """Replace stored records, or a column of them (see `ReplayBuffer.__setitem__`)."""
        with self._gate.lock:
            parts, whole = self._parts, is_key(index)
            storage = parts.storage
            if whole:
                index, value = _WHOLE, _with_column(storage, index, value)
            slots, shape = storage.slots_of(index)
            if value is None:
                raise InvalidTypeError("__setitem__: expected records, got None")
            value = parts.transforms.write(value, len(shape))
            if value is None:
                return
            parts.writer.check_write(value, "__setitem__")
            prepared = storage.prepare_selection(value, shape, "__setitem__")
            if slots.shape[0]:
                storage.write_slots(prepared, slots, amended=whole)
                parts.sampler.follow(storage)

    def update_priority(self, index: Any, priority: Any, generation: Any) -> None:
        """Take priorities (see `ReplayBuffer.update_priority`)."""
        with self._gate.lock:
            storage, sampler = self._parts.storage, self._parts.sampler
            # With generations a record may be known that isn't stored any more.
            shape = (
                storage.shape
                if generation is None
                else torch.Size((storage.capacity_steps, *storage.batch_shape))
            )
            slots = slots_of_update(index, shape, check=not sampler.takes_priorities)
            sampler.prioritize(storage, slots, priority, generation)

    def mark_update(self, index: Any) -> None:
        """Give records the priority of new ones (see `ReplayBuffer.mark_update`)."""
        with self._gate.lock:
            storage = self._parts.storage
            slots = slots_of_update(index, storage.shape)
            slots = slots[slots >= 0]
            to_the_end(lambda: self._parts.sampler.mark(storage, slots))

    def generation(self, index: Any) -> torch.Tensor:
        """Return how often slots were written (see `ReplayBuffer.generation`)."""
        with self._gate.lock:
            storage = self._parts.storage
            slots = slots_of_update(index, storage.shape)
            if (slots < 0).any():
                raise IndexRangeError("generation: index -1 stands for no record")
            return storage.generation(slots)


class TensorDictIntake(Intake):
    """An `Intake` of TensorDicts, which may bring their priorities.

    Args:
        gate: see `Intake`.
        parts: see `Intake`.
        dim_extend: see `Intake`.
        priority_key: where priorities stand.
    """

    def __init__(self, gate: Gate, parts: Parts, dim_extend: int | None, priority_key: NestedKey) -> None:
        super().__init__(gate, parts, dim_extend)
        self.priority_key = priority_key

    def store(self, data: Any, single: bool, where: str) -> Any:
        """Store TensorDicts; a single one with the priority that it brings, if any."""
        for record in data if isinstance(data, list) and not single else (data,):
            if not isinstance(record, TensorDictBase):
                raise InvalidArgumentError(
                    f"{where}: expected a TensorDict, got {type(record).__name__}; ReplayBuffer takes other data"
                )
        if not single:
            return super().store(data, single, where)
        with self._gate.lock:
            values = self._brought(data)
            index = super().store(data, single, where)
            if values is not None:
                storage = self._parts.storage
                slots = slots_of_update(index, storage.shape)
                stored = slots >= 0  # a writer that chooses may have left it out
                slots, values = slots[stored], values[: slots.shape[0]][stored]
                self._parts.sampler.prioritize(storage, slots, values, storage.generation(slots))
            return index

    def _brought(self, record: TensorDictBase) -> torch.Tensor | None:
        """Return the priorities that a record brings, ``(n,)``, after checking them; None if it brings none."""
        sampler = self._parts.sampler
        priority = record.get(as_path(self.priority_key), None)
        if priority is None or not sampler.takes_priorities:
            return None
        count = record.batch_size[: self._parts.storage.ndim - 1].numel()
        values = self._reduced(priority, count, sampler.reduction, "add")
        sampler.check_priorities(values)
        return values

    def _reduced(self, priority: Any, count: int, reduction: str, where: str) -> torch.Tensor:
        """Return one priority for each of `count` records out of a priority entry."""
        size = priority.numel() if isinstance(priority, torch.Tensor) else -1
        if size < count or (size % count if count else size):
            raise SchemaError(
                f"{where}: {as_key(as_path(self.priority_key))!r} expected values for {count} records, got shape "
                f"{tuple(getattr(priority, 'shape', ()))}"
            )
        return reduce_priority(priority.detach().reshape(count, size // max(count, 1)), count, reduction)

    def priorities_of(self, data: TensorDictBase) -> tuple[Any, Any, Any] | None:
        """Return index, priorities and generations of a batch; None if the sampler takes no priorities.

        The priorities are None where the batch has no such entry.
        """
        where = "update_tensordict_priority"
        sampler, ndim = self._parts.sampler, self._parts.storage.ndim
        if not sampler.takes_priorities:
            return None
        index = data.get("index", None)
        if index is None:
            raise MissingKeyError(f"{where}: the batch has no 'index'; give it one of sample()")
        index = index.reshape(-1, ndim) if ndim > 1 else index.reshape(-1)
        priority, generation = data.get(as_path(self.priority_key), None), data.get("_generation", None)
        if priority is not None:
            priority = self._reduced(priority, index.shape[0], sampler.reduction, where)
        return index, priority, None if generation is None else generation.reshape(-1)


def _with_column(storage: Storage, key: Any, column: Any) -> Any:
    """Return the whole content with another tensor at `key`; the content itself isn't changed."""
    whole = storage.get(_WHOLE)
    if not is_tensor_collection(whole):
        raise UnsupportedError(
            f"__setitem__: the key {key!r} needs a buffer of TensorDicts; index by position"
        )
    changed = whole.clone(recurse=False)
    try:
        changed.set(key, column)
    except (RuntimeError, KeyError, TypeError, ValueError) as cause:
        raise SchemaError(
            f"__setitem__: expected a tensor with {tuple(whole.batch_size)} rows for the column {key!r}: {cause}"
        ) from cause
    return changed
