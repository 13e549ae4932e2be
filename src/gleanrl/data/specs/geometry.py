"""The shape operations of every spec, written once.

A spec's shape has two parts: the batch dimensions, and behind them the dimensions that encode one value (the
columns of a one-hot vector, say). An operation acts on the batch dimensions only. It is expressed as one
function that maps any tensor with those leading dimensions to its new form; each kind of spec applies that
function to its own parameters (bounds, masks, members).

A dimension of size -1 is *dynamic*: any size fits. Values that a spec makes have size 1 there, and so have parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.errors import IndexRangeError, InvalidArgumentError, InvalidTypeError

Transform = Callable[[Tensor], Tensor]
Shape = TypeVar("Shape", bound="Geometry")


def as_size(args: Sequence[Any]) -> torch.Size:
    """Return the size meant by `f(2, 3)`, `f((2, 3))` or `f(torch.Size((2, 3)))`.

    Raises:
        InvalidTypeError: if an entry is no integer.
        InvalidArgumentError: if an entry is below -1.
    """
    if len(args) == 1 and not isinstance(args[0], (int, np.integer)):
        args = args[0]
    try:
        size = torch.Size(args)
    except TypeError as error:
        raise InvalidTypeError(f"shape: expected integers, got {args!r}") from error
    if size and min(size) < -1:
        raise InvalidArgumentError(f"shape: expected sizes of at least 0, or -1 for any, got {tuple(size)}")
    return size


# Stands for -1 while an operation is worked out: a prime, whose multiples are dynamic dimensions merged with others
_ANY = 1_000_003


def blank(shape: Sequence[int]) -> Tensor:
    """Return a tensor of `shape` that holds one number only, for working out the effect of an operation."""
    return torch.zeros(()).expand([_ANY if size == -1 else size for size in shape])


def outcome(tensor: Tensor) -> torch.Size:
    """Return the shape that an operation has made of that of `blank`."""
    return torch.Size([-1 if size and size % _ANY == 0 else size for size in tensor.shape])


def concrete(shape: Sequence[int]) -> torch.Size:
    """Return a shape with size 1 in dynamic dimensions."""
    if -1 not in shape:
        return torch.Size(shape)
    return torch.Size([1 if size == -1 else size for size in shape])


def fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether a value of `shape` has the `expected` trailing dimensions, of which -1 fits any size."""
    tail = tuple(shape[max(len(shape) - len(expected), 0) :])
    return tail == tuple(expected) or (
        -1 in expected
        and len(tail) == len(expected)
        and all(want in (-1, size) for size, want in zip(tail, expected, strict=True))
    )


def on_parameters(transform: Transform, batch: torch.Size) -> Transform:
    """Return a shape operation on batch dimensions as one on parameters, of size 1 in dynamic dimensions."""
    if -1 not in batch:
        return transform

    def transformed(parameter: Tensor) -> Tensor:
        own = parameter.shape[len(batch) :]
        made = transform(parameter.expand([*blank(batch).shape, *own]))
        for axis, size in enumerate(outcome(made)):
            made = made.narrow(axis, 0, 1) if size == -1 else made
        return made

    return transformed


def _as_index(item: Any) -> Any:
    if isinstance(item, (list, range)):
        return torch.tensor(list(item))
    if isinstance(item, np.ndarray):
        return torch.from_numpy(item.copy())
    if isinstance(item, (bool, np.bool_)):
        raise InvalidTypeError("index: expected integers, slices, None, Ellipsis or tensors, got a boolean")
    if isinstance(item, np.integer):
        return int(item)
    if item is None or item is Ellipsis or isinstance(item, (int, slice, Tensor)):
        return item
    raise InvalidTypeError(f"index: expected integers, slices, None, Ellipsis or tensors, got {item!r}")


def _consumed(item: Any) -> int:
    """Return how many dimensions an index item uses up."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.ndim
    return 1


def as_items(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return an index as a tuple of what torch's tensors take, one that fits a value of `shape`.

    Raises:
        InvalidTypeError: if an item is something else.
        IndexRangeError: if there are more items than dimensions, or several Ellipses.
    """
    items = tuple(_as_index(item) for item in (index if isinstance(index, tuple) else (index,)))
    if sum(map(_consumed, items)) > len(shape):
        raise IndexRangeError(f"index: too many indices for shape {tuple(shape)}: {index!r}")
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexRangeError(f"index: at most one Ellipsis, got {index!r}")
    return items


def spread(items: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Return the items of an index with slices for the Ellipsis, over what the others leave of `ndim` dimensions."""
    for i, item in enumerate(items):
        if item is Ellipsis:
            return (*items[:i], *[slice(None)] * (ndim - sum(map(_consumed, items))), *items[i + 1 :])
    return items


def within(items: tuple[Any, ...], ndim: int) -> tuple[Any, ...] | None:
    """Return the items of an index on the first `ndim` dimensions; None if one behind them isn't a full slice."""
    kept: list[Any] = []
    seen = 0
    for item in items:
        seen += _consumed(item)
        if seen <= ndim:
            kept.append(item)
        elif not (isinstance(item, slice) and item == slice(None)):
            return None
    return tuple(kept)


def indexing(items: tuple[Any, ...], shape: Sequence[int]) -> Transform:
    """Return the operation that indexes tensors, of which the dimensions `shape` come first.

    Raises:
        IndexRangeError: if the index is out of range.
    """
    try:
        blank(shape)[items]
    except IndexError as error:
        raise IndexRangeError(
            f"index: {items!r} is out of range for shape {tuple(shape)}: {error}"
        ) from error
    return lambda t: t[items]


def goes_back(index: Any) -> bool:
    """Return whether an index holds a slice with a negative step."""
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, slice) and item.step is not None and item.step < 0 for item in items)


class Geometry(ABC):
    """Something with a shape whose leading `batch_ndim` dimensions can be rearranged."""

    shape: torch.Size

    @property
    @abstractmethod
    def batch_ndim(self) -> int:
        """The number of leading dimensions that shape operations may touch."""

    @abstractmethod
    def _reshaped(self, transform: Transform) -> Self:
        """Return the spec whose parameters are those of this one, mapped by `transform`.

        Args:
            transform: maps a tensor `(*batch, *anything)` to `(*new_batch, *anything)`.
        """

    @property
    def batch_shape(self) -> torch.Size:
        """The dimensions that shape operations may touch."""
        return self.shape[: self.batch_ndim]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def ndimension(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements of one value."""
        return concrete(self.shape).numel()

    def expand(self, *shape: Any) -> Self:
        """Return the spec expanded to `shape`, as `torch.Tensor.expand`; new dimensions come first.

        Raises:
            InvalidArgumentError: if the shape can't be reached, or changes the dimensions of one value.
        """
        new = as_size(shape)
        if len(new) < self.ndim:
            raise InvalidArgumentError(f"expand: expected at least {self.ndim} dimensions, got {tuple(new)}")
        batch, keep = self._split("expand", new), self.batch_ndim
        return self._checked("expand", lambda t: t.expand((*batch, *t.shape[keep:])))

    def reshape(self, *shape: Any) -> Self:
        """Return the spec reshaped, as `torch.Tensor.reshape`; one entry of `shape` may be -1.

        Raises:
            InvalidArgumentError: if the shape can't be reached, or changes the dimensions of one value.
        """
        asked, keep = self._split("reshape", as_size(shape)), self.batch_ndim
        try:
            batch = blank(self.batch_shape).reshape(asked).shape
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"reshape: {self!r} can't take shape {tuple(as_size(shape))}"
            ) from error
        return self._reshaped(lambda t: t.reshape((*batch, *t.shape[keep:])))

    def view(self, *shape: Any) -> Self:
        """Return the spec reshaped; the same as `reshape`."""
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Return the spec with the dimensions from `start_dim` to `end_dim` (both included) made one."""
        start, end = self._dim("flatten", start_dim), self._dim("flatten", end_dim)
        return self._checked("flatten", lambda t: t.flatten(start, end))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Return the spec with dimension `dim` split into `sizes`."""
        axis, parts = self._dim("unflatten", dim), tuple(sizes)
        return self._checked("unflatten", lambda t: t.unflatten(axis, parts))

    def unsqueeze(self, dim: int) -> Self:
        """Return the spec with a new dimension of size one at `dim`."""
        axis = self._dim("unsqueeze", dim, new=1)
        return self._reshaped(lambda t: t.unsqueeze(axis))

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Self:
        """Return the spec without the dimensions `dim`, one or several, whose size is one; None for all of them."""
        if dim is None:
            axes = {i for i, size in enumerate(self.batch_shape) if size == 1}
        else:
            axes = {self._dim("squeeze", d) for d in ((dim,) if isinstance(dim, int) else dim)}
        last_first = sorted(axes, reverse=True)
        return self._reshaped(lambda t: reduce(lambda made, axis: made.squeeze(axis), last_first, t))

    def index_select(self, dim: int, index: Tensor) -> Self:
        """Return the spec with the positions `index` (one dimension or none, integers) of dimension `dim`.

        Raises:
            InvalidArgumentError: if a position is out of range, or `index` is something else.
        """
        axis = self._dim("index_select", dim)
        return self._checked("index_select", lambda t: t.index_select(axis, index.to(t.device)))

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return the specs along dimension `dim`, one for each position; as an index gives them."""
        axis = self._dim("unbind", dim)
        if self.shape[axis] == -1:
            raise InvalidArgumentError(f"unbind: dimension {axis} of {self!r} has no fixed size")
        return tuple(self._select(axis, i) for i in range(self.shape[axis]))

    def _select(self, axis: int, position: int) -> Self:
        return self._reshaped(lambda t: t[(slice(None),) * axis + (position,)]).as_part()

    @abstractmethod
    def as_part(self) -> Self:
        """Return this spec, which was made for that, as a part of another one that refuses changes."""

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of the values that `value[index]` would give.

        It is a copy, which refuses changes, as they wouldn't reach this spec: its `clone()` can be changed. An integer
        index along the dimension of a stack of unlike specs gives the member itself.

        Where what follows an Ellipsis would reach into the encoding of one value, the Ellipsis stands for batch
        dimensions only: `[..., 0]` indexes the last of them, `[..., None]` adds one behind them.

        Raises:
            IndexRangeError: if the index is out of range.
            InvalidArgumentError: if it reaches into the encoding of one value.
        """
        if goes_back(index):
            turned, index = self._turned(index)
            return turned[index]
        items = as_items(index, self.shape)
        for ndim in (self.ndim, self.batch_ndim):
            kept = within(spread(items, ndim), self.batch_ndim)
            if kept is not None:
                return self._reshaped(indexing(kept, self.batch_shape)).as_part()
        raise self._inside_value("index", self.batch_ndim)

    def _turned(self, index: Any) -> tuple[Self, tuple[Any, ...]]:
        """Return the spec with the slices of an index applied that go backwards, and the index with full ones instead.

        Torch's tensors don't take them.
        """
        turned, axis, left = self, 0, []
        for item in spread(as_items(index, self.shape), self.ndim):
            if goes_back(item):
                positions = range(*item.indices(blank(self.shape).shape[axis]))
                if self.shape[axis] != -1:
                    turned = turned.index_select(axis, torch.tensor(positions, dtype=torch.int64))
                item = slice(None)
            left.append(item)
            axis += _consumed(item)
        return turned, tuple(left)

    def _split(self, name: str, shape: torch.Size) -> torch.Size:
        """Return the batch part of a full new shape, after checking that the rest stays as it is."""
        fixed = self.shape[self.batch_ndim :]
        cut = len(shape) - len(fixed)
        rest = shape[max(cut, 0) :]
        if cut < 0 or any(a not in (b, -1) for a, b in zip(rest, fixed, strict=True)):
            raise InvalidArgumentError(
                f"{name}: the last dimensions of {self!r} encode one value and must stay {tuple(fixed)}, "
                f"got shape {tuple(shape)}"
            )
        return shape[:cut]

    def _dim(self, name: str, dim: int, new: int = 0) -> int:
        """Return `dim` as a non-negative batch dimension."""
        limit = self.ndim + new
        if not -limit <= dim < limit:
            raise IndexRangeError(f"{name}: dimension {dim} is out of range for shape {tuple(self.shape)}")
        axis = dim % limit
        if axis >= self.batch_ndim + new:
            raise self._inside_value(name, axis)
        return axis

    def _inside_value(self, name: str, axis: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{name}: dimension {axis} of {self!r} is part of one value's encoding; "
            f"only the first {self.batch_ndim} dimensions can be rearranged"
        )

    def _checked(self, name: str, transform: Transform) -> Self:
        """Apply `transform`, turning torch's complaint about shapes into ours."""
        try:
            transform(blank(self.batch_shape))
        except (IndexError, RuntimeError) as error:
            raise InvalidArgumentError(f"{name}: not possible for {self!r}: {error}") from error
        return self._reshaped(transform)


class Unbindable(Geometry):
    """Something that is a sequence along its first dimension."""

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the first dimension."""
        return iter(self.unbind(0))

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        if not self.shape:
            raise InvalidTypeError(f"len: {self!r} has no dimensions")
        return self.shape[0]


def repeated(one: Shape, dim: int, size: int) -> Shape:
    """Return what `size` equal ones stacked along `dim` are, a new dimension."""
    axis = one._dim("stack", dim, new=1)
    return one._reshaped(lambda t: t.unsqueeze(axis).expand((*t.shape[:axis], size, *t.shape[axis:])))
