"""Leaves that tensor columns can't hold: strings, arbitrary objects, and tensors whose shape differs between records.

An `ObjectColumn` keeps one Python object for each record, in a NumPy array of objects. It offers the tensor methods
that batches, blocks and storages use to slice and copy rows, so they treat both kinds of leaves alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase, is_non_tensor

from gleanrl.errors import SchemaError


class ObjectColumn:
    """One Python object for each record, ``[*lead, *shape]``. Views share the array, as views of tensors do.

    Args:
        array: a NumPy array of objects.
        blank: the value of empty positions. For tensors of different shapes it is an empty tensor, and the objects come
            back as tensors. For all other objects it is None, and they come back as non-tensor data.
    """

    __slots__ = ("array", "blank")
    dtype = None
    device = torch.device("cpu")
    _version = 0  # replaces a tensor's count of in-place changes, which objects don't have

    def __init__(self, array: np.ndarray[Any, Any], blank: torch.Tensor | None = None) -> None:
        self.array, self.blank = array, blank

    def data_ptr(self) -> int:
        """Return the address of the array of references; NumPy never moves it."""
        return int(self.array.ctypes.data)

    @classmethod
    def of(
        cls, items: Sequence[Any], shape: Sequence[int] | None = None, blank: torch.Tensor | None = None
    ) -> ObjectColumn:
        """Return a column with the objects `items` in `shape`; a shape of None means ``(n,)``.

        Lists and arrays among the items stay single objects.
        """
        array = np.empty(len(items), object)
        for position, item in enumerate(items):  # one by one, since NumPy would unpack lists and arrays
            array[position] = item
        return cls(array if shape is None else array.reshape(tuple(shape)), blank)

    @classmethod
    def blanks(cls, shape: Sequence[int], blank: torch.Tensor | None = None) -> ObjectColumn:
        """Return a column of `shape` that is filled with `blank`."""
        size = torch.Size(shape)
        return cls.of([blank] * size.numel(), size, blank)

    @classmethod
    def rows_of(cls, tensor: torch.Tensor, lead: Sequence[int]) -> ObjectColumn:
        """Return a column of copies of the rows of a tensor ``[*lead, ...]``, one object for each row."""
        flat = tensor.reshape(torch.Size(lead).numel(), *tensor.shape[len(lead) :])
        return cls.of([row.clone() for row in flat], lead, tensor.new_empty([0] * (tensor.ndim - len(lead))))

    @property
    def shape(self) -> torch.Size:
        """The array's shape."""
        return torch.Size(self.array.shape)

    @property
    def ndim(self) -> int:
        """The number of the array's dimensions."""
        return self.array.ndim

    def numel(self) -> int:
        """Return the number of objects."""
        return self.array.size

    def __getitem__(self, index: Any) -> ObjectColumn:
        """Return a view or a copy, by NumPy's rules of indexing."""
        parts = index if isinstance(index, tuple) else (index,)
        parts = tuple(part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in parts)
        return ObjectColumn(
            self.array[parts if any(part is ... for part in parts) else (*parts, ...)], self.blank
        )

    def __iter__(self) -> Iterator[ObjectColumn]:
        """Yield the rows."""
        return iter(self.unbind(0))

    def items(self) -> list[Any]:
        """Return the objects as a flat list, in order."""
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
        """Return a view with one dimension moved."""
        return ObjectColumn(np.moveaxis(self.array, source, destination), self.blank)

    def transpose(self, first: int, second: int) -> ObjectColumn:
        """Return a view with two dimensions exchanged."""
        return ObjectColumn(np.swapaxes(self.array, first, second), self.blank)

    def reshape(self, *shape: Any) -> ObjectColumn:
        """Return the same objects in another shape, as a view if NumPy can make one, otherwise as a copy."""
        return ObjectColumn(self.array.reshape(*shape), self.blank)

    def unsqueeze(self, dim: int) -> ObjectColumn:
        """Return a view with one more dimension."""
        return ObjectColumn(np.expand_dims(self.array, dim), self.blank)

    def clone(self) -> ObjectColumn:
        """Return a new array of the same objects. Tensors are copied; other objects are shared."""
        if self.blank is None:
            return ObjectColumn(self.array.copy(), self.blank)
        return ObjectColumn.of([item.clone() for item in self.items()], self.shape, self.blank)

    def to(self, *args: Any, copy: bool = False) -> ObjectColumn:
        """Return the column itself, or a clone if `copy` is True. The objects don't change their device."""
        return self.clone() if copy else self

    def detach(self) -> ObjectColumn:
        """Return the same objects, with tensors detached from their graphs."""
        if self.blank is None:
            return self
        return ObjectColumn.of([item.detach() for item in self.items()], self.shape, self.blank)

    def copy_(self, source: ObjectColumn | torch.Tensor) -> ObjectColumn:
        """Replace the objects by the objects of `source`, or by copies of its rows if it is a tensor; return `self`.

        Raises:
            SchemaError: the shape of `source` differs; nothing changed.
        """
        if isinstance(source, torch.Tensor):
            source = ObjectColumn.rows_of(source, self.shape)
        if source.shape != self.shape:
            raise SchemaError(f"expected objects of shape {tuple(self.shape)}, got {tuple(source.shape)}")
        np.copyto(self.array, source.array)
        return self

    def put(self, index: torch.Tensor, rows: ObjectColumn) -> None:
        """Set the objects at `index`, ``(n,)`` int64, to the objects of `rows`, which aren't copied.

        If an index occurs twice, the last object is kept.
        """
        self.array[index.cpu().numpy()] = rows.array

    def on(self, device: torch.device) -> ObjectColumn:
        """Return the same objects, with tensors on `device`; the column itself if there is nothing to move."""
        if self.blank is None or all(item.device == device for item in self.array.flat):
            return self
        return ObjectColumn.of([item.to(device) for item in self.items()], self.shape, self.blank)

    def take(self, index: torch.Tensor, pad: bool = False) -> ObjectColumn:
        """Return the rows at `index`, ``(n,)`` int64, with tensors copied and other objects shared.

        If `pad` is True, the index may also name the position after the last row, which gives the blank value.
        """
        array = self.array
        if pad:
            array = np.concatenate([array, ObjectColumn.blanks((1, *array.shape[1:]), self.blank).array])
        return ObjectColumn(array[index.cpu().numpy()], self.blank).clone()

    def where(self, mask: torch.Tensor, other: ObjectColumn) -> ObjectColumn:
        """Return a column with these objects where `mask` is True and the objects of `other` elsewhere."""
        return ObjectColumn(np.where(mask.cpu().numpy(), self.array, other.array), self.blank)

    def equal(self, other: Any) -> bool:
        """Return whether `other` is a column of the same shape with equal objects.

        Objects whose comparison raises or gives several values, such as arrays, are equal only if they are identical.
        """
        if not isinstance(other, ObjectColumn) or self.shape != other.shape:
            return False
        return all(
            _same(first, second) for first, second in zip(self.array.flat, other.array.flat, strict=True)
        )

    def wrapped(self, device: torch.device | None = None) -> Any:
        """Return the objects in the form that a TensorDict holds.

        Tensors of one shape become one stacked tensor. Other objects become non-tensor data or a stack of it.

        Raises:
            SchemaError: the tensors differ in shape.
        """
        if self.blank is None:
            return _wrapped(self.array, device)
        if not self.ndim:
            return self.array.item()
        if -1 in self.field_shape:
            raise SchemaError(
                f"expected tensors of one shape, got different shapes {tuple(self.field_shape)} (-1: the sizes "
                "differ); a TensorDict holds them only as a lazy stack of records: pad them to one shape"
            )
        return torch.stack(self.items()).reshape(*self.shape, *self.field_shape)

    @property
    def field_shape(self) -> torch.Size:
        """The shape of one tensor, with -1 for each size that differs between the tensors."""
        assert self.blank is not None
        shapes = [tuple(item.shape) for item in self.array.flat] or [tuple(self.blank.shape)]
        return torch.Size([sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)])


Leaf: TypeAlias = Any
"""A tensor or an `ObjectColumn`."""


def as_entry(leaf: Leaf) -> Any:
    """Return the TensorDict entry for a leaf; the inverse of `as_leaf`."""
    return leaf.wrapped() if isinstance(leaf, ObjectColumn) else leaf


def as_leaf(entry: Any) -> Leaf:
    """Return the leaf for a TensorDict entry: the tensor itself, or an `ObjectColumn` for non-tensor data."""
    return non_tensors(entry) if is_non_tensor(entry) else entry


def values_of(leaf: Leaf, spec: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values in a leaf, each with the part of `spec` that applies to it.

    A column of tensors yields each tensor with its part of the spec. Any other leaf yields one entry with the whole
    spec.
    """
    if isinstance(leaf, ObjectColumn) and leaf.blank is not None:
        for index in np.ndindex(*leaf.shape):
            yield leaf[index].array.item(), spec[index] if index else spec
    else:
        yield as_entry(leaf), spec


def stack_leaves(leaves: Sequence[Leaf], dim: int = 0) -> Leaf:
    """Return leaves stacked along a new dimension. All must be tensors, or all object columns.

    Raises:
        SchemaError: object columns differ in shape. Tensors of different shapes raise torch's `RuntimeError`.
    """
    if isinstance(leaves[0], ObjectColumn):
        shapes = {tuple(leaf.shape) for leaf in leaves}
        if len(shapes) > 1:
            raise SchemaError(
                f"lists of objects have different shapes {sorted(shapes)}, and a column holds one shape: pad them, or "
                "use LazyStackStorage"
            )
        return ObjectColumn(np.stack([leaf.array for leaf in leaves], dim), leaves[0].blank)
    return torch.stack(list(leaves), dim)


def cat_leaves(leaves: Sequence[Leaf], dim: int = 0) -> Leaf:
    """Return leaves concatenated along `dim`. All must be tensors, or all object columns."""
    if isinstance(leaves[0], ObjectColumn):
        return ObjectColumn(np.concatenate([leaf.array for leaf in leaves], dim), leaves[0].blank)
    return torch.cat(list(leaves), dim)


def non_tensors(value: Any) -> ObjectColumn:
    """Return the objects in non-tensor data, or in a stack of it, as a column ``[*batch_size]``."""
    if isinstance(value, LazyStackedTensorDict):
        parts = value.tensordicts
        if parts and not value.stack_dim and all(not part.batch_dims for part in parts):
            return ObjectColumn.of([part.data for part in parts])
        return stack_leaves([non_tensors(part) for part in parts], value.stack_dim)
    return ObjectColumn.of([value.data] * value.batch_size.numel(), value.batch_size)


def lazy_leaf(batch: LazyStackedTensorDict, key: str, dims: int) -> Leaf:
    """Return the entry at `key` of a lazy stack of records with `dims` batch dimensions.

    The result is a tensor if the entries of all parts have the same shape and dtype, and an `ObjectColumn` otherwise.

    Raises:
        SchemaError: the entries differ in dtype or in their number of dimensions.
    """
    parts = [part.get(key) for part in batch.tensordicts] if _even(batch, key) else []
    if parts and all(part.shape == parts[0].shape and part.dtype is parts[0].dtype for part in parts):
        return torch.stack(parts, batch.stack_dim)
    array = _ragged(batch, key, dims)
    first = array.flat[0]
    for item in array.flat:
        if item.ndim != first.ndim or item.dtype is not first.dtype:
            raise SchemaError(
                f"{key!r}: expected parts of a lazy stack that differ only in sizes, got {tuple(first.shape)} "
                f"{first.dtype} and {tuple(item.shape)} {item.dtype}; convert them to one dtype and one number of "
                "dimensions"
            )
    objects = ObjectColumn(array, first)
    objects.blank = first.new_empty([0 if size == -1 else size for size in objects.field_shape])
    return objects


def _even(batch: LazyStackedTensorDict, key: str) -> bool:
    """Return whether each part of a stack holds tensors of one shape at `key`, so that it can be read as a tensor."""
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
    except RuntimeError as cause:  # different shapes, stacked inside a record
        shapes = sorted({tuple(value.shape) for value in _tensors(batch, key)})
        raise SchemaError(
            f"{key!r}: members of one group, stacked within a record, have different shapes {shapes}, but an entry of "
            "a record is one tensor; put such members into separate groups, or pad their tensors"
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


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    try:
        return first is second or bool(first == second)
    except (ValueError, TypeError, RuntimeError):  # arrays, for example, give several values
        return False
