"""Leaves that columns can't hold: strings, objects of any kind, and tensors whose shape differs from record to record.

They are kept as one Python object for each record, in an array of objects. `ObjectColumn` has the few
methods of a tensor that batches, blocks and storages need to cut and copy rows, so that these treat both alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase, is_non_tensor

from gleanrl.errors import SchemaError


class ObjectColumn:
    """One object for each record, ``[*lead, *shape]``; views share the array, as with tensors.

    Args:
        array: of objects.
        blank: what stands where there is none: an empty tensor for tensors of unlike shapes, which come back as
            tensors; None for all others, which come back as non-tensor data.
    """

    __slots__ = ("array", "blank")
    dtype = None
    device = torch.device("cpu")
    _version = 0  # torch's count of changes in place: nobody counts those of objects

    def __init__(self, array: np.ndarray[Any, Any], blank: torch.Tensor | None = None) -> None:
        self.array, self.blank = array, blank

    def data_ptr(self) -> int:
        """Return the address of the references, which nobody moves."""
        return int(self.array.ctypes.data)

    @classmethod
    def of(
        cls, items: Sequence[Any], shape: Sequence[int] | None = None, blank: torch.Tensor | None = None
    ) -> ObjectColumn:
        """Return `items`, lists and arrays among them as they are, as an array of `shape`, ``(n,)`` for None."""
        array = np.empty(len(items), object)
        for position, item in enumerate(items):  # one by one: NumPy takes nothing apart then
            array[position] = item
        return cls(array if shape is None else array.reshape(tuple(shape)), blank)

    @classmethod
    def blanks(cls, shape: Sequence[int], blank: torch.Tensor | None = None) -> ObjectColumn:
        """Return an array of `shape` that holds nothing yet."""
        size = torch.Size(shape)
        return cls.of([blank] * size.numel(), size, blank)

    @classmethod
    def rows_of(cls, tensor: torch.Tensor, lead: Sequence[int]) -> ObjectColumn:
        """Return copies of the rows of a tensor ``[*lead, ...]``, each an object."""
        flat = tensor.reshape(torch.Size(lead).numel(), *tensor.shape[len(lead) :])
        return cls.of([row.clone() for row in flat], lead, tensor.new_empty([0] * (tensor.ndim - len(lead))))

    @property
    def shape(self) -> torch.Size:
        """The array's shape."""
        return torch.Size(self.array.shape)

    @property
    def ndim(self) -> int:
        """The array's dimensions."""
        return self.array.ndim

    def numel(self) -> int:
        """Return the number of objects."""
        return self.array.size

    def __getitem__(self, index: Any) -> ObjectColumn:
        """Return a view, or a copy, as NumPy indexes."""
        parts = index if isinstance(index, tuple) else (index,)
        parts = tuple(part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in parts)
        return ObjectColumn(
            self.array[parts if any(part is ... for part in parts) else (*parts, ...)], self.blank
        )

    def __iter__(self) -> Iterator[ObjectColumn]:
        """Yield the rows."""
        return iter(self.unbind(0))

    def items(self) -> list[Any]:
        """Return the objects, in order."""
        return [*self.array.flat]

    def unbind(self, dim: int = 0) -> tuple[ObjectColumn, ...]:
        """Return a view of each position along `dim`."""
        moved = np.moveaxis(self.array, dim, 0)
        return tuple(ObjectColumn(moved[position, ...], self.blank) for position in range(moved.shape[0]))

    def select(self, dim: int, position: int) -> ObjectColumn:
        """Return a view of one position along `dim`."""
        return ObjectColumn(np.moveaxis(self.array, dim, 0)[position, ...], self.blank)

    def narrow(self, dim: int, start: int, length: int) -> ObjectColumn:
        """Return a view of a range along `dim`."""
        moved = np.moveaxis(self.array, dim, 0)[start : start + length]
        return ObjectColumn(np.moveaxis(moved, 0, dim), self.blank)

    def movedim(self, source: int, destination: int) -> ObjectColumn:
        """Return a view with a dimension moved."""
        return ObjectColumn(np.moveaxis(self.array, source, destination), self.blank)

    def transpose(self, first: int, second: int) -> ObjectColumn:
        """Return a view with two dimensions exchanged."""
        return ObjectColumn(np.swapaxes(self.array, first, second), self.blank)

    def reshape(self, *shape: Any) -> ObjectColumn:
        """Return the same objects in another shape."""
        return ObjectColumn(self.array.reshape(*shape), self.blank)

    def unsqueeze(self, dim: int) -> ObjectColumn:
        """Return a view with a dimension more."""
        return ObjectColumn(np.expand_dims(self.array, dim), self.blank)

    def clone(self) -> ObjectColumn:
        """Return another array of the same objects; tensors are copied, other objects never."""
        if self.blank is None:
            return ObjectColumn(self.array.copy(), self.blank)
        return ObjectColumn.of([item.clone() for item in self.items()], self.shape, self.blank)

    def to(self, *args: Any, copy: bool = False) -> ObjectColumn:
        """Return these objects, or a clone: they stay where they are."""
        return self.clone() if copy else self

    def detach(self) -> ObjectColumn:
        """Return these objects, tensors without their graphs."""
        if self.blank is None:
            return self
        return ObjectColumn.of([item.detach() for item in self.items()], self.shape, self.blank)

    def copy_(self, source: ObjectColumn | torch.Tensor) -> ObjectColumn:
        """Take over another array's objects; of a tensor, copies of its rows."""
        if isinstance(source, torch.Tensor):
            source = ObjectColumn.rows_of(source, self.shape)
        if source.shape != self.shape:
            raise SchemaError(f"expected objects of shape {tuple(self.shape)}, got {tuple(source.shape)}")
        np.copyto(self.array, source.array)
        return self

    def put(self, index: torch.Tensor, rows: ObjectColumn) -> None:
        """Take over objects at `index`, ``(n,)`` int64; of equal ones the last wins."""
        self.array[index.cpu().numpy()] = rows.array

    def on(self, device: torch.device) -> ObjectColumn:
        """Return these objects, tensors on `device`."""
        if self.blank is None or all(item.device == device for item in self.array.flat):
            return self
        return ObjectColumn.of([item.to(device) for item in self.items()], self.shape, self.blank)

    def take(self, index: torch.Tensor, pad: bool = False) -> ObjectColumn:
        """Return the rows at `index`, ``(n,)`` int64, tensors copied; with `pad` the one behind the last is blank."""
        array = self.array
        if pad:
            array = np.concatenate([array, ObjectColumn.blanks((1, *array.shape[1:]), self.blank).array])
        return ObjectColumn(array[index.cpu().numpy()], self.blank).clone()

    def where(self, mask: torch.Tensor, other: ObjectColumn) -> ObjectColumn:
        """Return these objects where `mask` is True, those of `other` elsewhere."""
        return ObjectColumn(np.where(mask.cpu().numpy(), self.array, other.array), self.blank)

    def equal(self, other: Any) -> bool:
        """Return whether the objects are equal."""
        if not isinstance(other, ObjectColumn) or self.shape != other.shape:
            return False
        return all(
            _same(mine, theirs) for mine, theirs in zip(self.array.flat, other.array.flat, strict=True)
        )

    def wrapped(self, device: torch.device | None = None) -> Any:
        """Return what a TensorDict holds: non-tensor data, or a stack of it; of tensors that are alike, one tensor."""
        if self.blank is None:
            return _wrapped(self.array, device)
        if not self.ndim:
            return self.array.item()
        if -1 in self.field_shape:
            raise SchemaError("tensors of unlike shapes stand in a lazy stack of records")
        return torch.stack(self.items()).reshape(*self.shape, *self.field_shape)

    @property
    def field_shape(self) -> torch.Size:
        """The shape of one tensor, -1 where they differ."""
        assert self.blank is not None
        shapes = [tuple(item.shape) for item in self.array.flat] or [tuple(self.blank.shape)]
        return torch.Size([sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)])


Leaf: TypeAlias = Any
"""A tensor, or `ObjectColumn`."""


def as_entry(leaf: Leaf) -> Any:
    """Return what a TensorDict holds in place of a leaf."""
    return leaf.wrapped() if isinstance(leaf, ObjectColumn) else leaf


def as_leaf(entry: Any) -> Leaf:
    """Return the leaf that a TensorDict's entry is: a tensor itself, of non-tensor data `ObjectColumn`."""
    return non_tensors(entry) if is_non_tensor(entry) else entry


def values_of(leaf: Leaf, spec: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values that a leaf is made of, each with the part of `spec` that it is to be in."""
    if isinstance(leaf, ObjectColumn) and leaf.blank is not None:
        for index in np.ndindex(*leaf.shape):
            yield leaf[index].array.item(), spec[index] if index else spec
    else:
        yield as_entry(leaf), spec


def stack_leaves(leaves: Sequence[Leaf], dim: int = 0) -> Leaf:
    """Return leaves stacked along a new dimension: all tensors, or all objects."""
    if isinstance(leaves[0], ObjectColumn):
        shapes = {tuple(leaf.shape) for leaf in leaves}
        if len(shapes) > 1:
            raise SchemaError(
                f"lists of objects have unlike shapes {sorted(shapes)}, and columns hold one shape: pad them, or use "
                "LazyStackStorage"
            )
        return ObjectColumn(np.stack([leaf.array for leaf in leaves], dim), leaves[0].blank)
    return torch.stack(list(leaves), dim)


def cat_leaves(leaves: Sequence[Leaf], dim: int = 0) -> Leaf:
    """Return leaves one behind the other along `dim`: all tensors, or all objects."""
    if isinstance(leaves[0], ObjectColumn):
        return ObjectColumn(np.concatenate([leaf.array for leaf in leaves], dim), leaves[0].blank)
    return torch.cat(list(leaves), dim)


def non_tensors(value: Any) -> ObjectColumn:
    """Return what non-tensor data, or a stack of it, holds: ``[*batch_size]``."""
    if isinstance(value, LazyStackedTensorDict):
        parts = value.tensordicts
        if parts and not value.stack_dim and all(not part.batch_dims for part in parts):
            return ObjectColumn.of([part.data for part in parts])
        return stack_leaves([non_tensors(part) for part in parts], value.stack_dim)
    return ObjectColumn.of([value.data] * value.batch_size.numel(), value.batch_size)


def lazy_leaf(batch: LazyStackedTensorDict, key: str, dims: int) -> Leaf:
    """Return an entry of a lazy stack of records, `dims` batch dimensions: a tensor if all are alike, else objects."""
    parts = [part.get(key) for part in batch.tensordicts] if _even(batch, key) else []
    if parts and all(part.shape == parts[0].shape and part.dtype is parts[0].dtype for part in parts):
        return torch.stack(parts, batch.stack_dim)
    array = _ragged(batch, key, dims)
    first = array.flat[0]
    for item in array.flat:
        if item.ndim != first.ndim or item.dtype is not first.dtype:
            raise SchemaError(
                f"{key!r}: the parts of a lazy stack differ in more than sizes, {tuple(first.shape)} {first.dtype} and "
                f"{tuple(item.shape)} {item.dtype}"
            )
    objects = ObjectColumn(array, first)
    objects.blank = first.new_empty([0 if size == -1 else size for size in objects.field_shape])
    return objects


def _even(batch: LazyStackedTensorDict, key: str) -> bool:
    """Return whether no part of a stack is a stack of unlike tensors itself."""
    for part in batch.tensordicts:
        if isinstance(part, LazyStackedTensorDict):
            shapes = {value.shape for below in part.tensordicts for value in _tensors(below, key)}
            if len(shapes) != 1:
                return False
    return True


def _tensors(batch: Any, key: str) -> Iterator[torch.Tensor]:
    if isinstance(batch, LazyStackedTensorDict):
        for part in batch.tensordicts:
            yield from _tensors(part, key)
    else:
        yield batch.get(key)


def _ragged(batch: TensorDictBase, key: str, dims: int) -> np.ndarray[Any, Any]:
    if isinstance(batch, LazyStackedTensorDict) and batch.stack_dim < dims:
        return np.stack([_ragged(part, key, dims - 1) for part in batch.tensordicts], batch.stack_dim)
    try:
        value = batch.get(key)
    except RuntimeError as cause:  # of unlike tensors, stacked along a dimension that each record has
        shapes = sorted({tuple(value.shape) for value in _tensors(batch, key)})
        raise SchemaError(
            f"{key!r}: members of one group, stacked within a record, have unlike shapes {shapes}: an entry of a "
            "record is one tensor; give such members groups of their own, or pad what they hold"
        ) from cause
    return ObjectColumn.rows_of(value, value.shape[:dims]).array


def _wrapped(array: np.ndarray[Any, Any], device: torch.device | None) -> Any:
    if not array.ndim:
        return NonTensorData(array.item(), device=device)
    if not array.shape[0]:
        return NonTensorData(None, batch_size=array.shape, device=device)
    if array.ndim == 1:
        return NonTensorStack(*[NonTensorData(item, device=device) for item in array])
    return NonTensorStack(*[_wrapped(row, device) for row in array])


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return mine.shape == theirs.shape and torch.equal(mine, theirs)
    try:
        return mine is theirs or bool(mine == theirs)
    except (ValueError, TypeError, RuntimeError):  # of what has no one answer, as arrays
        return False
