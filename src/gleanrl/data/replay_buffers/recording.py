"""The writing half of a replay buffer: records and priorities on their way in."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import is_tensor_collection

from gleanrl.data.replay_buffers.parts import Parts
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.indexing import is_key, slots_of_update
from gleanrl.errors import (
    IndexRangeError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)
from gleanrl.records import Placement, Selection

_WHOLE = slice(None)


class Recording(Parts):
    """Takes records in through transforms, writer and storage, and tells the sampler."""

    _dim_extend: int | None = None

    @property
    def dim_extend(self) -> int:
        """The batch dimension of extended data that is time; fixed at construction."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    def add(self, data: Any) -> Any:
        """Store one record (with ``ndim > 1`` one time step of all batch entries).

        Args:
            data: a record without a time dimension. It isn't changed, and nothing of it is kept
                (`ListStorage` keeps the object itself).

        Returns:
            Its index: an int, or ``(n, ndim)`` coordinates. An empty index if a transform held the record
            back.

        Raises:
            SchemaError: other keys, shapes or dtypes than the first write had; nothing changed.
            CapacityError: the first write found too little memory or disk.
        """
        return self._store(data, single=True, where="add")

    def extend(self, data: Any) -> torch.Tensor:
        """Store many records, the oldest first; the newest stay if they are more than fit.

        Args:
            data: records ``[T, ...]``; for ``ndim > 1`` ``[*batch, T]`` with time at `dim_extend`. A
                TensorDict, a tensor, or a dictionary or tuple of tensors is one batch; a list holds single
                records, as `add` takes them. It isn't changed, and nothing of it is kept (`ListStorage` keeps
                the objects of a list themselves). ``index``, ``_weight``, ``priority_weight`` and
                ``_generation``, which samples may carry, are left out, and so are rows that are no steps:
                those where a stored ``("collector", "mask")`` is False (with ``ndim > 1`` they are kept, and
                never drawn).

        Returns:
            The indices of the records stored, ``(n,)`` int64 or ``(n, ndim)`` coordinates, in the order of
            the data: all of them, or as many of the last as fit. An empty index if a transform held the
            records back.

        Raises:
            SchemaError: no record, or other keys, shapes or dtypes than the first write had; nothing changed.
            CapacityError: the first write found too little memory or disk.
        """
        return self._store(data, single=False, where="extend")

    def _store(self, data: Any, single: bool, where: str) -> Any:
        with self._lock:
            storage, transforms = self._storage, self._transforms
            dim_extend = 0 if single else self.dim_extend
            if not single and isinstance(data, list):
                data, dim_extend = storage.join(data, where), 0
            if len(transforms):
                slot_dims = storage.ndim - single
                transforms.settle(data, slot_dims)
                data = transforms.write(data, slot_dims)
                if data is None:
                    return _no_index(storage)
            self._writer.check_write(data, where)
            prepared = storage.prepare(data, single=single, dim_extend=dim_extend, where=where)
            if not prepared.num_steps:
                return _no_index(storage)
            placement = self._writer.place(prepared)
            if isinstance(placement, Selection):
                storage.write_selected(prepared, placement)
            else:
                storage.write(prepared, placement)
            self._sampler.follow(storage)
            self._writer.confirm()
            transforms.confirm()
            return _index_of(placement, storage, single)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored records, or a column by its key; inverse transforms act first, the cursor stays.

        Records replaced by position are new ones to a prioritized sampler; with another column they keep
        their priorities.

        Args:
            index: as in `__getitem__`, within the stored part. Of equal positions the last one wins.
            value: records of the schema, of exactly the shape that the index selects.

        Raises:
            IndexRangeError: outside the stored part.
            SchemaError: another shape, dtype or set of keys; nothing changed.
        """
        with self._lock:
            storage, whole = self._storage, is_key(index)
            if whole:
                index, value = _WHOLE, self._with_column(index, value)
            slots, shape = storage.slots_of(index)
            if value is None:
                raise InvalidTypeError("__setitem__: expected records, got None")
            value = self._transforms.write(value, len(shape))
            if value is None:
                return
            self._writer.check_write(value, "__setitem__")
            prepared: Prepared = storage.prepare_selection(value, shape, "__setitem__")
            if slots.shape[0]:
                storage.write_slots(prepared, slots, amended=whole)
                self._sampler.follow(storage)

    def _with_column(self, key: Any, column: Any) -> Any:
        """Return the whole content with another tensor at `key`; the content itself isn't changed."""
        whole = self._storage.get(_WHOLE)
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

    def empty(self) -> None:
        """Forget every record; memory, schema and random state stay."""
        with self._lock:
            self._writer.check_clear()
            self._drop_ahead()
            self._storage.clear()
            self._sampler.follow(self._storage)

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Give stored records the priorities that a prioritized sampler draws them by.

        An update for a slot that was overwritten since its record was drawn is dropped and counted
        (`stats().priorities_dropped`): it belongs to a record that is gone.

        Args:
            index: slots as `extend` or `sample` returned them: an int or ``(n,)`` integers; with ``ndim > 1``
                ``(n, ndim)`` coordinates or a tuple of ``ndim`` tensors. -1 is skipped.
            priority: one number, or one for each index; 0 or more and finite.
            generation: how often each slot had been written when its record was drawn, ``(n,)`` int64, as
                samples carry it; None for the generation at the slot's last draw (a slot that was never drawn
                takes any update).

        Raises:
            IndexRangeError: an index outside the stored part, or with `generation` outside the storage: a
                record that was forgotten meanwhile (`empty`) is dropped and counted; nothing changed.
            InvalidArgumentError: a priority that is negative, infinite or no number; nothing changed.
            SchemaError: another number of priorities or generations than of indices; nothing changed.
        """
        with self._lock:
            storage, sampler = self._storage, self._sampler
            # With generations a record may be known that isn't stored any more.
            shape = (
                storage.shape
                if generation is None
                else torch.Size((storage.capacity_steps, *storage.batch_shape))
            )
            slots = slots_of_update(index, shape, check=not sampler.takes_priorities)
            sampler.update_priority(storage, slots, priority, generation)

    def mark_update(self, index: Any) -> None:
        """Give stored records the priority of new ones, as after a write; does nothing without priorities.

        Args:
            index: see `update_priority`.

        Raises:
            IndexRangeError: an index outside the stored part; nothing changed.
        """
        with self._lock:
            slots = self._slots(index)
            self._sampler.mark_update(self._storage, slots[slots >= 0])

    def generation(self, index: Any) -> torch.Tensor:
        """Return how often each slot has been written by now: what `update_priority` compares with.

        After `extend`, ``update_priority(index, priority, buffer.generation(index))`` is for the records just
        written, whatever was drawn from their slots before.

        Args:
            index: see `update_priority`, without -1.

        Returns:
            ``(n,)`` int64.

        Raises:
            IndexRangeError: an index outside the stored part.
        """
        with self._lock:
            slots = self._slots(index)
            if (slots < 0).any():
                raise IndexRangeError("generation: index -1 stands for no record")
            return self._storage.generation(slots)

    def _slots(self, index: Any) -> torch.Tensor:
        return slots_of_update(index, self._storage.shape)


def _no_index(storage: Storage) -> torch.Tensor:
    """Return what a write returns that stored nothing."""
    shape = (0,) if storage.ndim == 1 else (0, storage.ndim)
    return torch.empty(shape, dtype=torch.int64, device="cpu")


def _index_of(placement: Placement | Selection, storage: Storage, single: bool) -> Any:
    """Return what a write returns: an int, slots ``(n,)``, or coordinates ``(n, ndim)``."""
    if isinstance(placement, Selection):
        return int(placement.returned[0]) if single else placement.returned
    if storage.ndim == 1 and single:
        return placement.start
    steps = torch.arange(placement.start, placement.start + placement.num_steps, device="cpu")
    if placement.wraps:
        steps %= placement.capacity
    if storage.ndim == 1:
        return steps
    return torch.cartesian_prod(steps, *(torch.arange(size, device="cpu") for size in storage.batch_shape))
