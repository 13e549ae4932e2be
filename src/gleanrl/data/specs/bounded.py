"""Tensors whose elements lie between two bounds, continuous or integer by dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike
from gleanrl.data.specs.boxes import BoxSpec, ContinuousBox
from gleanrl.data.specs.geometry import as_size, concrete
from gleanrl.data.specs.leaf import fresh_tensor
from gleanrl.data.specs.rounding import nearest_integer, ordered, require_real
from gleanrl.data.specs.spaces import is_one_number, spread
from gleanrl.devices import as_device
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError


class Bounded(BoxSpec):
    """Elements from `low` to `high`, both included.

    `Bounded(...)` makes a `BoundedContinuous` for floating-point dtypes and a `BoundedDiscrete` for the others,
    unless `domain` says otherwise. NaN is never in the domain. `encode` and `to_numpy` don't check the bounds unless
    asked to.

    `rand` is uniform between finite bounds, over integers for all ranges up to that of int64. Away from a
    single finite bound it is exponential (mean 1), and without finite bounds normal (mean 0, variance 1).

    Examples:
        >>> Bounded(-2, 2, shape=(3,)).rand((5,)).shape
        torch.Size([5, 3])

    Args:
        low: number or tensor; must expand to `shape`. Infinite bounds are for floating-point dtypes.
        high: number or tensor; must expand to `shape`; nowhere below `low`.
        shape: of one value; None: the shape of the bounds.
        device: where values are drawn; None: that of the bounds if they are on an accelerator, otherwise
            torch's default device.
        dtype: of the values; None: torch's default dtype (float32), whatever the bounds are made of.
        domain: "continuous" or "discrete": which class it is, and its attribute `domain`; values are those of the
            dtype anyway. None: by the dtype.

    Raises:
        InvalidArgumentError: if a bound is NaN, doesn't fit the dtype or the shape, or leaves no number
            between.
    """

    def __init__(
        self,
        low: Any,
        high: Any,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        domain: str | None = None,
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        require_real(dtype)
        if device is None:
            elsewhere = (b.device for b in (low, high) if isinstance(b, Tensor) and b.device.type != "cpu")
            device = next(elsewhere, None)
        device = as_device(device)
        bottom, top = _bound("low", low, dtype, device), _bound("high", high, dtype, device)
        try:
            size = torch.broadcast_shapes(bottom.shape, top.shape) if shape is None else as_size((shape,))
            bottom, top = (spread(each.expand(concrete(size))) for each in (bottom, top))
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"Bounded: expected bounds that expand to shape {shape}, "
                f"got low {tuple(bottom.shape)} and high {tuple(top.shape)}"
            ) from error
        # In a dtype that can be compared, and that pickle knows
        bottom, top = ordered(bottom), ordered(top)
        _require_room(bottom, top)
        kinds = (BoundedContinuous, BoundedDiscrete)
        super().__init__(size, ContinuousBox(bottom, top), device, dtype, domain, kinds)

    @property
    def low(self) -> Tensor:
        """The lower bounds, of the spec's shape and dtype."""
        return self.space.low.to(self.dtype)

    @property
    def high(self) -> Tensor:
        """The upper bounds, of the spec's shape and dtype."""
        return self.space.high.to(self.dtype)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """`low` and `high`, to be read only: those of large frames may be one number, expanded."""
        low, high = self.space.ends
        return low.to(self.dtype), high.to(self.dtype)

    def _outside(self, value: Tensor) -> Tensor:
        value = ordered(value)
        # In this form a NaN is outside
        low, high = self.space.ends
        return ~((value >= low.to(value.device)) & (value <= high.to(value.device)))

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return Bounded(*self.bounds, self.shape, self.device, dtype)  # type: ignore[return-value]

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.space.draw(shape, generator, self.dtype, self.device)

    def _nearest(self, value: Tensor) -> Tensor:
        low, high = (end.to(value.device) for end in self.space.ends)
        if self.dtype.is_floating_point:
            return torch.minimum(torch.maximum(value.to(self.dtype), low), high)
        return nearest_integer(value, low.to(torch.int64), high.to(torch.int64), self.dtype)

    def _describe(self) -> str:
        if self.space.common is not None:
            low, high = self.space.common
            return f"low={low}, high={high}"
        if self.numel() == 0:
            return ""
        return f"low={_range(self.space.ends[0])}, high={_range(self.space.ends[1])}"


class BoundedContinuous(Bounded):
    """Elements from `low` to `high`, both included, of a continuous domain; the arguments are those of `Bounded`."""


class BoundedDiscrete(Bounded):
    """Elements from `low` to `high`, both included, of a discrete domain; the arguments are those of `Bounded`."""


def _bound(name: str, value: Any, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    try:
        bound = fresh_tensor(value, dtype, device)
    except SpecError as error:
        raise InvalidArgumentError(
            f"{name}: expected numbers that {dtype} holds exactly, got {value!r}"
        ) from error
    except InvalidTypeError as error:
        raise InvalidTypeError(f"{name}: expected a number or a tensor, got {value!r}") from error
    if dtype.is_floating_point:
        if bool(bound.isnan().any()):
            raise InvalidArgumentError(f"{name}: a bound can't be NaN, got {value!r}")
        wide = fresh_tensor(value, torch.float64, bound.device)
        if bool((bound.isinf() & wide.isfinite()).any()):
            raise InvalidArgumentError(f"{name}: {value!r} is too large for {dtype}")
    return bound


def _require_room(low: Tensor, high: Tensor) -> None:
    if (
        is_one_number(low)
        and is_one_number(high)
        and not bool(_without_room(low.flatten()[:1], high.flatten()[:1]))
    ):
        return
    bad = _without_room(low, high)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise InvalidArgumentError(
            f"Bounded: expected low <= high and a finite number between them, "
            f"got low {low[where].item()} and high {high[where].item()} at index {where}"
        )


def _without_room(low: Tensor, high: Tensor) -> Tensor:
    """Return where no finite number is between two bounds."""
    bad = low > high
    return bad | low.isposinf() | high.isneginf() if low.dtype.is_floating_point else bad


def _range(bound: Tensor) -> str:
    low, high = bound.min().item(), bound.max().item()
    return str(low) if low == high else f"{low}..{high}"
