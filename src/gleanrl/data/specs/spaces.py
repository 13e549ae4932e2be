"""`Box`, the base class for the parameters of a spec: bounds, counts or masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.errors import UnsupportedError

LARGE = 1 << 12
"""Number of elements above which a bound with one value everywhere is stored as an expanded scalar."""


class Box:
    """The parameters of a spec; subclasses are dataclasses. Its tensors start with the spec's batch dimensions."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the space with `function` applied to each of its tensors."""
        new = object.__new__(type(self))
        for name in _names(self):
            value = vars(self)[name]
            object.__setattr__(new, name, function(value) if isinstance(value, Tensor) else value)
        return new

    def clone(self) -> Self:
        """Return an equal space that shares no memory with this one."""
        return self.map(_copied)

    def as_part(self) -> Self:
        """Return the space for a read-only copy of a part of a spec; subclasses with settable fields refuse changes."""
        return self.clone()

    def to(self, device: torch.device | str | int) -> Self:
        """Return the space on another device."""
        return self.map(lambda t: t.to(device))

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(vars(self)[name], vars(other)[name]) for name in _names(self))

    __hash__ = None  # type: ignore[assignment]


def is_one_number(tensor: Tensor) -> bool:
    """Return whether a tensor is a large expanded scalar, for example the bound of all elements of an image."""
    return tensor.numel() > LARGE and not any(tensor.stride())


def spread(bound: Tensor) -> Tensor:
    """Return a bound with memory for each element, so that it can be changed in place.

    A large expanded scalar is returned unchanged, since a copy would cost as much memory as an image.
    """
    return bound if is_one_number(bound) else bound.contiguous()


def _copied(tensor: Tensor) -> Tensor:
    # `clone` of an expanded tensor allocates each element, and specs of images are copied often.
    return tensor.flatten()[0].clone().expand(tensor.shape) if is_one_number(tensor) else tensor.clone()


def lost_change(change: str) -> UnsupportedError:
    """Return the error for a change of a spec, or of its space, if the spec is a copy of a part of another spec."""
    return UnsupportedError(
        f"{change}: this spec is a copy of a part of another one, which the change wouldn't reach; change that one, or "
        "call clone() for a spec that can be changed"
    )


def _names(space: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(space)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
