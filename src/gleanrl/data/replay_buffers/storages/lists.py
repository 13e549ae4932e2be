"""List storages: for arbitrary objects, for compressed tensors, and for TensorDicts of different shapes and keys."""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from typing_extensions import Self

from gleanrl._arrays.devices import usable_device
from gleanrl._arrays.tensordicts import Path
from gleanrl._checkpoint.tree_codec import Items
from gleanrl._state.state import StateReader
from gleanrl._util import integer, optional_callable
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.indexing import basic_index, slots_at
from gleanrl.data.replay_buffers.storages.slots import UNBOUNDED
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.errors import (
    EmptyBufferError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)


class ListStorage(Storage):
    """A list of objects of any type, one for each slot. It has no schema and doesn't compare objects with each other.

    `extend` takes a list of objects or one batch. The objects of a list are kept without a copy. A batch (a tensor, a
    TensorDict, or dictionaries and tuples of tensors) is copied and split along its first dimension.

    Args:
        max_size: the number of objects that fit; None for any number. The sampler of a buffer may then set a limit.
        compilable: has no effect, because compiled programs call buffers and never contain them.
        device: the device to which tensors and TensorDicts are moved, including those inside objects that torch's
            pytrees can traverse; None leaves them on their devices.

    Raises:
        InvalidArgumentError: `max_size` or `device` has a bad value.
    """

    _compresses = False  # whether the stored objects are compressed

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
            UnsupportedError: an object holds a tensor that a graph computed, outside of a TensorDict. Torch can't copy
                such a tensor with its graph.
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
        """Return the list unchanged."""
        return records

    def prepare(self, data: Any, *, single: bool, dim_extend: int, where: str) -> Prepared:
        """Return `data` as a list of objects, with tensors on the storage's device.

        Raises:
            SchemaError: there is no object, or `split` refuses the batch.
            InvalidTypeError: the data are neither a list of objects nor a batch of tensors.
            UnsupportedError: `dim_extend` isn't 0.
        """
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
        """Return the objects with their tensors on the storage's device."""
        if self.device is None:
            return items
        moved: list[Any] = _pytree.tree_map(self._on_device, items, is_leaf=is_tensor_collection)
        return moved

    def _on_device(self, leaf: Any) -> Any:
        movable = isinstance(leaf, torch.Tensor) or is_tensor_collection(leaf)
        return leaf.to(self.device) if movable else leaf

    def prepare_selection(self, data: Any, shape: torch.Size, where: str) -> Prepared:
        """Return `data` as a list of objects; raise `SchemaError` unless the index selects as many."""
        items = [data] if not shape else split(data, where)
        if len(items) != shape.numel():
            raise SchemaError(f"{where}: the index selects {shape.numel()} records, got {len(items)}")
        return Prepared(self._moved(items), len(items))

    def _is_one(self, data: Any) -> bool:
        return not isinstance(data, list)

    def _copy_span(self, rows: list[Any], skipped: int, start: int, count: int) -> None:
        for offset, item in enumerate(rows[skipped : skipped + count]):
            self._store_item((start + offset) % self.max_size, item)

    def _copy_slots(self, rows: list[Any], slots: torch.Tensor) -> None:
        for slot, item in zip(slots.tolist(), rows, strict=True):
            self._store_item(slot, item)

    def _pick(self, rows: list[Any], positions: torch.Tensor) -> list[Any]:
        return [rows[position] for position in positions.tolist()]

    def _store_item(self, slot: int, item: Any) -> None:
        if slot >= len(self._items):
            # A first write longer than the storage starts in the middle. It fills the gap before it ends.
            self._items += [None] * (slot + 1 - len(self._items))
        self._items[slot] = item

    def _forget(self) -> None:
        self._items = []

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> list[Any]:
        """Return the objects in `slots`, without copies."""
        items = self._items
        return [items[slot] for slot in slots.tolist()]

    def fetch_again(
        self, records: Any, slots: torch.Tensor, renewed: torch.Tensor, paths: tuple[Path, ...] | None = None
    ) -> list[Any]:
        """Return the objects in `slots`, and take the objects that aren't renewed from `records`."""
        fetched = iter(self.fetch(slots[renewed], paths))
        return [next(fetched) if new else item for item, new in zip(records, renewed.tolist(), strict=True)]

    def get(self, index: Any) -> Any:
        """Return the object at an int, or a list of the objects at any other index. A `ListStorage` copies nothing.

        Raises:
            EmptyBufferError: nothing is stored.
            IndexRangeError: the index is outside the stored part.
            InvalidTypeError: the value isn't an index.
        """
        if not self._items:
            raise EmptyBufferError("the storage is empty: write records first")
        basic = basic_index(index, self.shape)
        if basic is not None and len(basic) == 1:
            found = self._at(basic[0])
            return self._together(found) if isinstance(basic[0], slice) else found
        slots, _ = slots_at(index, self.shape)
        return self._together(self.fetch(slots))

    def _at(self, index: int | slice) -> Any:
        """Return one object, or a list of the objects of a slice."""
        return self._items[index]

    def _together(self, items: list[Any]) -> Any:
        """Return several objects in the form that `get` returns."""
        return items

    def _current_content(self) -> Items:
        """Return references to the objects, because writers replace objects and never change them."""
        return Items(list(self._items))

    def copied(self, value: StorageState) -> StorageState:
        """Return a snapshot with deep copies of the objects, which keep their references to each other."""
        return replace(value, content=_copied(value.content.make()))

    def _plain_content(self, content: list[Any] | Items) -> dict[str, Any]:
        return {"items": content, "compressed": True} if self._compresses else {"items": content}

    def _parse_content(self, reader: StateReader, state: StorageState) -> list[Any]:
        if ("compressed" in reader) != self._compresses:
            form, other = (
                ("plain", "ListStorage") if self._compresses else ("compressed", "CompressedListStorage")
            )
            raise SchemaError(
                f"load_state_dict: the state's objects are {form}: a {type(self).__name__} can't hold them, "
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
        """Raise AssertionError if the storage's metadata are inconsistent; for tests."""
        assert len(self._items) == self.num_steps <= self.max_size
        assert bool((self.generations.of_all()[: len(self)] > 0).all())

    def __repr__(self) -> str:
        """Return a text with the class and the size."""
        most = "any number of" if self.max_size == UNBOUNDED else self.max_size
        return f"{type(self).__name__}({len(self)} of {most} objects)"


class _RefusingGraphs(TorchFunctionMode):
    """Refuses to copy tensors that a graph computed, as torch does, with an error that tells what to do.

    Tensors inside TensorDicts are cloned, not refused.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            raise UnsupportedError(
                "deepcopy: the storage holds tensors that a graph computed, which torch can't copy: detach them before "
                "they are written, or load the storage's state_dict() into another one"
            )
        return func(*args, **(kwargs or {}))


class _WithoutGraph(TorchFunctionMode):
    """Makes deep copies detach tensors that a graph computed. Torch refuses to copy such tensors with their graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _copied(items: list[Any]) -> list[Any]:
    """Return deep copies of objects, with tensors detached from their graphs."""
    with torch.no_grad(), _WithoutGraph():  # `no_grad`, since TensorDict copies by cloning its tensors
        return copy.deepcopy(items)


def split(data: Any, where: str) -> list[Any]:
    """Return `data` as a list of records: a shallow copy of a list, or the rows of a copied batch.

    A batch is copied because its rows are views: the caller could otherwise change stored records through it.

    Raises:
        SchemaError: a batch has no first dimension, or its tensors differ in it.
        InvalidTypeError: the data are neither a list of objects nor a batch of tensors.
    """
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
                f"{where}: expected tensors with a batch dimension in a {type(data).__name__}; give objects "
                "as a list"
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
    """Return a batch of objects: stacked tensors and TensorDicts, and torch's `default_collate` for other types.

    The first object determines the type. TensorDicts with different keys or shapes give a lazy stack of copies. Tuples
    of one length give a tuple of batches. Errors of torch, for example for different shapes, are raised unchanged.
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
    """Return a stack of TensorDicts that shares no memory with its parts: a lazy stack is copied."""
    return batch if batch.is_contiguous() else batch.clone()


Packed = tuple[Any, list[torch.Tensor]]
"""A compressed record: the record with expanded zeros in place of its tensors, and the bytes of each tensor."""


class CompressedListStorage(ListStorage):
    """A `ListStorage` that keeps the tensors of its records compressed. Images then take a fraction of their memory.

    Tensors are compressed at each write, before the buffer's records change, and decompressed at each read. Reads
    decompress outside of the buffer's lock; with `prefetch`, worker threads do it. Other objects are kept unchanged.

    Args:
        max_size: see `ListStorage`.
        compression_fn: maps a detached tensor to a tensor of bytes, ``(n,)`` uint8; None for zlib. Any other result
            raises `InvalidTypeError` at the write.
        decompression_fn: maps such bytes to a tensor of the original dtype with the same number of elements; None for
            zlib. Any other result raises `SchemaError` at the read. If the function takes a second argument, it gets a
            dictionary with the tensor's ``"shape"`` and ``"dtype"``. Give both functions or none.
        compression_level: zlib's level, 1 (fastest) to 9 (smallest result). Levels from 10 to 22 are accepted and mean
            9.
        device: the device of the compressed bytes and of the tensors in batches.
        compilable: see `ListStorage`.

    Raises:
        InvalidArgumentError: `max_size`, `device` or the level has a bad value, or only one of the two functions is
            given.
        InvalidTypeError: a function isn't callable. Also at a write, if `compression_fn` doesn't return bytes.
        SchemaError: at a read, `decompression_fn` doesn't return a tensor of the original size and dtype.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=CompressedListStorage(100), batch_size=2)
        >>> index = buffer.extend(TensorDict({"pixels": torch.zeros(10, 3, 84, 84, dtype=torch.uint8)}, [10]))
        >>> buffer.sample()["pixels"].shape
        torch.Size([2, 3, 84, 84])
        >>> 10 * 3 * 84 * 84 // buffer.storage.bytes() > 100
        True
    """

    _compresses = True

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compression_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decompression_fn: Callable[..., torch.Tensor] | None = None,
        compression_level: int = 3,
        device: torch.device | str | int = "cpu",
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        self.compression_level = integer("compression_level", compression_level, 1)
        if self.compression_level > 22:
            raise InvalidArgumentError(f"compression_level: expected 1 to 22, got {compression_level}")
        if (compression_fn is None) != (decompression_fn is None):
            raise InvalidArgumentError("compression_fn, decompression_fn: got only one; give both or none")
        self._compress = optional_callable("compression_fn", compression_fn) or self._zipped
        self._decompress = optional_callable("decompression_fn", decompression_fn) or _unzipped
        self._informed = _takes_two(self._decompress)

    def bytes(self) -> int:
        """Return the number of bytes that all compressed tensors take. Other objects aren't counted."""
        stored = super().fetch(torch.arange(len(self), device="cpu"))
        return sum(packed.numel() for _, leaves in stored for packed in leaves)

    def fetch(self, slots: torch.Tensor, paths: tuple[Path, ...] | None = None) -> list[Any]:
        """Return the objects in `slots`, with their tensors decompressed."""
        return [self._unpacked(packed) for packed in super().fetch(slots, paths)]

    def _at(self, index: int | slice) -> Any:
        found = super()._at(index)
        if isinstance(index, slice):
            return [self._unpacked(packed) for packed in found]
        return self._unpacked(found)

    def _moved(self, items: list[Any]) -> list[Any]:
        return [self._packed(item) for item in super()._moved(items)]

    def _packed(self, item: Any) -> Packed:
        leaves: list[torch.Tensor] = []

        def take_out(leaf: Any) -> Any:
            if is_tensor_collection(leaf):
                return leaf.apply(take_out)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            packed = self._compress(leaf.detach())
            if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8 or packed.ndim != 1:
                raise InvalidTypeError(
                    f"compression_fn: expected a tensor of bytes, (n,) uint8, got {packed!r:.99}"
                )
            leaves.append(packed)
            return leaf.new_zeros(()).expand(leaf.shape)

        return _pytree.tree_map(take_out, item, is_leaf=is_tensor_collection), leaves

    def _unpacked(self, packed: Packed) -> Any:
        shell, leaves = packed
        coming = iter(leaves)

        def put_in(leaf: Any) -> Any:
            if is_tensor_collection(leaf):
                return leaf.apply(put_in)
            return self._restored(next(coming), leaf) if isinstance(leaf, torch.Tensor) else leaf

        return _pytree.tree_map(put_in, shell, is_leaf=is_tensor_collection)

    def _restored(self, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the decompressed tensor; `like` has its shape and dtype."""
        about = ({"shape": like.shape, "dtype": like.dtype},) if self._informed else ()
        made = self._decompress(packed, *about)
        fits = isinstance(made, torch.Tensor) and made.numel() == like.numel() and made.dtype == like.dtype
        if not fits:
            raise SchemaError(
                f"decompression_fn: expected a tensor {tuple(like.shape)} {like.dtype}, got {made!r:.99}"
            )
        return made.reshape(like.shape)

    def _zipped(self, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _bytes(zlib.compress(data, min(self.compression_level, 9))).to(tensor.device)


def _bytes(data: bytes) -> torch.Tensor:
    """Return bytes as a CPU tensor, ``(n,)`` uint8, in fresh memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unzipped(packed: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
    return _bytes(zlib.decompress(packed.cpu().numpy().data)).view(about["dtype"]).to(packed.device)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function accepts two positional arguments."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):  # ValueError: the function has no signature
        return False
    return True


class LazyStackStorage(ListStorage):
    """A `ListStorage` of TensorDicts whose batches are lazy stacks, so records may differ in shapes and in keys.

    An entry that all records of a batch have in one shape is stacked when it is read. Other entries can be read from
    the single records (``batch.unbind(0)``), or padded by ``batch.get(key, as_padded_tensor=True)``.

    Args:
        max_size: the number of records that fit; see `ListStorage`.
        compilable: see `ListStorage`.
        stack_dim: the position of the records' dimension in a batch; negative values count from the end.
        device: see `ListStorage`.

    Raises:
        InvalidArgumentError: `max_size`, `stack_dim` or `device` has a bad value.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
        >>> index = rb.extend([TensorDict(words=torch.arange(n), text="a" * n) for n in (1, 2, 3)])
        >>> batch = rb.sample()
        >>> all(len(record["words"]) == len(record["text"]) for record in batch.unbind(0))
        True
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        self.stack_dim = integer("stack_dim", stack_dim)
        self.collate = self._collated

    def collated_by(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes a batch: it calls `collate_fn` with a lazy stack of copies of the records."""
        return lambda items: collate_fn(self._collated(items))

    def _collated(self, items: Any) -> Any:
        """Return a batch that is a copy of the records, which are a list or a stack."""
        batch = self._together(items) if isinstance(items, list) else items
        return unshared(batch) if is_tensor_collection(batch) else batch

    def _together(self, items: list[Any]) -> Any:
        """Return a lazy stack of TensorDicts. Objects of other types are collated as by `ListStorage`."""
        if not items:
            return items
        if is_tensor_collection(items[0]):
            return LazyStackedTensorDict.lazy_stack(items, self.stack_dim)
        return collate(items)
