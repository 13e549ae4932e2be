"""What stacks of unlike specs share: members along a dimension, shape operations on them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike, TensorSpec, combinations, stack
from gleanrl.data.specs.geometry import Transform, repeated
from gleanrl.data.specs.mapping import SpecMapping, projected
from gleanrl.data.specs.non_tensor import NonTensor
from gleanrl.errors import IndexRangeError, InvalidArgumentError, SchemaError


def without_examples(spec: Any) -> Any:
    """Return a spec whose non-tensors have no examples, for comparisons; the spec itself if there are none."""
    if type(spec) is NonTensor:
        return spec.without_example()
    if isinstance(spec, Stack):
        members = [without_examples(member) for member in spec.specs]
        return spec if all(map(is_, members, spec.specs)) else type(spec)(*members, dim=spec.stack_dim)
    if isinstance(spec, SpecMapping):
        bare = {name: without_examples(entry) for name, entry in spec.items()}
        return spec if all(bare[name] is entry for name, entry in spec.items()) else spec.empty().update(bare)
    return spec


def restacked(stacked: Stack, transform: Transform) -> Any:
    """Return the stack after a shape operation.

    The operation is applied to the numbers of the members, laid out in the shape of the stack: where they all
    come out the same, that member alone is left; otherwise the result is a stack along the first dimension
    in which they differ.
    """
    dim, size = stacked.stack_dim, len(stacked.specs)
    after = (1,) * (stacked.batch_ndim - dim - 1)
    numbers = torch.arange(size).reshape((size, *after)).expand(stacked.batch_shape)

    def build(operation: Transform) -> Any:
        member = operation(numbers)
        for axis in range(member.ndim):
            if member.numel() and bool((member != member.narrow(axis, 0, 1)).any()):
                parts = [build(_followed_by_select(operation, axis, i)) for i in range(member.shape[axis])]
                return stack(parts, axis)
        number = int(member.flatten()[0]) if member.numel() else 0
        return repeated(stacked.specs[number], dim, size)._reshaped(operation)

    return build(transform)


def _followed_by_select(operation: Transform, axis: int, position: int) -> Transform:
    return lambda t: operation(t).select(axis, position)


def paired(stacked: Stack, value: Any) -> tuple[int, Iterator[tuple[TensorSpec, Any]]]:
    """Return the dimension along which a value is stacked, and each member of the stack with its part of it."""
    axis = len(stacked._size(value) or ()) - stacked.ndim + stacked.stack_dim
    return axis, zip(stacked.specs, value.unbind(axis), strict=True)


def _common_prefix(specs: Sequence[TensorSpec]) -> int:
    """Return how many leading batch dimensions all specs share."""
    sizes = [spec.batch_shape for spec in specs]
    shared = 0
    for column in zip(*sizes, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared


def _stack_shape(name: str, specs: Sequence[TensorSpec], dim: int) -> tuple[torch.Size, int, int]:
    """Return the shape of a stack (-1 where the members differ), the dimension and the batch dimensions."""
    ndim = specs[0].ndim
    if any(spec.ndim != ndim for spec in specs):
        raise InvalidArgumentError(
            f"{name}: expected as many dimensions in each, got {[s.shape for s in specs]}"
        )
    axis, prefix = dim % (ndim + 1), _common_prefix(specs)
    if not -ndim - 1 <= dim <= ndim or axis > prefix:
        raise InvalidArgumentError(
            f"{name}: expected a dimension from 0 to {prefix}, as the specs share {prefix} batch dimensions, "
            f"got {dim} for shapes {[tuple(s.shape) for s in specs]}"
        )
    sizes = [
        column[0] if len(set(column)) == 1 else -1 for column in zip(*(s.shape for s in specs), strict=True)
    ]
    return torch.Size((*sizes[:axis], len(specs), *sizes[axis:])), axis, prefix + 1


def _one_device(name: str, specs: Sequence[TensorSpec]) -> torch.device | None:
    devices = {spec.device for spec in specs}
    if len(devices) > 1:
        raise InvalidArgumentError(f"{name}: expected one device, got {sorted(map(str, devices))}")
    return devices.pop()


class Stack(TensorSpec):
    """Specs that differ, stacked along a dimension.

    Attributes:
        specs: the members, a tuple.
        stack_dim: the dimension of the stack, not negative.
    """

    specs: tuple[TensorSpec, ...]
    stack_dim: int
    _batch_ndim: int

    def __init__(self, *specs: TensorSpec, dim: int = 0) -> None:
        """Hold the members, after checking that they can be stacked along `dim`."""
        name = type(self).__name__
        self.shape, self.stack_dim, self._batch_ndim = _stack_shape(name, specs, dim)
        self.device = _one_device(name, specs)
        self.specs = specs

    @abstractmethod
    def _merged(self, parts: Sequence[Any], axis: int) -> Any:
        """Return the values of the members as one value, stacked along `axis`."""

    @abstractmethod
    def _merged_numpy(self, parts: list[Any], axis: int) -> Any:
        """Return what the members gave to an environment as one."""

    @abstractmethod
    def _size(self, value: Any) -> tuple[int, ...] | None:
        """Return the dimensions of `value`, those of the stack last, or None if it has none."""

    @property
    def dim(self) -> int:
        """The same as `stack_dim`."""
        return self.stack_dim

    @property
    def batch_ndim(self) -> int:
        """The number of leading dimensions that shape operations may touch."""
        return self._batch_ndim

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Any:
        drawn = [spec.rand(lead, generator=generator) for spec in self.specs]
        return self._merged(drawn, len(lead) + self.stack_dim)

    def _filled(self, lead: torch.Size, number: int) -> Any:
        filled = [spec.one(lead) if number else spec.zero(lead) for spec in self.specs]
        return self._merged(filled, len(lead) + self.stack_dim)

    def _projected(self, value: Any) -> Any:
        axis, pairs = paired(self, value)
        return self._merged([projected(spec, part) for spec, part in pairs], axis)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return a value as environments take it: an array, or for composites a list of dictionaries."""
        misfit = self._misfit(val)
        if misfit is not None:
            raise SchemaError(f"to_numpy: {misfit}")
        axis, pairs = paired(self, val)
        return self._merged_numpy([spec.to_numpy(part, safe) for spec, part in pairs], axis)

    def cardinality(self) -> int | float:
        """Return the number of combinations of the members' values; infinity for continuous ones."""
        return math.prod(spec.cardinality() for spec in self.specs)

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all combinations of the members' values, `(count, *shape)`; see `TensorSpec.enumerate`."""
        values = combinations([spec.enumerate(use_mask) for spec in self.specs])
        return self._merged(values, self.stack_dim + 1)

    def clear_device_(self) -> Self:
        """Forget the device of composites.

        Returns:
            the stack itself.
        """
        for spec in self.specs:
            spec.clear_device_()
        self.device = self.specs[0].device
        return self

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the stack for another device or dtype; the stack itself where that changes nothing."""
        moved = [spec.to(dest) for spec in self.specs]
        if all(new is old for new, old in zip(moved, self.specs, strict=True)):
            return self
        return self._of(moved)

    def clone(self) -> Self:
        """Return an equal stack that shares nothing with this one."""
        return self._of([spec.clone() for spec in self.specs])

    def _of(self, specs: Sequence[Any]) -> Self:
        """Return a stack of other members."""
        return type(self)(*specs, dim=self.stack_dim)

    def _reshaped(self, transform: Transform) -> Any:
        return restacked(self, transform)

    def as_part(self) -> Self:
        """Refuse changes from now on, here and in all parts; see `TensorSpec.as_part`."""
        for spec in self.specs:
            spec.as_part()
        return super().as_part()

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return the members, along the dimension of the stack; along any other one copies."""
        return self.specs if dim in (self.stack_dim, self.stack_dim - self.ndim) else super().unbind(dim)

    def __getitem__(self, index: Any) -> Any:
        """Return the member at an integer along the dimension of the stack; any other index makes a copy."""
        items = index if isinstance(index, tuple) else (index,)
        lead = [item for item in items[: self.stack_dim] if isinstance(item, slice) and item == slice(None)]
        at = items[self.stack_dim] if len(lead) == self.stack_dim == len(items) - 1 else None
        if isinstance(at, (int, np.integer)) and not isinstance(at, bool):
            if not -len(self.specs) <= at < len(self.specs):
                raise IndexRangeError(f"index: {index!r} is out of range for shape {tuple(self.shape)}")
            return self.specs[at]
        return super().__getitem__(index)

    def _misfit(self, value: Any) -> str | None:
        size = self._size(value)
        if size is None:
            return f"expected {self!r}, got {type(value).__name__}"
        tail = size[max(len(size) - self.ndim, 0) :]
        if len(tail) < self.ndim or tail[self.stack_dim] != len(self.specs):
            return f"expected {self!r}, got shape {tuple(size)}"
        return None

    def _fault(self, value: Any) -> str | None:
        fault = self._misfit(value)
        if fault is not None:
            return fault
        for i, (spec, part) in enumerate(paired(self, value)[1]):
            fault = spec._fault(part)
            if fault is not None:
                return f"position {i} along dimension {self.stack_dim}: {fault}"
        return None

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        if not isinstance(other, Stack):
            return NotImplemented
        return type(self) is type(other) and self.stack_dim == other.stack_dim and self.specs == other.specs

    def __repr__(self) -> str:
        """Return the members, one after the other."""
        members = "".join(f"    {spec!r},\n".replace("\n    ", "\n        ") for spec in self.specs)
        return f"{type(self).__name__}(\n{members}    dim={self.stack_dim})"
