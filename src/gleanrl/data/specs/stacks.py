"""`torch.stack` for specs: equal ones give one of their kind, unlike ones a `Stacked` or a `StackedComposite`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from gleanrl.data.specs.base import TORCH_FUNCTIONS, TensorSpec, stack
from gleanrl.data.specs.geometry import Unbindable, repeated
from gleanrl.data.specs.locks import require_unlocked
from gleanrl.data.specs.mapping import Entry, SpecMapping
from gleanrl.data.specs.members import Stack, paired, without_examples
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, UnsupportedError


class Stacked(Unbindable, Stack):
    """Leaf specs of one dtype that differ in domain or in their last dimensions, stacked along a dimension.

    Where the members' shapes differ, `shape` has -1, and values are nested tensors (`torch.nested`), which stack along
    the first dimension only.

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
        domains = {spec.domain for spec in specs}
        self.domain = domains.pop() if len(domains) == 1 else None
        super().__init__(*specs, dim=dim)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return what an environment gave as a new value; each position is encoded by its own spec.

        Args:
            val: an array, a tensor or a nested list with `len(specs)` entries along `stack_dim`, without
                further leading dimensions.
            ignore_device: leave the result where the input was.

        Raises:
            SchemaError: if there aren't as many entries as members.
        """
        if -1 in self.shape and isinstance(val, (list, tuple)):  # no array holds what it does
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
                f"{self!r} has members of different shapes, and nested tensors hold those along dimension 0 only; "
                f"use the specs of its unbind({self.stack_dim})"
            )
        return torch.nested.as_nested_tensor(list(parts))

    def _merged_numpy(self, parts: list[Any], axis: int) -> Any:
        return np.stack(parts, axis)

    def _size(self, value: Any) -> tuple[int, ...] | None:
        if isinstance(value, Tensor) and value.is_nested:
            return (value.size(0), *(-1 for _ in range(value.dim() - 1)))
        return tuple(value.shape) if hasattr(value, "unbind") else None


class StackedComposite(Stack, SpecMapping):
    """Composites that differ, stacked along a dimension of their batch size.

    Its keys are those that all members have; an entry is the stack of the members' entries. Setting an entry
    sets its parts in the members. Its length is the size of the first dimension, as that of a stack of leaves.

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
        # A stack of unlike ones holds the members themselves
        return made if isinstance(made, Stack) else made.as_part()

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
        """Return a stack of the same shape and device without entries, unlocked."""
        return StackedComposite(*(spec.empty() for spec in self.specs), dim=self.stack_dim)

    def __len__(self) -> int:
        """Return the size of the first dimension; the number of keys is that of `keys`."""
        return self.shape[0]

    def repr_exclusive_keys(self) -> str:
        """Return the entries that only some of the members have, as text."""
        shared = self._entries()
        lines = [
            f"{number}: {name}: {entry!r}"
            for number, spec in enumerate(self.specs)
            for name, entry in spec._entries().items()
            if name not in shared
        ]
        return "\n".join(lines)

    def encode(self, val: Sequence[Mapping[str, Any]], *, ignore_device: bool = False) -> TensorDictBase:
        """Return what the environments gave as one TensorDict.

        Args:
            val: one mapping for each member.
            ignore_device: leave each entry where the input was.

        Raises:
            SchemaError: if there aren't as many mappings as members.
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
    """Return the spec of stacked values; this is what `torch.stack` does for specs.

    Equal specs give one of their kind with a new dimension, others a `Stacked` or `StackedComposite`. The
    members of a stack are the given objects. Specs that differ in nothing but the examples of non-tensors count as
    equal; the result has the examples of the first one.

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
    specs = [spec.clone() if spec.is_part else spec for spec in specs]
    first, *others = specs
    if all(spec == first for spec in others):
        return repeated(first, dim, len(specs))
    domain = without_examples(first)
    if all(without_examples(spec) == domain for spec in others):
        return repeated(first, dim, len(specs))
    if all(isinstance(spec, SpecMapping) for spec in specs):
        return StackedComposite(*specs, dim=dim)  # type: ignore[arg-type]
    return Stacked(*specs, dim=dim)


TORCH_FUNCTIONS[torch.stack] = stack_specs
