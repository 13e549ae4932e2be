"""`torch.stack` for specs: equal ones give one of their kind, unlike ones a `Stacked` or a `StackedComposite`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import TORCH_FUNCTIONS, DeviceLike, TensorSpec, stack
from gleanrl.data.specs.geometry import Transform, Unbindable, repeated
from gleanrl.data.specs.mapping import Entry, SpecMapping
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, UnsupportedError


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

    def _hold(self, specs: tuple[TensorSpec, ...], dim: int) -> None:
        """Set the members, after checking that they can be stacked along `dim`."""
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
        axis, pairs = self._pairs(value)
        return self._merged([spec.project(part) for spec, part in pairs], axis)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return a value as environments take it: an array, or for composites a list of dictionaries."""
        misfit = self._misfit(value)
        if misfit is not None:
            raise SchemaError(f"to_numpy: {misfit}")
        axis, pairs = self._pairs(value)
        return self._merged_numpy([spec.to_numpy(part, safe) for spec, part in pairs], axis)

    def cardinality(self) -> int | float:
        """Return the number of values in the domain; infinity for continuous ones."""
        return math.prod(spec.cardinality() for spec in self.specs)

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
        return type(self)(*specs, dim=self.stack_dim)  # type: ignore[call-arg]

    def _reshaped(self, transform: Transform) -> Any:
        return restacked(self, transform)

    def _pairs(self, value: Any) -> tuple[int, Iterator[tuple[TensorSpec, Any]]]:
        """Return the dimension along which `value` is stacked, and each member with its part."""
        axis = len(self._size(value) or ()) - self.ndim + self.stack_dim
        return axis, zip(self.specs, value.unbind(axis), strict=True)

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
        for i, (spec, part) in enumerate(self._pairs(value)[1]):
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


class Stacked(Unbindable, Stack):
    """Leaf specs of one dtype that differ in domain or in their last dimensions, stacked along a dimension.

    Where the members' shapes differ, `shape` has -1. Such a stack describes no single tensor: it can be
    indexed and unbound, but not drawn from.

    Args:
        specs: the members; not composites.
        dim: the dimension of the stack.

    Raises:
        InvalidTypeError: if a member is a composite.
        InvalidArgumentError: if the members differ in dtype, device or number of dimensions, or can't be
            stacked along `dim`.
    """

    def __init__(self, *specs: TensorSpec, dim: int = 0) -> None:
        if not specs or not all(isinstance(s, TensorSpec) and not isinstance(s, SpecMapping) for s in specs):
            raise InvalidTypeError(f"Stacked: expected leaf specs, got {specs!r}")
        if len({spec.dtype for spec in specs}) > 1:
            raise InvalidArgumentError(f"Stacked: expected one dtype, got {[spec.dtype for spec in specs]}")
        self.dtype = specs[0].dtype
        self._hold(specs, dim)

    def encode(self, value: Any) -> Any:
        """Return what an environment gave as a new value; each position is encoded by its own spec.

        Args:
            value: an array, a tensor or a nested list with `len(specs)` entries along `stack_dim`, without
                further leading dimensions.

        Raises:
            SchemaError: if there aren't as many entries as members.
        """
        array = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        if array.ndim <= self.stack_dim or array.shape[self.stack_dim] != len(self.specs):
            raise SchemaError(
                f"encode: expected {len(self.specs)} entries along dimension {self.stack_dim} for {self!r}, "
                f"got shape {tuple(array.shape)}"
            )
        parts = array.unbind(self.stack_dim)
        encoded = [spec.encode(part) for spec, part in zip(self.specs, parts, strict=True)]
        return self._merged(encoded, self.stack_dim)

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtype of a value and nothing else; see `TensorSpec.type_check`."""
        self.specs[0].type_check(value, key)

    def _merged(self, parts: Sequence[Any], axis: int) -> Any:
        if -1 in self.shape:
            raise UnsupportedError(
                f"{self!r} has members of different shapes, which no tensor can hold; "
                f"use the specs of its unbind({self.stack_dim})"
            )
        return torch.stack(list(parts), axis)

    def _merged_numpy(self, parts: list[Any], axis: int) -> Any:
        return np.stack(parts, axis)

    def _size(self, value: Any) -> tuple[int, ...] | None:
        return tuple(value.shape) if hasattr(value, "unbind") else None


class StackedComposite(Stack, SpecMapping):
    """Composites that differ, stacked along a dimension of their batch size.

    Its keys are those that all members have; an entry is the stack of the members' entries. Setting an entry
    sets its parts in the members.

    Args:
        specs: the members, composites of one shape.
        dim: the dimension of the stack.

    Raises:
        InvalidTypeError: if a member isn't a composite.
        InvalidArgumentError: if the members differ in shape or device, or `dim` is out of range.
    """

    specs: tuple[SpecMapping, ...]

    def __init__(self, *specs: SpecMapping, dim: int = 0) -> None:
        if not specs or not all(isinstance(spec, SpecMapping) for spec in specs):
            raise InvalidTypeError(f"StackedComposite: expected composites, got {specs!r}")
        if len({spec.shape for spec in specs}) > 1:
            shapes = [tuple(spec.shape) for spec in specs]
            raise InvalidArgumentError(f"StackedComposite: expected one shape, got {shapes}")
        self._hold(specs, dim)
        self._locked = all(spec.is_locked for spec in specs)

    def _entries(self) -> dict[str, Entry]:
        each = [spec._entries() for spec in self.specs]
        return {name: self._entry(name, each) for name in each[0] if all(name in other for other in each)}

    def _entry(self, name: str, each: Sequence[dict[str, Entry]]) -> Entry:
        members = [spec for entries in each if (spec := entries[name]) is not None]
        return stack(members, self.stack_dim) if len(members) == len(each) else None

    def _nested(self) -> Iterable[SpecMapping]:
        return self.specs

    def _assign(self, name: str, spec: Entry) -> None:
        parts = [None] * len(self.specs) if spec is None else spec.unbind(self.stack_dim)
        for member, part in zip(self.specs, parts, strict=True):
            member._assign(name, part)

    def _remove(self, name: str) -> None:
        for member in self.specs:
            member._remove(name)

    def empty(self) -> StackedComposite:
        """Return a stack of the same shape and device without entries, unlocked."""
        return self._of([spec.empty() for spec in self.specs])

    def encode(self, value: Sequence[Mapping[str, Any]]) -> TensorDictBase:
        """Return what the environments gave as one TensorDict.

        Args:
            value: one mapping for each member.

        Raises:
            SchemaError: if there aren't as many mappings as members.
        """
        if isinstance(value, Mapping) or is_tensor_collection(value) or len(value) != len(self.specs):
            raise SchemaError(f"encode: expected a sequence of {len(self.specs)} mappings, got {value!r}")
        encoded = [spec.encode(part) for spec, part in zip(self.specs, value, strict=True)]
        return self._merged(encoded, self.stack_dim)

    def _check_types(self, value: Any) -> None:
        for spec, part in self._pairs(value)[1]:
            spec.type_check(part)

    def _merged(self, parts: Sequence[Any], axis: int) -> TensorDictBase:
        return TensorDict.maybe_dense_stack(list(parts), axis)

    def _merged_numpy(self, parts: list[Any], axis: int) -> list[Any]:
        return parts

    def _size(self, value: Any) -> tuple[int, ...] | None:
        return tuple(value.batch_size) if is_tensor_collection(value) else None


def stack_specs(specs: Sequence[TensorSpec], dim: int = 0, *, out: None = None) -> Any:
    """Return the spec of stacked values; this is what `torch.stack` does for specs.

    Equal specs give one of their kind with a new dimension, others a `Stacked` or `StackedComposite`. The
    members of a stack are the given objects.

    Args:
        specs: at least one; all composites or none.
        dim: where the new dimension goes.
        out: must be None.

    Raises:
        InvalidTypeError: if something isn't a spec, or composites and leaves are mixed.
        InvalidArgumentError: if there is no spec, or they can't be stacked along `dim`.
        UnsupportedError: if `out` is given.
    """
    if out is not None:
        raise UnsupportedError("stack: specs can't be stacked into `out`")
    if not specs:
        raise InvalidArgumentError("stack: expected at least one spec, got none")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise InvalidTypeError(f"stack: expected specs, got {spec!r}")
    first = specs[0]
    if all(spec == first for spec in specs[1:]):
        return repeated(first, dim, len(specs))
    if all(isinstance(spec, SpecMapping) for spec in specs):
        return StackedComposite(*specs, dim=dim)  # type: ignore[arg-type]
    return Stacked(*specs, dim=dim)


TORCH_FUNCTIONS[torch.stack] = stack_specs
