"""Storage for objects of any kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.indexing import basic_index, slots_at
from gleanrl.errors import EmptyBufferError, InvalidTypeError, SchemaError, UnsupportedError
from gleanrl.tree import Path


class ListStorage(Storage):
    """A list of objects, any kind, one per slot. Has no schema: nothing is checked.

    `extend` takes a list of objects, which are kept as they are (not copied), or one batch (a tensor, a
    TensorDict, or dictionaries and tuples of tensors), which is copied and split along its first dimension.

    Args:
        max_size: objects that fit.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.collate = collate
        self._items: list[Any] = []

    @property
    def _storage(self) -> list[Any]:
        """The live list."""
        return self._items

    def join(self, records: list[Any], where: str) -> Any:
        """Return the list itself."""
        return records

    def prepare(self, data: Any, *, single: bool, dim_extend: int, where: str) -> Prepared:
        """Return `data` as a list of objects."""
        if dim_extend:
            raise UnsupportedError(
                f"{where}: a ListStorage has no batch dimensions to exchange; leave dim_extend at 0"
            )
        items = [data] if single else split(data, where)
        if not items:
            raise SchemaError(f"{where}: got no record at all; write at least one")
        return Prepared(items, len(items))

    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Return as many objects as the index selects."""
        items = [data] if not shape else split(data, where)
        if len(items) != shape.numel():
            raise SchemaError(f"{where}: the index selects {shape.numel()} records, got {len(items)}")
        return Prepared(items, len(items))

    def _copy_span(self, rows: list[Any], skipped: int, start: int, count: int) -> None:
        for offset, item in enumerate(rows[skipped : skipped + count]):
            self._place((start + offset) % self.max_size, item)

    def _copy_slots(self, rows: list[Any], slots: torch.Tensor) -> None:
        for slot, item in zip(slots.tolist(), rows, strict=True):
            self._place(slot, item)

    def _pick(self, rows: list[Any], positions: torch.Tensor) -> list[Any]:
        return [rows[position] for position in positions.tolist()]

    def _place(self, slot: int, item: Any) -> None:
        if slot >= len(self._items):
            # A first write longer than the storage starts in the middle and fills every slot before it ends.
            self._items += [None] * (slot + 1 - len(self._items))
        self._items[slot] = item

    def clear(self) -> None:
        """Forget every object."""
        super().clear()
        self._items = []

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> list[Any]:
        """Return the objects in `slots`."""
        items = self._items
        return [items[slot] for slot in slots.tolist()]

    def get(self, index: Any) -> Any:
        """Return the object at an int, or the list of objects at any other index; never copies."""
        if not self._items:
            raise EmptyBufferError("the storage is empty: write records first")
        basic = basic_index(index, self.shape)
        if basic is not None and len(basic) == 1:
            return self._items[basic[0]]
        slots, _ = slots_at(index, self.shape)
        return self.fetch(slots)

    def state_dict(self) -> dict[str, Any]:
        """Return deep copies of the objects, and the generations."""
        return {**self._base_state(), "items": copy.deepcopy(self._items)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content by deep copies of saved objects."""
        self.steps_in(state_dict)
        try:
            items, size = state_dict["items"], state_dict["max_size"]
            sound = len(items) == state_dict["num_steps"] == len(state_dict["generations"]) <= size
        except (KeyError, TypeError) as cause:
            raise SchemaError("load_state_dict: expected what ListStorage.state_dict() returned") from cause
        if not sound or size != self._requested:
            raise SchemaError(
                f"load_state_dict: the state has {len(items)} items and max_size={size}, this storage "
                f"max_size={self._requested}"
            )
        fresh = copy.deepcopy(items)
        self.clear()
        self._items = fresh
        self._restore_base(state_dict)

    def check_valid(self) -> None:
        """Raise AssertionError if the storage's books don't agree; for tests."""
        assert len(self._items) == self._num_steps <= self.max_size
        assert bool((self._counters()[: len(self)] > 0).all())

    def __repr__(self) -> str:
        """Show class and size."""
        return f"ListStorage({len(self)} of {self.max_size} objects)"


def split(data: Any, where: str) -> list[Any]:
    """Return `data` as a list of records: a list as it is, a batch copied and split along its first dim."""
    if isinstance(data, list):
        return list(data)
    if isinstance(data, torch.Tensor) or is_tensor_collection(data):
        if not data.ndim:
            raise SchemaError(
                f"{where}: expected many records, got one without a batch dimension; `add` takes one"
            )
        return list(data.clone().unbind(0))
    if isinstance(data, (tuple, dict)):
        leaves, spec = _pytree.tree_flatten(data)
        if not leaves or not all(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves):
            raise InvalidTypeError(
                f"{where}: a tuple or dictionary is one batch of tensors; a list holds many objects"
            )
        if len({leaf.shape[0] for leaf in leaves}) != 1:
            raise SchemaError(
                f"{where}: the tensors' first dimensions differ: {sorted({x.shape[0] for x in leaves})}"
            )
        columns = [leaf.clone().unbind(0) for leaf in leaves]
        return [_pytree.tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return list(data)
    raise InvalidTypeError(
        f"{where}: expected a list of objects or a batch of tensors, got {type(data).__name__}"
    )


def collate(items: list[Any]) -> Any:
    """Return a batch of objects: tensors and TensorDicts stacked, others by torch's `default_collate`."""
    first = items[0]
    if isinstance(first, torch.Tensor) or is_tensor_collection(first):
        return torch.stack(list(items))
    return torch.utils.data.default_collate(items)
