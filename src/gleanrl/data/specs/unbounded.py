"""Tensors of a shape and dtype whose elements can be anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike
from gleanrl.data.specs.boxes import BoxSpec, ContinuousBox
from gleanrl.data.specs.geometry import as_size, concrete
from gleanrl.data.specs.rounding import integer_limits, nearest_integer, ordered
from gleanrl.devices import as_device


class Unbounded(BoxSpec):
    """Any element of the dtype, NaN and infinities included.

    `Unbounded(...)` makes an `UnboundedContinuous` for floating-point dtypes and an `UnboundedDiscrete` for the
    others, unless `domain` says otherwise.

    `rand` is normal (mean 0, variance 1), for integers and booleans uniform over all that the dtype holds.

    Examples:
        >>> Unbounded((3,)).zero((2,)).shape
        torch.Size([2, 3])

    Args:
        shape: of one value.
        device: where values are drawn; None: torch's default device.
        dtype: of the values; None: torch's default dtype (float32), int64 for `UnboundedDiscrete`.
        domain: "continuous" or "discrete": which class it is, and its attribute `domain`. None: by the dtype.
    """

    def __init__(
        self,
        shape: Sequence[int] | int = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        domain: str | None = None,
    ) -> None:
        dtype = dtype or (torch.int64 if isinstance(self, UnboundedDiscrete) else torch.get_default_dtype())
        size, device = as_size((shape,)), as_device(device)
        ends = (-math.inf, math.inf) if dtype.is_floating_point else integer_limits(dtype)
        low, high = (
            ordered(torch.full((), end, dtype=dtype, device=device)).expand(concrete(size)) for end in ends
        )
        kinds = (UnboundedContinuous, UnboundedDiscrete)
        super().__init__(size, ContinuousBox(low, high), device, dtype, domain, kinds)

    def _outside(self, value: Tensor) -> None:
        return None

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return Unbounded(self.shape, self.device, dtype)  # type: ignore[return-value]

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
    """Any element, of a continuous domain; the arguments are those of `Unbounded`."""


class UnboundedDiscrete(Unbounded):
    """Any element, of a discrete domain; the arguments are those of `Unbounded`."""
