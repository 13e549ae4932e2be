"""`Stacked` and `StackedComposite`, stacks of unlike specs; `torch.stack` for specs; and queries over nested specs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import (
    TORCH_FUNCTIONS,
    DeviceLike,
    TensorSpec,
    Transform,
    combinations,
    repeated,
    stack,
)
from gleanrl.data.specs.boxes import Unbounded
from gleanrl.data.specs.categorical import ChoiceSpec
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.mapping import Entry, SpecMapping, projected, require_unlocked
from gleanrl.data.specs.non_tensor import NonTensor
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)


def without_examples(spec: Any) -> Any:
    """Return a spec whose non-tensors have no examples, for comparisons; the spec itself if it has no examples."""
    if type(spec) is NonTensor:
        return spec.without_example()
    if isinstance(spec, (StackedMembers, SpecMapping)):
        bare = spec._mapped(without_examples)
        return spec if all(map(is_, bare._parts() or (), spec._parts() or ())) else bare
    return spec


def restacked(stacked: StackedMembers, transform: Transform) -> Any:
    """Return the stack after a shape operation.

    The operation is applied to an array of the stack's shape that holds the number of the member at each position. If
    all numbers in the result are equal, only this member is left. Otherwise the result is a stack along the first
    dimension in which the numbers differ, and each of its parts is built in the same way.
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


def paired(stacked: StackedMembers, value: Any) -> tuple[int, Iterator[tuple[TensorSpec, Any]]]:
    """Return the dimension along which a value is stacked, and an iterator of members with their parts of it."""
    axis = len(stacked._size(value) or ()) - stacked.ndim + stacked.stack_dim
    return axis, zip(stacked.specs, value.unbind(axis), strict=True)


def _common_prefix(specs: Sequence[TensorSpec]) -> int:
    """Return the number of leading batch dimensions that all specs share."""
    sizes = [spec.batch_shape for spec in specs]
    shared = 0
    for column in zip(*sizes, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared


def _stack_shape(name: str, specs: Sequence[TensorSpec], dim: int) -> tuple[torch.Size, int, int]:
    """Return the shape of a stack (-1 where the members differ), its dimension, and its number of batch dimensions."""
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


class StackedMembers(TensorSpec):
    """Base class of stacks: specs that differ, stacked along a dimension.

    Attributes:
        specs: the members, a tuple.
        stack_dim: the dimension of the stack, not negative.
    """

    specs: tuple[TensorSpec, ...]
    stack_dim: int
    _batch_ndim: int

    def __init__(self, *specs: TensorSpec, dim: int = 0) -> None:
        """Store the members, after checking that they can be stacked along `dim`."""
        name = type(self).__name__
        self.shape, self.stack_dim, self._batch_ndim = _stack_shape(name, specs, dim)
        self.device = _one_device(name, specs)
        self.specs = specs

    @abstractmethod
    def _merged(self, parts: Sequence[Any], axis: int) -> Any:
        """Return the values of the members as one value, stacked along `axis`."""

    @abstractmethod
    def _merged_numpy(self, parts: list[Any], axis: int) -> Any:
        """Return the results of the members' `to_numpy` as one value."""

    @abstractmethod
    def _size(self, value: Any) -> tuple[int, ...] | None:
        """Return the sizes of `value`, leading dimensions first; None if it isn't a value that can be unbound."""

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
        """Convert a value to the form that environments take: an array, or for composites a list of dictionaries."""
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
        """Drop the device of composites among the members, in place. Members that are leaves keep theirs.

        Returns:
            the stack itself.
        """
        for spec in self.specs:
            spec.clear_device_()
        self.device = self.specs[0].device
        return self

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the stack for another device or dtype; the stack itself if `dest` changes nothing."""
        moved = [spec.to(dest) for spec in self.specs]
        return self if all(map(is_, moved, self.specs)) else type(self)(*moved, dim=self.stack_dim)

    def _mapped(self, function: Callable[[TensorSpec], TensorSpec]) -> Self:
        return type(self)(*map(function, self.specs), dim=self.stack_dim)

    def _reshaped(self, transform: Transform) -> Any:
        return restacked(self, transform)

    def _parts(self) -> Sequence[TensorSpec]:
        """Return the members."""
        return self.specs

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return the members themselves along the dimension of the stack, and copies along other dimensions."""
        return self.specs if dim in (self.stack_dim, self.stack_dim - self.ndim) else super().unbind(dim)

    def __getitem__(self, index: Any) -> Any:
        """Return the member itself for an integer along the dimension of the stack, if it is the last item of `index`.

        For a key, return the entry of a stack of composites. For any other index, return a read-only copy.

        Raises:
            IndexRangeError: if the index is out of range.
        """
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
        if not isinstance(other, StackedMembers):
            return NotImplemented
        return type(self) is type(other) and self.stack_dim == other.stack_dim and self.specs == other.specs

    def __repr__(self) -> str:
        """Return the members, one after the other."""
        members = "".join(f"    {spec!r},\n".replace("\n    ", "\n        ") for spec in self.specs)
        return f"{type(self).__name__}(\n{members}    dim={self.stack_dim})"


class Stacked(StackedMembers):
    """Leaf specs of one dtype that differ in domain or in their last dimensions, stacked along a dimension.

    Where the members' shapes differ, `shape` has -1. Then values are nested tensors (`torch.nested`), which can be
    stacked along the first dimension only.

    Args:
        specs: the members; no composites.
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
        domains = {spec.domain for spec in specs}
        self.domain = domains.pop() if len(domains) == 1 else None
        super().__init__(*specs, dim=dim)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Convert a value of an environment to a new value; each position is encoded by its own spec.

        Args:
            val: an array, a tensor or a nested list with `len(specs)` entries along `stack_dim`, without
                further leading dimensions.
            ignore_device: leave the result on the device of the input.

        Raises:
            SchemaError: if the number of entries isn't the number of members.
        """
        if -1 in self.shape and isinstance(val, (list, tuple)):  # unlike shapes don't fit into an array
            parts: Sequence[Any] = val
        else:
            array = val if isinstance(val, Tensor) else torch.from_numpy(np.array(val))
            parts = array.unbind(self.stack_dim) if array.ndim > self.stack_dim else ()
        if len(parts) != len(self.specs):
            raise SchemaError(
                f"encode: expected {len(self.specs)} entries along dimension {self.stack_dim} for {self!r}, "
                f"got {len(parts)}"
            )
        encoded = [
            spec.encode(part, ignore_device=ignore_device)
            for spec, part in zip(self.specs, parts, strict=True)
        ]
        return self._merged(encoded, self.stack_dim)

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtype of a value and nothing else; see `TensorSpec.type_check`."""
        self.specs[0].type_check(value, key)

    def _merged(self, parts: Sequence[Any], axis: int) -> Any:
        if -1 not in self.shape:
            return torch.stack(list(parts), axis)
        if axis != 0:
            raise UnsupportedError(
                f"{self!r} has members of different shapes, which nested tensors stack along dimension 0 only; "
                f"use the specs of its unbind({self.stack_dim})"
            )
        return torch.nested.as_nested_tensor(list(parts))

    def _merged_numpy(self, parts: list[Any], axis: int) -> Any:
        return np.stack(parts, axis)

    def _size(self, value: Any) -> tuple[int, ...] | None:
        if isinstance(value, Tensor) and value.is_nested:
            return (value.size(0), *(-1 for _ in range(value.dim() - 1)))
        return tuple(value.shape) if hasattr(value, "unbind") else None


class StackedComposite(StackedMembers, SpecMapping):
    """Composites that differ, stacked along a dimension of their batch size.

    Its keys are the keys that all members have. An entry is the stack of the members' entries. Setting an entry sets
    its parts in the members. Its length is the size of the first dimension, like the length of `Stacked`, but iteration
    gives the keys. The stack is locked at first if all members are.

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
        super().__init__(*specs, dim=dim)
        self._locked = all(spec.is_locked for spec in specs)

    def _entries(self) -> dict[str, Entry]:
        each = [spec._entries() for spec in self.specs]
        return {name: self._entry(name, each) for name in each[0] if all(name in other for other in each)}

    def _entry(self, name: str, each: Sequence[dict[str, Entry]]) -> Entry:
        members = [spec for entries in each if (spec := entries[name]) is not None]
        if len(members) < len(each):
            return None
        made: TensorSpec = stack(members, self.stack_dim)
        # A stack of unlike entries holds the members' own specs, so that a change of them takes effect. A stack of
        # equal entries is a copy, so it is made read-only: a change of it would be lost.
        return made if isinstance(made, StackedMembers) else made.as_part()

    def _nested(self) -> Iterable[SpecMapping]:
        return self.specs

    def _assign(self, name: str, spec: Entry) -> None:
        parts: Sequence[Any] = [None] * len(self.specs)
        if spec is not None:
            parts = [part.clone() if part.is_part else part for part in spec.unbind(self.stack_dim)]
        for member in self.specs:
            require_unlocked(member, name)
        for member, part in zip(self.specs, parts, strict=True):
            member._assign(name, part)

    def _remove(self, name: str) -> None:
        for member in self.specs:
            require_unlocked(member, name)
        for member in self.specs:
            member._remove(name)

    def empty(self) -> StackedComposite:
        """Return an unlocked stack of the same shape and device without entries."""
        return StackedComposite(*(spec.empty() for spec in self.specs), dim=self.stack_dim)

    def __len__(self) -> int:
        """Return the size of the first dimension; `len(spec.keys())` is the number of keys.

        Raises:
            InvalidTypeError: if the first dimension may have any size.
        """
        return TensorSpec.__len__(self)

    def repr_exclusive_keys(self) -> str:
        """Return text that lists the entries that only some members have."""
        shared = self._entries()
        lines = [
            f"{number}: {name}: {entry!r}"
            for number, spec in enumerate(self.specs)
            for name, entry in spec._entries().items()
            if name not in shared
        ]
        return "\n".join(lines)

    def encode(self, val: Sequence[Mapping[str, Any]], *, ignore_device: bool = False) -> TensorDictBase:
        """Convert the values of the environments to one TensorDict.

        Args:
            val: one mapping for each member.
            ignore_device: leave each entry on the device of its input.

        Raises:
            SchemaError: if the number of mappings isn't the number of members.
        """
        if isinstance(val, Mapping) or is_tensor_collection(val) or len(val) != len(self.specs):
            raise SchemaError(f"encode: expected a sequence of {len(self.specs)} mappings, got {val!r}")
        encoded = [
            spec.encode(part, ignore_device=ignore_device) for spec, part in zip(self.specs, val, strict=True)
        ]
        return self._merged(encoded, self.stack_dim)

    def _check_types(self, value: Any) -> None:
        for spec, part in paired(self, value)[1]:
            spec.type_check(part)

    def _merged(self, parts: Sequence[Any], axis: int) -> TensorDictBase:
        return TensorDict.maybe_dense_stack(list(parts), axis)

    def _merged_numpy(self, parts: list[Any], axis: int) -> list[Any]:
        return parts

    def _size(self, value: Any) -> tuple[int, ...] | None:
        return tuple(value.batch_size) if is_tensor_collection(value) else None


def stack_specs(specs: Sequence[TensorSpec], dim: int = 0, *, out: None = None) -> Any:
    """Return the spec of stacked values; `torch.stack` of specs calls this function.

    Equal specs give a spec of the same class with a new dimension, which may share memory with the first one. Unlike
    specs give a `Stacked` or `StackedComposite`, which holds the given objects as its members, and clones of read-only
    ones. Specs that differ only in the examples of non-tensors count as equal, and the result has the examples of the
    first one.

    Args:
        specs: at least one spec; either all or none are composites.
        dim: position of the new dimension.
        out: must be None.

    Raises:
        InvalidTypeError: if an item isn't a spec, or composites and leaves are mixed.
        InvalidArgumentError: if `specs` is empty, or the specs can't be stacked along `dim`.
        UnsupportedError: if `out` is given.
    """
    if out is not None:
        raise UnsupportedError("stack: specs can't be stacked into `out`")
    if not specs:
        raise InvalidArgumentError("stack: expected at least one spec, got none")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise InvalidTypeError(f"stack: expected specs, got {spec!r}")
    specs = [spec.clone() if spec.is_part else spec for spec in specs]
    first, *rest = specs
    if all(spec == first for spec in rest):
        return repeated(first, dim, len(specs))
    domain = without_examples(first)
    if all(without_examples(spec) == domain for spec in rest):
        return repeated(first, dim, len(specs))
    if all(isinstance(spec, SpecMapping) for spec in specs):
        return StackedComposite(*specs, dim=dim)  # type: ignore[arg-type]
    return Stacked(*specs, dim=dim)


TORCH_FUNCTIONS[torch.stack] = stack_specs


def leaves_of(spec: Any) -> Iterator[TensorSpec]:
    """Yield the leaf specs in a spec: in composites, in the members of stacks, and among choices."""
    parts = None
    if isinstance(spec, TensorSpec) and not isinstance(spec, LeafSpec):
        parts = spec._parts()
    if parts is not None:
        for part in parts:
            yield from leaves_of(part)
    elif spec is not None:
        yield spec


def is_masked(spec: TensorSpec) -> bool:
    """Return whether a mask restricts the choices of a leaf in `spec`."""
    return any(getattr(leaf, "mask", None) is not None for leaf in leaves_of(spec))


def has_choices(spec: TensorSpec) -> bool:
    """Return whether a leaf in `spec` has choices, which a mask can restrict."""
    return any(isinstance(leaf, ChoiceSpec) for leaf in leaves_of(spec))


def without_masks(spec: TensorSpec) -> TensorSpec:
    """Return an unlocked copy of `spec` without masks; members of a stack that are then equal become one spec."""
    if isinstance(spec, StackedMembers):
        merged: TensorSpec = stack([without_masks(member) for member in spec.specs], spec.stack_dim)
        return merged
    if spec._parts() is not None:
        return spec._mapped(without_masks)
    new = spec.clone()
    if isinstance(new, ChoiceSpec):
        new.update_mask(None)
    return new


def contains_lazy_spec(spec: TensorSpec | None) -> bool:
    """Return whether a spec is a stack of unlike specs, or holds one among its entries at any depth."""
    if isinstance(spec, StackedMembers):
        return True
    return isinstance(spec, SpecMapping) and any(map(contains_lazy_spec, spec.values()))


def check_no_exclusive_keys(spec: TensorSpec | None, recurse: bool = True) -> bool:
    """Return whether no stack of composites has a key that only some of its members have.

    Args:
        spec: any spec.
        recurse: whether to check nested composites, too.
    """
    if not isinstance(spec, SpecMapping):
        return True
    if isinstance(spec, StackedComposite):
        names = [set(member.keys()) for member in spec.specs]
        if any(other != names[0] for other in names[1:]):
            return False
        if recurse and not all(check_no_exclusive_keys(member) for member in spec.specs):
            return False
    return not recurse or all(map(check_no_exclusive_keys, spec.values()))


def consolidate_spec(
    spec: TensorSpec, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> TensorSpec:
    """Return a copy of a spec in which all members of a stack have the same keys.

    A key that a member lacks gets a placeholder. The placeholder of a leaf is an unbounded spec of the same dtype. Its
    dimensions after the batch size have size 0; a leaf without such dimensions gets a placeholder of the batch size.
    The placeholder of a composite holds placeholders for its entries.

    Args:
        spec: any spec; a leaf is returned unchanged.
        recurse_through_entries: whether to treat nested composites, too.
        recurse_through_stack: whether to treat the members of a stack, too.

    Raises:
        SchemaError: if a key is a leaf in one member and a composite in another.
    """
    if not isinstance(spec, SpecMapping):
        return spec
    if not isinstance(spec, StackedComposite):
        new = spec.clone()
        if recurse_through_entries:
            for name, entry in new.items():
                if isinstance(entry, SpecMapping):
                    new.set(name, consolidate_spec(entry, True, recurse_through_stack))
        return new
    members = [member.clone() for member in spec.specs]
    if recurse_through_stack:
        members = [consolidate_spec(m, recurse_through_entries, True) for m in members]  # type: ignore[misc]
    _fill(members, recurse_through_entries)
    return StackedComposite(*members, dim=spec.stack_dim)


def _fill(members: Sequence[SpecMapping], recurse: bool) -> None:
    """Add to each member the keys that it lacks, as placeholders, in place."""
    for name in dict.fromkeys(name for member in members for name in member.keys()):
        holders = [member.get(name) for member in members if name in member]
        kinds = {isinstance(spec, SpecMapping) for spec in holders if spec is not None}
        if len(kinds) > 1:
            raise SchemaError(
                f"consolidate_spec: key {name!r} is a leaf in one member and a composite in another"
            )
        for member in members:
            if name not in member:
                member.set(name, _placeholder(holders[0], member))
        if recurse and kinds == {True}:
            _fill([member.get(name) for member in members], recurse)


def _placeholder(model: TensorSpec | None, member: SpecMapping) -> TensorSpec | None:
    """Return the placeholder for an entry like `model` in a composite that lacks it."""
    if model is None:
        return None
    if isinstance(model, SpecMapping):
        new = Composite(shape=model.shape, device=model.device)
        for name, spec in model.items():
            new.set(name, _placeholder(spec, new))
        return new
    size = torch.Size((*member.shape, *(0 for _ in range(model.ndim - member.ndim))))
    if model.dtype is None:
        return NonTensor(size, model.device)
    return Unbounded(size, model.device, model.dtype)
