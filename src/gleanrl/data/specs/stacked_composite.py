"""Stacks of composites that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from gleanrl.data.specs.base import stack
from gleanrl.data.specs.mapping import Entry, SpecMapping
from gleanrl.data.specs.stack import Stack
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError


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

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtypes of the entries and nothing else.

        Args:
            value: a TensorDict, or the value under `key`.
            key: None, or the key of the entry that `value` is to be checked against.

        Raises:
            InvalidTypeError: if a dtype isn't that of the spec.
        """
        if key is not None:
            self.get(key).type_check(value, key)
            return
        for spec, part in self._pairs(value)[1]:
            spec.type_check(part)

    def _merged(self, parts: Sequence[Any], axis: int) -> TensorDictBase:
        return TensorDict.maybe_dense_stack(list(parts), axis)

    def _merged_numpy(self, parts: list[Any], axis: int) -> list[Any]:
        return parts

    def _size(self, value: Any) -> tuple[int, ...] | None:
        return tuple(value.batch_size) if is_tensor_collection(value) else None
