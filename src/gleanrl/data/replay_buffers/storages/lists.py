"""Storage for objects of any kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from typing_extensions import Self

from gleanrl.checkpoint.values import Items
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.direct import Prepared
from gleanrl.data.replay_buffers.storages.indexing import basic_index, slots_at
from gleanrl.data.replay_buffers.storages.slots import UNBOUNDED
from gleanrl.data.replay_buffers.storages.snapshots import Ahead, AtEnd, ContentCopy, StorageState
from gleanrl.devices import usable_device
from gleanrl.errors import EmptyBufferError, InvalidTypeError, SchemaError, UnsupportedError
from gleanrl.state import StateReader
from gleanrl.tree import Path


class ListStorage(Storage):
    """A list of objects, any kind, one per slot. Has no schema: nothing is checked.

    `extend` takes a list of objects, which are kept as they are (not copied), or one batch (a tensor, a
    TensorDict, or dictionaries and tuples of tensors), which is copied and split along its first dimension.

    Args:
        max_size: objects that fit; None for any number, or as many as the sampler of its buffer has room for.
        compilable: has no effect: compiled programs call buffers, they don't contain them.
        device: where tensors and TensorDicts are kept, also those within other objects that torch's pytrees know; None
            for where they come from.
    """

    _compresses = False  # whether objects are kept otherwise than they came

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(UNBOUNDED if max_size is None else max_size)
        self.collate = collate
        self.device = None if device is None else usable_device(device)
        self._items: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with copies of the objects.

        Raises:
            UnsupportedError: if an object holds a tensor that a graph computed, which torch can't copy with its graph.
        """
        new = memo[id(self)] = type(self).__new__(type(self))
        with _RefusingGraphs():
            new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

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
        if self.max_size == UNBOUNDED:
            self.generations.of_all(self.num_steps + len(items))
        return Prepared(self._moved(items), len(items))

    def _moved(self, items: list[Any]) -> list[Any]:
        """Return objects on the storage's device."""
        if self.device is None:
            return items
        moved: list[Any] = _pytree.tree_map(self._on_device, items, is_leaf=is_tensor_collection)
        return moved

    def _on_device(self, leaf: Any) -> Any:
        movable = isinstance(leaf, torch.Tensor) or is_tensor_collection(leaf)
        return leaf.to(self.device) if movable else leaf

    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Return as many objects as the index selects."""
        items = [data] if not shape else split(data, where)
        if len(items) != shape.numel():
            raise SchemaError(f"{where}: the index selects {shape.numel()} records, got {len(items)}")
        return Prepared(self._moved(items), len(items))

    def _is_one(self, data: Any) -> bool:
        return not isinstance(data, list)

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

    def _forget(self) -> None:
        self._items = []

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> list[Any]:
        """Return the objects in `slots`."""
        items = self._items
        return [items[slot] for slot in slots.tolist()]

    def fetch_again(
        self, records: Any, slots: torch.Tensor, renewed: torch.Tensor, paths: tuple[Path, ...] | None = None
    ) -> list[Any]:
        """Return the objects in `slots`, those that aren't renewed as they were fetched before."""
        fresh = iter(self.fetch(slots[renewed], paths))
        return [next(fresh) if new else item for item, new in zip(records, renewed.tolist(), strict=True)]

    def get(self, index: Any) -> Any:
        """Return the object at an int, or those at any other index, as a list; never copies."""
        if not self._items:
            raise EmptyBufferError("the storage is empty: write records first")
        basic = basic_index(index, self.shape)
        if basic is not None and len(basic) == 1:
            found = self._at(basic[0])
            return self._together(found) if isinstance(basic[0], slice) else found
        slots, _ = slots_at(index, self.shape)
        return self._together(self.fetch(slots))

    def _at(self, index: int | slice) -> Any:
        """Return one object, or a list of them."""
        return self._items[index]

    def _together(self, items: list[Any]) -> Any:
        """Return several objects as `get` gives them."""
        return items

    def moment_ahead(self) -> Ahead:
        """Begin a snapshot of the very objects: writers exchange them, and change none."""
        return AtEnd(self._moment)

    def _moment(self) -> tuple[Items, int]:
        return Items(list(self._items)), len(self)

    def _start_copy(self) -> ContentCopy:
        return _ItemsCopy(self._items)

    def _plain_content(self, content: list[Any] | Items) -> dict[str, Any]:
        return {"items": content, "compressed": True} if self._compresses else {"items": content}

    def _parse_content(self, reader: StateReader, state: StorageState) -> list[Any]:
        if ("compressed" in reader) != self._compresses:
            kept, other = (
                ("plain", "ListStorage") if self._compresses else ("compressed", "CompressedListStorage")
            )
            raise SchemaError(
                f"load_state_dict: the state's objects are {kept}: a {type(self).__name__} can't hold them, "
                f"a {other} can"
            )
        items = reader.get("items")
        if not isinstance(items, list) or len(items) != state.rows:
            raise reader.wrong("items", f"a list of {state.rows} objects")
        return _copied(items)

    def _turned(self, content: list[Any], rows: int) -> list[Any]:
        return content[rows:] + content[:rows]

    def _take_content(self, content: list[Any], rows: int) -> None:
        self._items = list(content)

    def check_valid(self) -> None:
        """Raise AssertionError if the storage's books don't agree; for tests."""
        assert len(self._items) == self.num_steps <= self.max_size
        assert bool((self.generations.of_all()[: len(self)] > 0).all())

    def __repr__(self) -> str:
        """Show class and size."""
        most = "any number of" if self.max_size == UNBOUNDED else self.max_size
        return f"{type(self).__name__}({len(self)} of {most} objects)"


class _ItemsCopy(ContentCopy):
    """Deep copies of objects; what one round copies keeps its references to each other."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._copies: list[Any] = []

    def take(self, rows: int, spans: list[tuple[int, int]]) -> None:
        self._copies += [None] * (rows - len(self._copies))
        for start, stop in spans:
            self._copies[start:stop] = _copied(self._items[start:stop])

    def done(self, rows: int) -> list[Any]:
        return self._copies[:rows]


class _RefusingGraphs(TorchFunctionMode):
    """Refuse to copy tensors that a graph computed, as torch does, and say what to do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            raise UnsupportedError(
                "deepcopy: the storage holds tensors that a graph computed, which torch can't copy: detach them before "
                "they are written, or load the storage's state_dict() into another one"
            )
        return func(*args, **(kwargs or {}))


class _WithoutGraph(TorchFunctionMode):
    """Have copies of tensors that a graph computed leave the graph: torch refuses to copy them with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _copied(items: list[Any]) -> list[Any]:
    """Return deep copies of objects, without the graphs of the tensors in them."""
    with torch.no_grad(), _WithoutGraph():  # TensorDict copies by cloning
        return copy.deepcopy(items)


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
    """Return a batch of objects: tensors and TensorDicts stacked, others by torch's `default_collate`.

    TensorDicts that differ in keys or shapes give a lazy stack of copies, tuples a tuple of batches.
    """
    first = items[0]
    if is_tensor_collection(first):
        return unshared(TensorDict.maybe_dense_stack(list(items)))
    if isinstance(first, torch.Tensor):
        return torch.stack(list(items))
    if type(first) is tuple and len({len(item) for item in items}) == 1:
        return tuple(collate(list(column)) for column in zip(*items, strict=True))
    return torch.utils.data.default_collate(items)


def unshared(batch: Any) -> Any:
    """Return a stack of TensorDicts that shares nothing with them: what is lazy in it is a copy."""
    return batch if batch.is_contiguous() else batch.clone()
