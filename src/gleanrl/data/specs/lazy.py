"""Helpers for composites that contain stacks of unlike specs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gleanrl.data.specs.alternatives import Choice
from gleanrl.data.specs.base import TensorSpec, stack
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.encodings import ChoiceSpec
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.data.specs.members import Stack
from gleanrl.data.specs.non_tensor import NonTensor
from gleanrl.data.specs.stacks import StackedComposite
from gleanrl.data.specs.unbounded import Unbounded
from gleanrl.errors import SchemaError


def leaves_of(spec: Any) -> Iterator[TensorSpec]:
    """Yield the leaf specs in a spec: in composites, in the members of stacks, and among choices."""
    if isinstance(spec, Stack):
        parts: Any = spec.specs
    elif isinstance(spec, Choice):
        parts = spec.choices
    elif isinstance(spec, SpecMapping):
        parts = spec.values()
    else:
        if spec is not None:
            yield spec
        return
    for part in parts:
        yield from leaves_of(part)


def is_masked(spec: TensorSpec) -> bool:
    """Return whether a mask restricts the choices of a leaf in `spec`."""
    return any(getattr(leaf, "mask", None) is not None for leaf in leaves_of(spec))


def has_choices(spec: TensorSpec) -> bool:
    """Return whether a leaf in `spec` has choices, which a mask can restrict."""
    return any(isinstance(leaf, ChoiceSpec) for leaf in leaves_of(spec))


def without_masks(spec: TensorSpec) -> TensorSpec:
    """Return a copy of `spec` whose choices are all allowed; members of a stack that are equal then become one spec."""
    if isinstance(spec, Stack):
        merged: TensorSpec = stack([without_masks(member) for member in spec.specs], spec.stack_dim)
        return merged
    new = spec.clone()
    if isinstance(new, SpecMapping):
        for name, entry in new.items():
            new.set(name, entry if entry is None else without_masks(entry))
    elif isinstance(new, ChoiceSpec):
        new.update_mask(None)
    return new


def contains_lazy_spec(spec: TensorSpec | None) -> bool:
    """Return whether a spec is a stack of unlike specs or has one among its entries, at any depth."""
    if isinstance(spec, Stack):
        return True
    return isinstance(spec, SpecMapping) and any(map(contains_lazy_spec, spec.values()))


def check_no_exclusive_keys(spec: TensorSpec | None, recurse: bool = True) -> bool:
    """Return whether no stack of composites has a key that only some of its members have.

    Args:
        spec: any spec.
        recurse: whether to look into nested composites too.
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

    A key that a member lacks gets a placeholder: for a composite one with placeholders for its entries, for
    a leaf an unbounded spec of the same dtype whose dimensions behind the batch size have size 0 (a leaf of
    exactly the batch size gets one of that size).

    Args:
        spec: any spec; leaves are returned as they are.
        recurse_through_entries: whether to treat nested composites too.
        recurse_through_stack: whether to treat the members of a stack too.

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
    """Give each member the keys of all others, in place."""
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
    """Return the empty stand-in for an entry like `model` in a composite that lacks it."""
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
