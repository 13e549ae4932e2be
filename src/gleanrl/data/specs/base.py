"""`TensorSpec`, the base class of all specs, and the shape operations that specs share.

A spec's shape has two parts: first the batch dimensions, then the dimensions that encode one value, such as the
columns of a one-hot vector. A shape operation acts on the batch dimensions only. It is one function that maps any
tensor with these leading dimensions to its new form. Each kind of spec applies this function to its own parameters:
bounds, masks or members.

A dimension of size -1 is *dynamic*: any size fits. Values that a spec makes have size 1 there. So do the parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import resolve_name
from typing_extensions import Self

from gleanrl._arrays.results import html_table
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SpecError,
    UnsupportedError,
)

Transform = Callable[[Tensor], Tensor]


def as_size(args: Sequence[Any]) -> torch.Size:
    """Return the size that a caller passed as `f(2, 3)`, `f((2, 3))` or `f(torch.Size((2, 3)))`.

    Raises:
        InvalidTypeError: if an entry isn't an integer.
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


# The size that replaces -1 while torch computes the shape of a result. It is a large prime, so that a multiple of it
# in the result can only come from a dynamic dimension, alone or merged with other dimensions.
_ANY = 1_000_003


def blank(shape: Sequence[int]) -> Tensor:
    """Return a tensor of `shape` with memory for one number, to compute the shape that an operation makes.

    A dynamic dimension gets the size `_ANY`, which `outcome` turns back into -1.
    """
    return torch.zeros(()).expand([_ANY if size == -1 else size for size in shape])


def outcome(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor that an operation made from `blank`, with -1 for dynamic dimensions."""
    return torch.Size([-1 if size and size % _ANY == 0 else size for size in tensor.shape])


def concrete(shape: Sequence[int]) -> torch.Size:
    """Return a shape with size 1 in dynamic dimensions."""
    if -1 not in shape:
        return torch.Size(shape)
    return torch.Size([1 if size == -1 else size for size in shape])


def fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether a value of `shape` has the `expected` trailing dimensions; -1 fits any size."""
    tail = tuple(shape[max(len(shape) - len(expected), 0) :])
    return tail == tuple(expected) or (
        -1 in expected
        and len(tail) == len(expected)
        and all(want in (-1, size) for size, want in zip(tail, expected, strict=True))
    )


def on_parameters(transform: Transform, batch: torch.Size) -> Transform:
    """Return a shape operation for parameters, made from one for batch dimensions.

    Parameters have size 1 in dynamic dimensions. The result expands them, applies `transform`, and narrows the new
    dynamic dimensions to size 1 again.
    """
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
    """Return the number of dimensions that an index item consumes."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.ndim
    return 1


def as_items(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return an index as a tuple of items that tensors accept, after checking it against `shape`.

    Raises:
        InvalidTypeError: if an item isn't an integer, slice, None, Ellipsis, list, range, array or tensor.
        IndexRangeError: if there are more items than dimensions, or several Ellipses.
    """
    items = tuple(_as_index(item) for item in (index if isinstance(index, tuple) else (index,)))
    if sum(map(_consumed, items)) > len(shape):
        raise IndexRangeError(f"index: too many indices for shape {tuple(shape)}: {index!r}")
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexRangeError(f"index: at most one Ellipsis, got {index!r}")
    return items


def spread(items: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Return the items of an index with the Ellipsis replaced by full slices, so that they cover `ndim` dimensions."""
    for i, item in enumerate(items):
        if item is Ellipsis:
            return (*items[:i], *[slice(None)] * (ndim - sum(map(_consumed, items))), *items[i + 1 :])
    return items


def within(items: tuple[Any, ...], ndim: int) -> tuple[Any, ...] | None:
    """Return the items that index the first `ndim` dimensions; None if a later item isn't a full slice."""
    inner: list[Any] = []
    seen = 0
    for item in items:
        seen += _consumed(item)
        if seen <= ndim:
            inner.append(item)
        elif not (isinstance(item, slice) and item == slice(None)):
            return None
    return tuple(inner)


def indexing(items: tuple[Any, ...], shape: Sequence[int]) -> Transform:
    """Return the operation that indexes tensors whose leading dimensions are `shape`.

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


def lost_change(change: str) -> UnsupportedError:
    """Return the error for a change of a spec, or of its space, if the spec is a copy of a part of another spec."""
    return UnsupportedError(
        f"{change}: this spec is a copy of a part of another one, which the change wouldn't reach; change that one, or "
        "call clone() for a spec that can be changed"
    )


def goes_back(index: Any) -> bool:
    """Return whether an index holds a slice with a negative step."""
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, slice) and item.step is not None and item.step < 0 for item in items)


DeviceLike = torch.device | str | int

# The torch functions that accept specs, with torch's argument names. `stacked.py` adds `torch.stack`, because this
# module can't import the subclasses of `TensorSpec` (import cycle).
TORCH_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.index_select: lambda input, dim, index: input.index_select(dim, index),
    torch.squeeze: lambda input, dim=None: input.squeeze(dim),
    torch.unsqueeze: lambda input, dim: input.unsqueeze(dim),
}


def stack(specs: Sequence[TensorSpec], dim: int) -> Any:
    """Return `torch.stack(specs, dim)`."""
    return TORCH_FUNCTIONS[torch.stack](specs, dim)


def as_lead(shape: Iterable[int] | None) -> torch.Size:
    """Return the leading dimensions that a caller asks for, before the dimensions of a spec; None means none.

    Raises:
        InvalidTypeError: if `shape` isn't a sequence of integers.
    """
    # The fast path: composites pass their leading dimensions to every entry, at every step of a random policy
    if type(shape) is torch.Size:
        return shape
    if shape is None:
        return torch.Size()
    try:
        return torch.Size(tuple(shape))
    except TypeError as error:
        raise InvalidTypeError(f"shape: expected a sequence of integers, got {shape!r}") from error


MOST_ROWS = 2**20
"""The largest number of values that `enumerate` returns."""
_MOST_ELEMENTS = 2**28


def require_listable(count: int, width: int = 1) -> None:
    """Check that a list of `count` values with `width` elements each is small enough for `enumerate`.

    Raises:
        UnsupportedError: if the list would take too much memory; the message gives the count.
    """
    if count > MOST_ROWS or count * width > _MOST_ELEMENTS:
        raise UnsupportedError(
            f"enumerate: expected at most {MOST_ROWS:,} values with {_MOST_ELEMENTS:,} elements together, got "
            f"{count:,} values of {width:,} elements; enumerate parts of the spec, or draw values with rand()"
        )


def combinations(values: Sequence[Any]) -> list[Any]:
    """Return stacks of equal length whose rows are all combinations of the given values; the last changes fastest.

    Without values the result is empty. Too many combinations raise `UnsupportedError`; see `require_listable`.
    """
    if not values:
        return []
    require_listable(math.prod(map(len, values)), len(values))
    picks = torch.cartesian_prod(*(torch.arange(len(each)) for each in values)).reshape(-1, len(values))
    return [each[pick] for each, pick in zip(values, picks.unbind(-1), strict=True)]


def check_in(where: str, spec: TensorSpec, value: Any) -> None:
    """Check that `value` is in the domain of `spec`.

    Raises:
        SpecError: if it isn't; the message starts with `where`, the name of the call.
    """
    fault = spec._fault(value)
    if fault is not None:
        raise SpecError(f"{where}: {fault}")


class TensorSpec(ABC):
    """A domain of values: their shape, dtype and device, and the set of allowed values.

    A value fits a spec if its trailing dimensions are the spec's `shape`. It may have any number of leading
    dimensions. The device of a value isn't part of the domain. Specs compare by content and aren't hashable.

    A shape operation, such as `expand` or indexing, returns a new spec, whose bounds and masks may share memory with
    the old one. It rearranges the leading `batch_ndim` dimensions. Negative dimensions count from the end of the whole
    shape. Each operation raises `IndexRangeError` if a dimension is out of range, and `InvalidArgumentError` if it
    belongs to the encoding of one value.

    Attributes:
        shape: the shape of one value; where it is -1, any size fits, and values that the spec makes have size 1.
        dtype: the dtype of the values; None if they have none (composites, non-tensors).
        device: the device on which values are made; None if it isn't fixed (composites, non-tensors).
        domain: "continuous" or "discrete", "composite" for composites, None for non-tensors, choices, and stacks whose
            members have different domains.
    """

    shape: torch.Size
    dtype: torch.dtype | None
    device: torch.device | None
    domain: str | None
    __hash__ = None  # type: ignore[assignment]
    # Whether this spec is a copy of a part of another spec. A change wouldn't reach the other spec, and raises
    is_part = False

    def _parts(self) -> Sequence[TensorSpec] | None:
        """Return the specs that this one is made of: entries, members or choices. None: the spec is a leaf."""
        return None

    def _mapped(self, function: Callable[[TensorSpec], TensorSpec]) -> Self:
        """Return a spec like this one, which has parts, with `function` applied to each part."""
        raise UnsupportedError(f"{type(self).__name__} has no parts")

    def as_part(self) -> Self:
        """Mark this spec, a fresh copy of a part of another spec, and its parts as read-only, and return it."""
        for part in self._parts() or ():
            part.as_part()
        self.is_part = True
        return self

    def as_entry(self) -> Self:
        """Return a spec that can be an entry of a composite: it can be changed, and its values have exactly its shape.

        The result is this spec itself if it meets both conditions, else a clone.
        """
        return self.clone() if self.is_part else self

    def require_own(self, change: str) -> None:
        """Check that a change of this spec takes effect.

        Raises:
            UnsupportedError: if this spec is a copy of a part of another spec; the message starts with `change`.
        """
        if self.is_part:
            raise lost_change(change)

    @abstractmethod
    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Any:
        """Draw values of shape `(*lead, *self.shape)`."""

    @abstractmethod
    def _filled(self, lead: torch.Size, number: int) -> Any:
        """Return values of shape `(*lead, *self.shape)` filled with `number`, 0 or 1."""

    @abstractmethod
    def _misfit(self, value: Any) -> str | None:
        """Return why `value` can't have the shape of this spec ("expected ..., got ..."), or None."""

    @abstractmethod
    def _fault(self, value: Any) -> str | None:
        """Return why `value` isn't in the domain ("expected ..., got ..."), or None if it is."""

    @abstractmethod
    def _projected(self, value: Any) -> Any:
        """Return a value in the domain close to `value`, which is outside but has the right shape."""

    @abstractmethod
    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Convert a value of an environment (NumPy array, number, list or tensor) to a value of this spec.

        Args:
            val: the value that the environment returned.
            ignore_device: leave the result on the device of the input, so that the caller can move several results
                at once.
        """

    @abstractmethod
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Convert a value of this spec to the form that an environment takes.

        Args:
            val: `(*lead, *self.shape)`.
            safe: whether to check the domain; None: check it, except for `Bounded` and `Unbounded` specs.

        Raises:
            SchemaError: if the shape doesn't fit.
            SpecError: if the domain is checked and the value is outside.
        """

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtype of a value and nothing else.

        Args:
            value: the value to check.
            key: the name of the value, for the message.

        Raises:
            InvalidTypeError: if the dtype isn't the spec's.
        """

    @abstractmethod
    def cardinality(self) -> int | float:
        """Return the number of values in the domain, without regard to masks; infinity for continuous specs.

        Positions of a batch of choices take the same choice, as in `enumerate`.
        """

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return the values of a discrete spec, stacked along a new first dimension.

        All positions of a batch take the same choice: in the first value all have choice 0, in the second choice 1.
        Several choices in one value give all combinations, and the last choice changes fastest. A `Choice` returns a
        list of values instead.

        Args:
            use_mask: leave out the choices that a mask forbids.

        Raises:
            UnsupportedError: if the spec is `Bounded`, `Unbounded` or non-tensor, has more than `MOST_ROWS` values, or
                its values have more than 2**28 elements in all.
        """
        raise UnsupportedError(f"enumerate: {self!r} has infinitely many values")

    @abstractmethod
    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device or dtype; the spec itself if `dest` changes nothing."""

    def clone(self) -> Self:
        """Return an equal spec that shares no memory with this one except a `NonTensor` example.

        The clone is neither locked nor read-only, even if this spec is.
        """
        return self._mapped(lambda part: part.clone())

    def rand(self, shape: Iterable[int] | None = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values from the domain.

        Args:
            shape: leading dimensions, in addition to the spec's own.
            generator: the source of randomness; None: torch's global generator.

        Returns:
            values of shape `(*shape, *self.shape)`. A composite draws a TensorDict without its None entries. If the
            members of a stack differ in keys or shapes, it is a lazy stack. A non-tensor spec returns its example.

        Raises:
            UnsupportedError: if leaves of different shapes would have to become one tensor, or a number of choices is
                0 or isn't fixed.
        """
        return self._rand(as_lead(shape), generator)

    def sample(self, shape: Iterable[int] | None = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values from the domain; the same as `rand`."""
        return self.rand(shape, generator=generator)

    def zero(self, shape: Iterable[int] | None = ()) -> Any:
        """Return zeros of shape `(*shape, *self.shape)`; they may be outside the domain.

        A non-tensor spec returns its example, alone or as an entry of a composite.
        """
        return self._filled(as_lead(shape), 0)

    def zeros(self, shape: Iterable[int] | None = ()) -> Any:
        """Return zeros; the same as `zero`."""
        return self.zero(shape)

    def one(self, shape: Iterable[int] | None = ()) -> Any:
        """Return ones of shape `(*shape, *self.shape)`; they may be outside the domain.

        A non-tensor spec returns its example, alone or as an entry of a composite.
        """
        return self._filled(as_lead(shape), 1)

    def ones(self, shape: Iterable[int] | None = ()) -> Any:
        """Return ones; the same as `one`."""
        return self.one(shape)

    def project(self, val: Any) -> Any:
        """Return `val` itself if it is in the domain, otherwise a close value that is.

        The call never changes a tensor: it returns a new one. In a TensorDict it replaces the entries that are outside
        in place, and returns the TensorDict.

        Raises:
            SpecError: if no value in the domain is close: a wrong type or shape, a missing key, a NaN, or an empty
                domain.
        """
        if self._fault(val) is None:
            return val
        misfit = self._misfit(val)
        if misfit is not None:
            raise SpecError(f"project: {misfit}")
        return self._projected(val)

    def is_in(self, val: Any) -> bool:
        """Return whether `val`, with all its leading dimensions, is in the domain."""
        return self._fault(val) is None

    def contains(self, item: Any) -> bool:
        """Return whether `item` is in the domain; the same as `is_in`."""
        return self._fault(item) is None

    def assert_is_in(self, value: Any) -> None:
        """Check that `value` is in the domain.

        Raises:
            SpecError: if it isn't; the message holds the expected and the received value.
        """
        check_in("assert_is_in", self, value)

    def clear_device_(self) -> Self:
        """Drop the device of a composite; specs of tensors always have a device, and keep it.

        Returns:
            the spec itself.
        """
        return self

    def memoize_encode(self, mode: bool = True) -> None:  # noqa: B027 - there is nothing to do
        """Do nothing: `encode` has no cache. Programs for other releases call this method."""

    def erase_memoize_cache(self) -> None:  # noqa: B027
        """Do nothing: `encode` has no cache. Programs for other releases call this method."""

    def cpu(self) -> Self:
        """Return the spec for the CPU."""
        return self.to("cpu")

    def cuda(self, device: DeviceLike | None = None) -> Self:
        """Return the spec for a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else device)

    # ----------------------------------------------------------------- shape
    @property
    @abstractmethod
    def batch_ndim(self) -> int:
        """The number of leading dimensions that shape operations may touch."""

    @abstractmethod
    def _reshaped(self, transform: Transform) -> Self:
        """Return a spec with this spec's parameters, each mapped by `transform`.

        Args:
            transform: maps a tensor `(*batch, *anything)` to `(*new_batch, *anything)`.
        """

    @property
    def batch_shape(self) -> torch.Size:
        """The sizes of the dimensions that shape operations may touch."""
        return self.shape[: self.batch_ndim]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def ndimension(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements of `shape`, with size 1 in dynamic dimensions."""
        return concrete(self.shape).numel()

    def expand(self, *shape: Any) -> Self:
        """Return the spec expanded to `shape`, like `torch.Tensor.expand`; new dimensions come first.

        Raises:
            InvalidArgumentError: if the spec can't expand to `shape`, or `shape` changes the dimensions of one value.
        """
        new = as_size(shape)
        if len(new) < self.ndim:
            raise InvalidArgumentError(f"expand: expected at least {self.ndim} dimensions, got {tuple(new)}")
        batch, keep = self._split("expand", new), self.batch_ndim
        return self._checked("expand", lambda t: t.expand((*batch, *t.shape[keep:])))

    def reshape(self, *shape: Any) -> Self:
        """Return the spec reshaped, like `torch.Tensor.reshape`; one entry of `shape` may be -1.

        Raises:
            InvalidArgumentError: if the sizes don't match, or `shape` changes the dimensions of one value.
        """
        requested, keep = self._split("reshape", as_size(shape)), self.batch_ndim
        try:
            batch = blank(self.batch_shape).reshape(requested).shape
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"reshape: {self!r} can't take shape {tuple(as_size(shape))}"
            ) from error
        return self._reshaped(lambda t: t.reshape((*batch, *t.shape[keep:])))

    def view(self, *shape: Any) -> Self:
        """Return the spec reshaped; the same as `reshape`."""
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Return the spec with the dimensions from `start_dim` to `end_dim` (both included) merged into one.

        The defaults merge all dimensions, so that they fail for specs such as one-hot vectors.
        """
        start, end = self._dim("flatten", start_dim), self._dim("flatten", end_dim)
        return self._checked("flatten", lambda t: t.flatten(start, end))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Return the spec with dimension `dim` split into `sizes`; one of them may be -1.

        Raises:
            InvalidArgumentError: if the product of `sizes` isn't the size of the dimension.
        """
        axis, parts = self._dim("unflatten", dim), tuple(sizes)
        return self._checked("unflatten", lambda t: t.unflatten(axis, parts))

    def unsqueeze(self, dim: int) -> Self:
        """Return the spec with a new dimension of size one at `dim`."""
        axis = self._dim("unsqueeze", dim, new=1)
        return self._reshaped(lambda t: t.unsqueeze(axis))

    def squeeze(self, dim: int | Sequence[int] | None = None) -> Self:
        """Return the spec without batch dimensions of size one.

        Args:
            dim: the dimensions to remove, one or several; dimensions of another size stay. None: all of size one.
        """
        if dim is None:
            axes = {i for i, size in enumerate(self.batch_shape) if size == 1}
        else:
            axes = {self._dim("squeeze", d) for d in ((dim,) if isinstance(dim, int) else dim)}
        last_first = sorted(axes, reverse=True)
        return self._reshaped(lambda t: reduce(lambda made, axis: made.squeeze(axis), last_first, t))

    def index_select(self, dim: int, index: Tensor) -> Self:
        """Return the spec with the selected positions of dimension `dim`, like `torch.index_select`.

        Args:
            dim: the batch dimension.
            index: the positions, an integer tensor with at most one dimension.

        Raises:
            InvalidArgumentError: if a position is out of range, or `index` has another dtype or more dimensions.
        """
        axis = self._dim("index_select", dim)
        return self._checked("index_select", lambda t: t.index_select(axis, index.to(t.device)))

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return the specs along dimension `dim`, one for each position, as indexing would return them.

        Raises:
            InvalidArgumentError: if the dimension is dynamic.
        """
        axis = self._dim("unbind", dim)
        if self.shape[axis] == -1:
            raise InvalidArgumentError(f"unbind: dimension {axis} of {self!r} has no fixed size")
        return tuple(self._select(axis, i) for i in range(self.shape[axis]))

    def _select(self, axis: int, position: int) -> Self:
        return self._reshaped(lambda t: t[(slice(None),) * axis + (position,)]).as_part()

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of the values that `value[index]` would give.

        The result is a read-only copy, because a change of it wouldn't reach this spec. Its `clone()` can be changed.
        Bounds of the copy may share this spec's memory (see `ContinuousBox`). An integer index along the dimension of a
        stack of unlike specs returns the member itself.

        If the items after an Ellipsis would reach into the encoding of one value, the Ellipsis covers batch
        dimensions only. So `[..., 0]` indexes the last batch dimension, and `[..., None]` adds one after it.

        Raises:
            IndexRangeError: if the index is out of range.
            InvalidArgumentError: if the index reaches into the encoding of one value.
            InvalidTypeError: if an item of the index is a boolean, or has another type that tensors don't accept.
        """
        if goes_back(index):
            turned, index = self._turned(index)
            return turned[index]
        items = as_items(index, self.shape)
        for ndim in (self.ndim, self.batch_ndim):
            inner = within(spread(items, ndim), self.batch_ndim)
            if inner is not None:
                return self._reshaped(indexing(inner, self.batch_shape)).as_part()
        raise self._inside_value("index", self.batch_ndim)

    def _turned(self, index: Any) -> tuple[Self, tuple[Any, ...]]:
        """Apply the slices with a negative step; return the new spec, and the index with full slices in their place.

        Tensors refuse slices with a negative step, so that `index_select` applies them first.
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
        """Return the batch part of a full new shape, after checking that the other dimensions don't change."""
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
        """Return `dim` as a non-negative batch dimension.

        Raises:
            IndexRangeError: if it is out of range for the shape with `new` more dimensions.
            InvalidArgumentError: if it belongs to the encoding of one value.
        """
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
        """Return the spec after `transform`; an error of torch about shapes becomes an `InvalidArgumentError`."""
        try:
            transform(blank(self.batch_shape))
        except (IndexError, RuntimeError) as error:
            raise InvalidArgumentError(f"{name}: not possible for {self!r}: {error}") from error
        return self._reshaped(transform)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first dimension."""
        return iter(self.unbind(0))

    def __len__(self) -> int:
        """Return the size of the first dimension.

        Raises:
            InvalidTypeError: if the spec has no dimensions, or the first one may have any size.
        """
        if not self.shape or self.shape[0] < 0:
            raise InvalidTypeError(f"len: expected a fixed first dimension, got {self!r}")
        return self.shape[0]

    def __bool__(self) -> bool:
        """Return True, so that `if spec:` tells a spec from None, whatever the spec's length."""
        return True

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, ("key", "spec"), self.listed().items())

    def listed(self) -> dict[Any, Any]:
        """Return the specs of all leaves by key; the key of a spec that isn't composite is empty."""
        return {"": self}

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve the torch functions in `TORCH_FUNCTIONS`.

        Raises:
            InvalidTypeError: for any other torch function.
        """
        if function not in TORCH_FUNCTIONS:
            served = ", ".join(sorted(f"torch.{each.__name__}" for each in TORCH_FUNCTIONS))
            raise InvalidTypeError(
                f"{resolve_name(function) or function}: specs aren't tensors; expected one of {served}, or a method of "
                "the spec"
            )
        return TORCH_FUNCTIONS[function](*args, **(kwargs or {}))


def repeated(one: TensorSpec, dim: int, size: int) -> Any:
    """Return the spec of `size` values of `one` stacked along a new dimension `dim`; it may share memory with `one`."""
    axis = one._dim("stack", dim, new=1)
    return one._reshaped(lambda t: t.unsqueeze(axis).expand((*t.shape[:axis], size, *t.shape[axis:])))
