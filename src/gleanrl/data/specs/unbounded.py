"""Tensors of a shape and dtype whose elements can be anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike, make_device
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.rounding import integer_limits, nearest_integer, ordered
from gleanrl.data.specs.spaces import BoxSpace
from gleanrl.errors import InvalidArgumentError


class Unbounded(LeafSpec):
    """Any element of the dtype, NaN and infinities included.

    `Unbounded(...)` makes an `UnboundedContinuous` for floating-point dtypes and an `UnboundedDiscrete` for
    integer and boolean ones.

    `rand` is normal (mean 0, variance 1), for integers and booleans uniform over all that the dtype holds.

    Examples:
        >>> Unbounded((3,)).zero((2,)).shape
        torch.Size([2, 3])

    Args:
        shape: of one value.
        device: where values are drawn; None: torch's default device.
        dtype: of the values; None: torch's default dtype (float32), int64 for `UnboundedDiscrete`.
    """

    space: BoxSpace
    strict = False
    # Whether the dtype must be floating-point; None: either
    _floating: ClassVar[bool | None] = None

    def __new__(
        cls,
        shape: Sequence[int] | int = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Choose the class by dtype."""
        if cls is Unbounded:
            floating = (dtype or torch.get_default_dtype()).is_floating_point
            return object.__new__(UnboundedContinuous if floating else UnboundedDiscrete)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        shape: Sequence[int] | int = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or (torch.int64 if self._floating is False else torch.get_default_dtype())
        size = torch.Size((shape,)) if isinstance(shape, int) else torch.Size(shape)
        device = make_device(device)
        low, high = (
            ordered(torch.full((), x, dtype=dtype, device=device)).expand(size) for x in self._limits(dtype)
        )
        super().__init__(size, BoxSpace(low, high), device, dtype)

    def _limits(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the ends of what `dtype` can hold, after checking that this class can have it."""
        if self._floating is not None and dtype.is_floating_point != self._floating:
            kind = "a floating-point" if self._floating else "an integer or boolean"
            raise InvalidArgumentError(f"{type(self).__name__}: expected {kind} dtype, got {dtype}")
        return (-math.inf, math.inf) if dtype.is_floating_point else integer_limits(dtype)

    def _outside(self, value: Tensor) -> None:
        return None

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return Unbounded(self.shape, self.device, dtype)  # type: ignore[return-value]

    def cardinality(self) -> int | float:
        """Return the number of values of the shape and dtype; infinity for continuous ones."""
        if self.dtype.is_floating_point:
            return math.inf
        low, high = integer_limits(self.dtype)
        return (high - low + 1) ** self.numel()

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            return made.normal_(generator=generator)
        # Without an upper end `random_` draws up to the dtype's largest number, included
        return made.random_(integer_limits(self.dtype)[0], None, generator=generator)

    def _nearest(self, value: Tensor) -> Tensor:
        if self.dtype.is_floating_point:
            return value.to(self.dtype)
        if self.dtype == torch.bool:
            return value != 0
        low, high = (torch.tensor(end, device=value.device) for end in integer_limits(self.dtype))
        return nearest_integer(value, low, high, self.dtype)


class UnboundedContinuous(Unbounded):
    """Any floating-point element; the arguments are those of `Unbounded`."""

    _floating = True


class UnboundedDiscrete(Unbounded):
    """Any integer or boolean element; the arguments are those of `Unbounded`."""

    _floating = False
