"""`Bounded` and `Unbounded`: specs for tensors whose elements lie between bounds, or can be any number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl._arrays.devices import as_device
from gleanrl.data.specs.base import DeviceLike, as_size, concrete, lost_change
from gleanrl.data.specs.leaf import (
    Box,
    LeafSpec,
    integer_limits,
    is_one_number,
    nearest_integer,
    ordered,
    require_real,
    spread,
    tensor_copy,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError

_INT64_MIN = torch.iinfo(torch.int64).min
_INT64_MAX = torch.iinfo(torch.int64).max


@dataclass(eq=False)
class ContinuousBox(Box):
    """The bounds of a spec, one interval per element, both ends included. Assigning a bound changes the spec.

    The box of a part of a spec (``spec[0]``) refuses assignment, but shares the spec's memory. So
    ``spec[0].space.low[...] = 0`` changes the spec. There are two exceptions. The box of a part that a list or a mask
    selects is a copy. Bounds that are a large expanded scalar can't be written through a part.

    Attributes:
        low: `(*shape)`, in the dtype of the spec; int64 if torch can't compare tensors of this dtype.
        high: `(*shape)`, likewise.
    """

    low: Tensor
    high: Tensor
    is_part = False
    # The cached result of `common`, with the version counters of the tensors for which it holds
    _found = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new bound takes dtype, device and shape of the old one.

        A bound is converted to this dtype without a check, and isn't compared with the other bound.

        Raises:
            UnsupportedError: if the spec is a copy of a part of another spec.
            InvalidArgumentError: if the bound doesn't expand to the shape of the old one.
        """
        if name in ("low", "high"):
            if self.is_part:
                raise lost_change(f"space.{name}")
            object.__setattr__(self, "_found", None)
            old = vars(self).get(name)
            if old is not None:
                value = _replacement_bound(old, name, value)
        object.__setattr__(self, name, value)

    def as_part(self) -> Self:
        """Return a space that shares this space's memory; its bounds can be changed in place, but not assigned."""
        new = self.map(lambda end: end)
        new.is_part = True
        return new

    def __iter__(self) -> Iterator[Tensor]:
        """Yield `low`, then `high`."""
        yield from (self.low, self.high)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The two bounds, for reading only: large ones may be expanded scalars.

        Users may write into `low` and `high`, so that the first access to these gives each element memory.
        """
        return vars(self)["low"], vars(self)["high"]

    @property
    def common(self) -> tuple[Any, Any] | None:
        """The two bounds as Python numbers if they are equal for all elements, else None; the result is cached."""
        # An inference tensor has no version counter, so that a change in place would go unnoticed.
        if any(end.is_inference() for end in self.ends):
            return self._search_common()
        versions = [end._version for end in self.ends]
        if self._found is None or self._found[0] != versions:
            self._found = (versions, self._search_common())
        return self._found[1]

    def _search_common(self) -> tuple[Any, Any] | None:
        if self.ends[0].numel() == 0:
            return None
        first = [end.flatten()[0] for end in self.ends]
        same = all(
            is_one_number(end) or torch.equal(end, one.expand_as(end))
            for end, one in zip(self.ends, first, strict=True)
        )
        return (first[0].item(), first[1].item()) if same else None

    def count(self) -> int | float:
        """Return the number of values between the bounds; infinity for bounds of floating-point dtypes."""
        if self.ends[0].dtype.is_floating_point:
            return math.inf
        if self.common is not None:
            low, high = self.common
            return int(high - low + 1) ** self.ends[0].numel()
        lows, highs = (end.flatten().tolist() for end in self.ends)
        return math.prod(high - low + 1 for low, high in zip(lows, highs, strict=True))

    def draw(
        self,
        shape: Sequence[int],
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> Tensor:
        """Draw numbers; `shape` ends with the shape of the bounds. `Bounded` describes the distributions.

        One call of torch's generator draws all elements if the bounds are equal everywhere, and their distance fits
        the dtype. Otherwise `_draw_reals` or `_draw_integers` draws element by element.
        """
        common, real = self.common, dtype.is_floating_point
        if common is None or (real and not common[1] - common[0] <= torch.finfo(dtype).max):
            draw = self._draw_reals if real else self._draw_integers
            return draw(shape, generator).to(dtype)
        low, high = common
        if real:
            made = torch.empty(shape, dtype=dtype, device=device)
            # Accelerators draw u up to 1, where low + u * (high - low) can be rounded to a number above high
            return made.uniform_(low, high, generator=generator).clamp_(low, high)
        if high == _INT64_MAX:
            # `randint` takes an excluded upper bound, which would overflow. `random_` without an upper bound draws up
            # to the largest int64, included
            return torch.empty(shape, dtype=dtype, device=device).random_(low, None, generator=generator)
        return torch.randint(int(low), int(high) + 1, shape, dtype=dtype, device=device, generator=generator)

    def _draw_reals(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        low, high = self.ends
        u = torch.rand(shape, dtype=low.dtype, device=low.device, generator=generator)
        # high - low may overflow; low * (1 - u) + high * u doesn't
        mixed = torch.where((high - low).isfinite(), low + u * (high - low), low * (1 - u) + high * u)
        drawn = torch.minimum(torch.maximum(mixed, low), high)
        if bool(low.isfinite().all()) and bool(high.isfinite().all()):
            return drawn
        away = torch.empty_like(u).exponential_(generator=generator)
        free = torch.empty_like(u).normal_(generator=generator)
        drawn = torch.where(high.isinf(), low + away, drawn)
        drawn = torch.where(low.isinf(), high - away, drawn)
        return torch.where(low.isinf() & high.isinf(), free, drawn)

    def _draw_integers(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        # torch lacks most arithmetic for uint64. So `count` and `drawn` are unsigned numbers stored as int64, modulo
        # 2**64. A count of 2**64 is stored as 0, and subtracting it changes nothing
        bottom, top = self.ends
        low = bottom.to(torch.int64)
        count = top.to(torch.int64) - low + 1
        drawn = torch.empty(shape, dtype=torch.int64, device=low.device).random_(
            _INT64_MIN, None, generator=generator
        )
        short = (drawn & _INT64_MAX) % count.clamp(min=1)
        # `drawn` is below 2**64, so it holds a count of 2**63 or more at most once: one subtraction gives the
        # remainder. With both sign bits flipped, the signed comparison orders numbers like an unsigned one
        over = (drawn ^ _INT64_MIN) >= (count ^ _INT64_MIN)
        long = torch.where(over, drawn - count, drawn)
        return low + torch.where(count > 0, short, long)


def _written(name: str) -> property:
    """Return a property for a bound; reading it gives each element of the bound memory."""

    def get(space: ContinuousBox) -> Tensor:
        end: Tensor = vars(space)[name]
        # The bound of a part stays expanded, so that torch refuses to write into it: a write to a copy would be lost
        if end.numel() > 1 and 0 in end.stride() and not space.is_part:
            end = vars(space)[name] = end.contiguous()
            vars(space).pop("_found", None)
        return end

    def put(space: ContinuousBox, end: Tensor) -> None:
        vars(space)[name] = end

    return property(get, put)


# Assigned after the dataclass decorator has run, because it takes a property in the class body for a default value.
ContinuousBox.low, ContinuousBox.high = _written("low"), _written("high")  # type: ignore[assignment]


def _replacement_bound(old: Tensor, name: str, value: Any) -> Tensor:
    try:
        return spread(torch.as_tensor(value, dtype=old.dtype, device=old.device).expand(old.shape))
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"space.{name}: expected a number, or a tensor that expands to shape {tuple(old.shape)}, got {value!r}"
        ) from error


def _settle_domain(
    spec: LeafSpec, domain: str | None, continuous: type[LeafSpec], discrete: type[LeafSpec]
) -> None:
    """Set the domain of a spec, and change the spec's class to that of the domain. A user's subclass keeps its class.

    The domain is the argument `domain`, else the domain of the called class, else the one that the dtype implies.

    Raises:
        InvalidArgumentError: if the domain isn't "continuous" or "discrete".
    """
    if domain not in (None, "continuous", "discrete"):
        raise InvalidArgumentError(f"domain: expected 'continuous' or 'discrete', got {domain!r}")
    if domain is None:
        real = spec.dtype.is_floating_point
        domain = (
            "continuous"
            if isinstance(spec, continuous) or (real and not isinstance(spec, discrete))
            else "discrete"
        )
    spec.domain = domain
    if type(spec) in (continuous.__base__, continuous, discrete):
        spec.__class__ = continuous if domain == "continuous" else discrete


class Bounded(LeafSpec):
    """Elements from `low` to `high`, both included.

    `Bounded(...)` makes a `BoundedContinuous` for floating-point dtypes and a `BoundedDiscrete` for other dtypes,
    unless `domain` names another domain. NaN is never in the domain. `encode` doesn't check the bounds. `to_numpy`
    checks them if `safe` is True.

    `rand` is uniform between finite bounds, also for integers with the whole range of int64. With a single finite
    bound the distance from it is exponential (mean 1). Without finite bounds `rand` is normal (mean 0, variance 1).

    Examples:
        >>> Bounded(-2, 2, shape=(3,)).rand((5,)).shape
        torch.Size([5, 3])

    Args:
        low: number or tensor that expands to `shape`. Only floating-point dtypes can have infinite bounds.
        high: number or tensor that expands to `shape`; at least `low` everywhere.
        shape: shape of one value; None: the shape of the bounds.
        device: device on which values are drawn; None: the device of the bounds if they are on an accelerator,
            otherwise torch's default device.
        dtype: dtype of the values; None: torch's default dtype (float32), for bounds of any dtype.
        domain: "continuous" or "discrete": the domain, which decides the class. It doesn't change the values. None: the
            domain that the dtype implies.

    Raises:
        InvalidArgumentError: if a bound is NaN, doesn't fit the dtype or the shape, or no finite number is between
            the bounds.
        InvalidTypeError: if a bound isn't a number or a tensor.
    """

    space: ContinuousBox
    strict = False

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
        # In a dtype that torch can compare, and that pickle supports
        bottom, top = ordered(bottom), ordered(top)
        _require_room(bottom, top)
        super().__init__(size, ContinuousBox(bottom, top), device, dtype)
        _settle_domain(self, domain, BoundedContinuous, BoundedDiscrete)

    @property
    def low(self) -> Tensor:
        """The lower bounds, of the spec's shape and dtype: `space.low`, or a copy if that has another dtype."""
        return self.space.low.to(self.dtype)

    @property
    def high(self) -> Tensor:
        """The upper bounds, of the spec's shape and dtype: `space.high`, or a copy if that has another dtype."""
        return self.space.high.to(self.dtype)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """`low` and `high`, for reading only: large ones may be expanded scalars."""
        low, high = self.space.ends
        return low.to(self.dtype), high.to(self.dtype)

    def cardinality(self) -> int | float:
        """Return the number of values in the domain; infinity for floating-point dtypes."""
        return self.space.count()

    def _outside(self, value: Tensor) -> Tensor:
        value = ordered(value)
        # Comparisons with NaN are False, so that in this form NaN is outside
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
    """Elements from `low` to `high`, both included, of a continuous domain; it takes the arguments of `Bounded`."""


class BoundedDiscrete(Bounded):
    """Elements from `low` to `high`, both included, of a discrete domain; it takes the arguments of `Bounded`."""


def _bound(name: str, value: Any, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    try:
        bound = tensor_copy(value, dtype, device)
    except SpecError as error:
        raise InvalidArgumentError(
            f"{name}: expected numbers that {dtype} holds exactly, got {value!r}"
        ) from error
    except InvalidTypeError as error:
        raise InvalidTypeError(f"{name}: expected a number or a tensor, got {value!r}") from error
    if dtype.is_floating_point:
        if bool(bound.isnan().any()):
            raise InvalidArgumentError(f"{name}: a bound can't be NaN, got {value!r}")
        wide = tensor_copy(value, torch.float64, bound.device)
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


class Unbounded(LeafSpec):
    """Any element of the dtype, NaN and infinities included.

    `Unbounded(...)` makes an `UnboundedContinuous` for floating-point dtypes and an `UnboundedDiscrete` for other
    dtypes, unless `domain` names another domain.

    `rand` is normal (mean 0, variance 1). For integers and booleans it is uniform over all values of the dtype.

    Examples:
        >>> Unbounded((3,)).zero((2,)).shape
        torch.Size([2, 3])

    Args:
        shape: shape of one value.
        device: device on which values are drawn; None: torch's default device.
        dtype: dtype of the values; None: torch's default dtype (float32), int64 for `UnboundedDiscrete`.
        domain: "continuous" or "discrete": the domain, which decides the class. None: the domain that the dtype
            implies.

    Raises:
        InvalidArgumentError: if the dtype is complex or uint64, or the domain has another name.
    """

    space: ContinuousBox
    strict = False

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
        super().__init__(size, ContinuousBox(low, high), device, dtype)
        _settle_domain(self, domain, UnboundedContinuous, UnboundedDiscrete)

    def cardinality(self) -> int | float:
        """Return the number of values in the domain; infinity for floating-point dtypes."""
        return self.space.count()

    def _outside(self, value: Tensor) -> None:
        return None

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return Unbounded(self.shape, self.device, dtype)  # type: ignore[return-value]

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            return made.normal_(generator=generator)
        # Without an upper bound `random_` draws up to the dtype's largest number, included
        return made.random_(integer_limits(self.dtype)[0], None, generator=generator)

    def _nearest(self, value: Tensor) -> Tensor:
        if self.dtype.is_floating_point:
            return value.to(self.dtype)
        if self.dtype == torch.bool:
            return value != 0
        low, high = (torch.tensor(end, device=value.device) for end in integer_limits(self.dtype))
        return nearest_integer(value, low, high, self.dtype)


class UnboundedContinuous(Unbounded):
    """Any element, of a continuous domain; it takes the arguments of `Unbounded`."""


class UnboundedDiscrete(Unbounded):
    """Any element, of a discrete domain; it takes the arguments of `Unbounded`."""
