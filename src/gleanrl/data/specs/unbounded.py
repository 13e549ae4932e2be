"""Tensors of a shape and dtype whose elements can be anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gleanrl.data.specs.base import DeviceLike, make_device
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.rounding import integer_limits, nearest_integer, ordered
from gleanrl.data.specs.spaces import BoxSpace
from gleanrl.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self


class Unbounded(LeafSpec):
    """Any element of the dtype, NaN and infinities included.

    `Unbounded(...)` makes an `UnboundedContinuous` for floating-point dtypes and an `UnboundedDiscrete` for integer
    and boolean ones.

    Example:
        >>> Unbounded((3,)).zero((2,)).shape
        torch.Size([2, 3])

    Args:
        shape: of one value.
        device: where values are drawn; None: torch's default device.
        dtype: of the values; None: torch's default dtype (float32), int64 for `UnboundedDiscrete`.
    """

    space: BoxSpace
    strict = False

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
        dtype = dtype or self._default_dtype()
        size = torch.Size((shape,)) if isinstance(shape, int) else torch.Size(shape)
        device = make_device(device)
        low, high = (ordered(torch.full((), x, dtype=dtype, device=device)).expand(size) for x in self._limits(dtype))
        super().__init__(size, BoxSpace(low, high), device, dtype)

    @staticmethod
    def _default_dtype() -> torch.dtype:
        return torch.get_default_dtype()

    @staticmethod
    def _limits(dtype: torch.dtype) -> tuple[float, float]:
        """Return the ends of what `dtype` can hold, after checking that this kind of spec can have it."""
        raise InvalidArgumentError(f"Unbounded: expected a real dtype, got {dtype}")

    def _outside(self, value: Tensor) -> None:
        return None

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return Unbounded(self.shape, self.device, dtype)  # type: ignore[return-value]


class UnboundedContinuous(Unbounded):
    """Any floating-point element; the arguments are those of `Unbounded`. `rand` is normal (mean 0, variance 1)."""

    @staticmethod
    def _limits(dtype: torch.dtype) -> tuple[float, float]:
        if not dtype.is_floating_point:
            raise InvalidArgumentError(f"UnboundedContinuous: expected a floating-point dtype, got {dtype}")
        return float("-inf"), float("inf")

    def cardinality(self) -> float:
        """Return infinity."""
        return float("inf")

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=generator)

    def _nearest(self, value: Tensor) -> Tensor:
        return value.to(self.dtype)


class UnboundedDiscrete(Unbounded):
    """Any integer or boolean element; the arguments are those of `Unbounded`.

    `rand` is uniform over all numbers of the dtype.
    """

    @staticmethod
    def _default_dtype() -> torch.dtype:
        return torch.int64

    @staticmethod
    def _limits(dtype: torch.dtype) -> tuple[float, float]:
        return integer_limits(dtype)

    def cardinality(self) -> int:
        """Return the number of values of the shape and dtype."""
        low, high = integer_limits(self.dtype)
        return int(high - low + 1) ** self.numel()

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        low, _ = integer_limits(self.dtype)
        # Without an upper end `random_` draws up to the dtype's largest number, included
        return made.random_(low, None, generator=generator)

    def _nearest(self, value: Tensor) -> Tensor:
        if self.dtype == torch.bool:
            return value != 0
        low, high = (torch.tensor(x, device=value.device) for x in integer_limits(self.dtype))
        return nearest_integer(value, low, high, self.dtype)
