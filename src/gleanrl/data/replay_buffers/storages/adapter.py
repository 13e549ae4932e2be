"""Adapter for storages that implement TorchRL's methods (`get`, `set`) instead of the native ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.adapters import Adapter, view_of
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage, count_all_as_written
from gleanrl.data.replay_buffers.storages.indexing import is_position, position, steps_at
from gleanrl.data.replay_buffers.storages.lists import collate
from gleanrl.data.replay_buffers.storages.record_formats import swap_batch_dims
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.errors import InvalidTypeError, SchemaError, UnsupportedError

# A view's class derives from the user's class too (see `view_of`), so `super()` finds a concrete method there.
# mypy: disable-error-code="safe-super"


# TorchRL's methods, and the native method that a native class overrides for the same purpose.
_METHODS = {
    "get": "fetch",
    "set": "prepare",
    "_empty": "clear",
    "state_dict": "_plain_content",
    "load_state_dict": "_take_content",
    "__len__": None,
}
_NEEDED = ("max_size", "ndim", *_METHODS)


def as_storage(storage: Any) -> Any:
    """Return a storage in the form that buffers use (see `view_of`). Other objects are returned unchanged."""
    return view_of(storage, Storage, StorageAdapter, _METHODS, _NEEDED)


class _One(list[Any]):
    """One time step without its time dimension, for a write at an int index."""


class StorageAdapter(Adapter, Storage):
    """Presents a user's storage, which keeps records by `set` and `get`, as a native storage.

    The adapter keeps the length, end, generations and version, and the user's storage keeps the records. A buffer
    doesn't notice records that the user writes directly into the storage. The user's `set` can only check records after
    the generations have been counted up.
    """

    __slots__ = ()

    def opened(self) -> None:
        """Set up the native attributes, and take over the records that the storage holds already.

        Raises:
            InvalidTypeError: the constructor of the user's class didn't call the native one.
        """
        part = self.part
        if self.foreign:
            Storage.__init__(self, part.max_size, ndim=part.ndim)
        elif "change_log" not in vars(part):
            raise InvalidTypeError(
                f"storage: the constructor of a {type(part).__name__} has to call super().__init__(max_size)"
            )
        if "get" in self.own and "collate" not in vars(self):
            self.collate = _collated
        if "__len__" in self.own and len(part) > self.num_steps * self.rows_per_step:
            if not self.rows_per_step:
                self.fix_batch(torch.Size(part.shape[1:]))
            count_all_as_written(self, len(part) // self.rows_per_step)

    set, __setitem__ = Storage.set, Storage.__setitem__
    state_dict = Storage.state_dict

    def join(self, records: list[Any], where: str) -> Any:
        """Return the list unchanged, unless the storage inherits the native way to make a batch of it."""
        return records if "set" in self.own else super().join(records, where)

    def prepare(self, data: Any, *, single: bool, dim_extend: int, where: str) -> Prepared:
        """Return the data, of which only the batch dimensions are checked (`SchemaError`).

        The user's `set` checks the rest when the data are written.
        """
        if "set" not in self.own:
            return super().prepare(data, single=single, dim_extend=dim_extend, where=where)
        if dim_extend and not single:
            data = swap_batch_dims(data, dim_extend, where)
        lead = _leading(data, self.ndim - single, where)
        if not self.rows_per_step:
            self.fix_batch(lead[-(self.ndim - 1) :])
        return Prepared(_One([data]), 1) if single else Prepared(data, lead[0])

    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Return the data unchecked. The user's `set` checks them when they are written."""
        if "set" not in self.own:
            return super().prepare_selection(data, shape, where)
        return Prepared(data if shape else _One([data]), shape.numel())

    def _copy_span(self, rows: Any, skipped: int, start: int, count: int) -> None:
        if "set" not in self.own:
            super()._copy_span(rows, skipped, start, count)
        elif isinstance(rows, _One):
            self.part.set(start, *rows)
        else:
            steps = torch.arange(start, start + count, device="cpu") % self.capacity_steps
            if start > len(self.part):
                # A first write longer than the storage starts in the middle. Many storages refuse gaps, so
                # the steps are written in the order of their slots.
                steps, order = steps.sort()
                rows, skipped = _rows_at(rows, order + skipped), 0
            self.part.set(steps, _rows_at(rows, slice(skipped, skipped + count)) if skipped else rows)

    def _copy_slots(self, rows: Any, slots: torch.Tensor) -> None:
        if rows is None:
            return  # `note_written`: the user's storage holds the records already
        if "set" not in self.own:
            super()._copy_slots(rows, slots)
        elif isinstance(rows, _One):
            self.part.set(self._index(int(slots)), *rows)
        else:
            self.part.set(self._index(slots), rows)

    def _pick(self, rows: Any, positions: torch.Tensor) -> Any:
        if "set" not in self.own:
            return super()._pick(rows, positions)
        return rows if isinstance(rows, _One) else _rows_at(rows, positions)

    def _forget(self) -> None:
        if "_empty" in self.own:
            self.call("_empty")
        else:
            super()._forget()

    def note_written(self, index: Any) -> None:
        """Record a write that the user's own writer made directly, at an index over time steps."""
        if torch.is_tensor(index) and index.ndim == 2:
            index = index[:, 0]
        steps = (
            torch.tensor([position(index)], device="cpu")
            if is_position(index)
            else steps_at(index, self.capacity_steps)
        )
        if not self.rows_per_step:
            self.fix_batch(torch.Size(self.part.shape[1:]))
        per_step = self.rows_per_step
        slots = (
            steps[steps >= 0].unique()[:, None] * per_step + torch.arange(per_step, device="cpu")
        ).reshape(-1)
        length = len(self.part) // per_step
        end = (int(steps[-1]) + 1) % self.capacity_steps
        self.write_slots(Prepared(None, len(steps)), slots, num_steps=length, end=end)

    def get(self, index: Any) -> Any:
        """Return the records at an index, by the user's `get` if there is one."""
        return self.part.get(index) if "get" in self.own else super().get(index)

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> Any:
        """Return the records in `slots`, in the form that the user's `get` returns.

        Raises:
            UnsupportedError: `paths` are given, and the records aren't TensorDicts.
        """
        if "get" not in self.own:
            return super().fetch(slots, paths)
        records = self.part.get(self._index(slots))
        if paths is None:
            return records
        if not is_tensor_collection(records):
            raise UnsupportedError("keys: only records that are TensorDicts can be fetched in part")
        return records.select(*map(as_key, paths))

    def _index(self, slots: Any) -> Any:
        """Return slots as an index of the user's storage. With ``ndim > 1`` it is one tensor for each dimension."""
        if self.ndim == 1:
            return slots
        shape = (self.capacity_steps, *self.batch_shape)
        return torch.unravel_index(torch.as_tensor(slots, device="cpu"), shape)

    def _current_content(self) -> Any:
        """Return a deep copy of the state that the user's storage returns, if its class overrides `state_dict`."""
        return (
            copy.deepcopy(self.part.state_dict()) if "state_dict" in self.own else super()._current_content()
        )

    def copied(self, value: StorageState) -> StorageState:
        """Return a snapshot with its records in private memory (see `Storage.copied`)."""
        return value if "state_dict" in self.own else super().copied(value)

    def _plain_content(self, content: Any) -> dict[str, Any]:
        return {"content": content} if "state_dict" in self.own else super()._plain_content(content)

    def _parse_content(self, reader: StateReader, state: StorageState) -> Any:
        if "load_state_dict" not in self.own:
            return super()._parse_content(reader, state)
        if state.fitted(self.requested_size).moved is not None:
            raise SchemaError(
                f"load_state_dict: the state has max_size={state.max_size}; this {type(self.part).__name__} has "
                f"{self.requested_size}: build it with max_size={state.max_size}"
            )
        return copy.deepcopy(reader.get("content"))

    def _take_content(self, content: Any, rows: int) -> None:
        if "load_state_dict" in self.own:
            self.part.load_state_dict(copy.deepcopy(content))
        else:
            super()._take_content(content, rows)


def _collated(records: Any) -> Any:
    """Return fetched records as one batch. A list holds single records, anything else is a batch already."""
    return collate(records) if isinstance(records, list) else records


def _leading(data: Any, dims: int, where: str) -> torch.Size:
    """Return the first `dims` batch dimensions of records of any type."""
    if isinstance(data, list) and dims == 1:
        shape = torch.Size([len(data)])
    elif is_tensor_collection(data):
        shape = data.batch_size
    else:
        leaves = [leaf for leaf in _pytree.tree_leaves(data) if hasattr(leaf, "shape")]
        shape = torch.Size(leaves[0].shape if leaves else ())
    if len(shape) < dims or 0 in shape[:dims]:
        raise SchemaError(f"{where}: expected records with {dims} batch dimensions, got {tuple(shape)}")
    return shape[:dims]


def _rows_at(data: Any, index: Any) -> Any:
    """Return the records at an index over the first dimension."""
    if isinstance(data, list):
        return data[index] if isinstance(index, slice) else [data[position] for position in index.tolist()]
    if is_tensor_collection(data) or isinstance(data, torch.Tensor):
        return data[index]
    return _pytree.tree_map(lambda leaf: leaf[index], data)
