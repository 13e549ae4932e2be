"""Tensors whose elements lie between two bounds, continuous or integer by dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike, make_device
from gleanrl.data.specs.leaf import LeafSpec, fresh_tensor
from gleanrl.data.specs.rounding import integer_limits, nearest_integer, ordered
from gleanrl.data.specs.spaces import BoxSpace
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError

_INT64_MIN = torch.iinfo(torch.int64).min
_INT64_MAX = torch.iinfo(torch.int64).max


class Bounded(LeafSpec):
    """Elements from `low` to `high`, both included.

    `Bounded(...)` makes a `BoundedContinuous` for floating-point dtypes and a `BoundedDiscrete` for integer
    ones. NaN is never in the domain. `encode` and `to_numpy` don't check the bounds unless asked to.

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

    Raises:
        InvalidArgumentError: if a bound is NaN, doesn't fit the dtype or the shape, or leaves no number
            between.
    """

    space: BoxSpace
    strict = False
    # Whether the dtype must be floating-point; None: either
    _floating: ClassVar[bool | None] = None

    def __new__(
        cls,
        low: Any = None,
        high: Any = None,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Choose the class by dtype."""
        if cls is Bounded:
            floating = (dtype or torch.get_default_dtype()).is_floating_point
            return object.__new__(BoundedContinuous if floating else BoundedDiscrete)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        low: Any,
        high: Any,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        self._require_dtype(dtype)
        if device is None:
            elsewhere = (b.device for b in (low, high) if isinstance(b, Tensor) and b.device.type != "cpu")
            device = next(elsewhere, None)
        device = make_device(device)
        bottom, top = _bound("low", low, dtype, device), _bound("high", high, dtype, device)
        try:
            size = torch.broadcast_shapes(bottom.shape, top.shape) if shape is None else _size(shape)
            bottom, top = bottom.expand(size), top.expand(size)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"Bounded: expected bounds that expand to shape {shape}, "
                f"got low {tuple(bottom.shape)} and high {tuple(top.shape)}"
            ) from error
        # In a dtype that can be compared, and that pickle knows
        bottom, top = ordered(bottom), ordered(top)
        _require_room(bottom, top)
        super().__init__(size, BoxSpace(bottom, top), device, dtype)

    def _require_dtype(self, dtype: torch.dtype) -> None:
        if self._floating is not None and dtype.is_floating_point != self._floating:
            kind = "a floating-point" if self._floating else "an integer"
            raise InvalidArgumentError(f"{type(self).__name__}: expected {kind} dtype, got {dtype}")
        if dtype == torch.bool:
            raise InvalidArgumentError("Bounded: expected a number's dtype, got torch.bool; use Binary")
        if not dtype.is_floating_point:
            integer_limits(dtype)

    @property
    def low(self) -> Tensor:
        """The lower bounds, of the spec's shape and dtype."""
        return self.space.low.to(self.dtype)

    @property
    def high(self) -> Tensor:
        """The upper bounds, of the spec's shape and dtype."""
        return self.space.high.to(self.dtype)

    def _outside(self, value: Tensor) -> Tensor:
        value = ordered(value)
        # In this form a NaN is outside
        return ~((value >= self.space.low.to(value.device)) & (value <= self.space.high.to(value.device)))

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return Bounded(self.low, self.high, self.shape, self.device, dtype)  # type: ignore[return-value]

    def cardinality(self) -> int | float:
        """Return the number of values in the domain; infinity for continuous ones."""
        if self.dtype.is_floating_point:
            return math.inf
        lows, highs = self.space.low.flatten().tolist(), self.space.high.flatten().tolist()
        return math.prod(high - low + 1 for low, high in zip(lows, highs, strict=True))

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        draw = _draw_reals if self.dtype.is_floating_point else _draw_integers
        return draw(self.space, shape, self.dtype, self.device, generator)

    def _nearest(self, value: Tensor) -> Tensor:
        low, high = self.space.low.to(value.device), self.space.high.to(value.device)
        if self.dtype.is_floating_point:
            return torch.minimum(torch.maximum(value.to(self.dtype), low), high)
        return nearest_integer(value, low.to(torch.int64), high.to(torch.int64), self.dtype)

    def _describe(self) -> str:
        if self.space.common is not None:
            low, high = self.space.common
            return f"low={low}, high={high}"
        if self.numel() == 0:
            return ""
        return f"low={_range(self.space.low)}, high={_range(self.space.high)}"


class BoundedContinuous(Bounded):
    """Floating-point elements from `low` to `high`, both included; the arguments are those of `Bounded`."""

    _floating = True


class BoundedDiscrete(Bounded):
    """Integer elements from `low` to `high`, both included; the arguments are those of `Bounded`."""

    _floating = False


def _draw_reals(
    space: BoxSpace,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device | None,
    generator: torch.Generator | None,
) -> Tensor:
    common = space.common
    if common is None or not common[1] - common[0] <= torch.finfo(dtype).max:
        return _draw_reals_by_element(space.low, space.high, shape, generator)
    low, high = common
    made = torch.empty(shape, dtype=dtype, device=device)
    # Accelerators draw u up to 1, where low + u * (high - low) can round beyond high
    return made.uniform_(low, high, generator=generator).clamp_(low, high)


def _draw_reals_by_element(
    low: Tensor, high: Tensor, shape: torch.Size, generator: torch.Generator | None
) -> Tensor:
    u = torch.rand(shape, dtype=low.dtype, device=low.device, generator=generator)
    # high - low may overflow where low * (1 - u) + high * u doesn't
    mixed = torch.where((high - low).isfinite(), low + u * (high - low), low * (1 - u) + high * u)
    drawn = torch.minimum(torch.maximum(mixed, low), high)
    if bool(low.isfinite().all()) and bool(high.isfinite().all()):
        return drawn
    away = torch.empty_like(u).exponential_(generator=generator)
    free = torch.empty_like(u).normal_(generator=generator)
    drawn = torch.where(high.isinf(), low + away, drawn)
    drawn = torch.where(low.isinf(), high - away, drawn)
    return torch.where(low.isinf() & high.isinf(), free, drawn)


def _draw_integers(
    space: BoxSpace,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device | None,
    generator: torch.Generator | None,
) -> Tensor:
    if space.common is None:
        low, high = space.low.to(torch.int64), space.high.to(torch.int64)
        return _draw_integers_by_element(low, high, shape, generator).to(dtype)
    low, high = space.common
    if high == _INT64_MAX:
        # Without an upper end `random_` draws up to the dtype's largest number, included
        return torch.empty(shape, dtype=dtype, device=device).random_(low, None, generator=generator)
    return torch.randint(low, high + 1, shape, dtype=dtype, device=device, generator=generator)


def _draw_integers_by_element(
    low: Tensor, high: Tensor, shape: torch.Size, generator: torch.Generator | None
) -> Tensor:
    # Arithmetic is modulo 2**64: `count` and `drawn` are unsigned numbers in int64 clothes. A count of 2**64
    # is 0 there, and to subtract it does nothing
    count = high - low + 1
    drawn = torch.empty(shape, dtype=torch.int64, device=low.device).random_(
        _INT64_MIN, None, generator=generator
    )
    short = (drawn & _INT64_MAX) % count.clamp(min=1)
    # A count of 2**63 and more goes into 2**64 once: one subtraction is the remainder
    over = (drawn ^ _INT64_MIN) >= (count ^ _INT64_MIN)
    long = torch.where(over, drawn - count, drawn)
    return low + torch.where(count > 0, short, long)


def _size(shape: Sequence[int] | int) -> torch.Size:
    return torch.Size((shape,)) if isinstance(shape, int) else torch.Size(shape)


def _bound(name: str, value: Any, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    try:
        bound = fresh_tensor(value, dtype, device)
    except SpecError as error:
        raise InvalidArgumentError(
            f"{name}: expected numbers that {dtype} holds exactly, got {value!r}"
        ) from error
    except InvalidTypeError as error:
        raise InvalidTypeError(f"{name}: expected a number or a tensor, got {value!r}") from error
    if bool(bound.isnan().any()):
        raise InvalidArgumentError(f"{name}: a bound can't be NaN, got {value!r}")
    if dtype.is_floating_point:
        wide = fresh_tensor(value, torch.float64, bound.device)
        if bool((bound.isinf() & wide.isfinite()).any()):
            raise InvalidArgumentError(f"{name}: {value!r} is too large for {dtype}")
    return bound


def _require_room(low: Tensor, high: Tensor) -> None:
    bad = low > high
    if low.dtype.is_floating_point:
        bad = bad | low.isposinf() | high.isneginf()
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise InvalidArgumentError(
            f"Bounded: expected low <= high and a finite number between them, "
            f"got low {low[where].item()} and high {high[where].item()} at index {where}"
        )


def _range(bound: Tensor) -> str:
    low, high = bound.min().item(), bound.max().item()
    return str(low) if low == high else f"{low}..{high}"
