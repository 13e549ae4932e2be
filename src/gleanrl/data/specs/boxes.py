"""The numbers between two bounds, `ContinuousBox`, and what the specs that have one share.

Tensors whose elements lie between two bounds, continuous or integer by dtype.

Tensors of a shape and dtype whose elements can be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl._arrays.devices import as_device
from gleanrl.data.specs.base import DeviceLike, as_size, concrete
from gleanrl.data.specs.leaf import (
    LeafSpec,
    fresh_tensor,
    integer_limits,
    nearest_integer,
    ordered,
    require_real,
)
from gleanrl.data.specs.spaces import Box, is_one_number, lost_change, spread
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError

_INT64_MIN = torch.iinfo(torch.int64).min
_INT64_MAX = torch.iinfo(torch.int64).max


@dataclass(eq=False)
class ContinuousBox(Box):
    """An interval per element; both ends belong to it. Assigning an end changes the spec that has the box.

    The box of a part of a spec (``spec[0]``) refuses that, and is over the spec's memory: the spec changes with
    ``spec[0].space.low[...] = 0``. Exceptions: a part that a list or a mask selects is a copy; bounds of large frames
    that are one number can't be written into through a part.

    Attributes:
        low: `(*shape)`, in the dtype of the spec, or int64 where torch can't compare that one.
        high: `(*shape)`, likewise.
    """

    low: Tensor
    high: Tensor
    is_part = False
    # What `common` found, and for which versions of the ends
    _found = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an end; a new one takes dtype, device and shape of the old one.

        Raises:
            UnsupportedError: if the spec is a copy of a part of another one.
            InvalidArgumentError: if it doesn't expand to that shape.
        """
        if name in ("low", "high"):
            if self.is_part:
                raise lost_change(f"space.{name}")
            object.__setattr__(self, "_found", None)
            old = vars(self).get(name)
            if old is not None:
                value = _in_place_of(old, name, value)
        object.__setattr__(self, name, value)

    def as_part(self) -> Self:
        """Return a space over this one's memory whose ends can't be assigned: changes in place reach this one."""
        new = self.map(lambda end: end)
        new.is_part = True
        return new

    def __iter__(self) -> Iterator[Tensor]:
        """Give `low`, then `high`."""
        yield from (self.low, self.high)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The two bounds to be read only: those of large frames may be one number, expanded.

        `low` and `high`, which users may write into, have memory for each element from their first use on.
        """
        return vars(self)["low"], vars(self)["high"]

    @property
    def common(self) -> tuple[Any, Any] | None:
        """The two bounds as Python numbers if they are the same for all elements, else None."""
        versions = [0 if end.is_inference() else end._version for end in self.ends]
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

    def draw(
        self,
        shape: Sequence[int],
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> Tensor:
        """Draw numbers of shape `shape`, which ends with that of the space; see `Bounded` for the distributions."""
        common, real = self.common, dtype.is_floating_point
        if common is None or (real and not common[1] - common[0] <= torch.finfo(dtype).max):
            draw = self._draw_reals if real else self._draw_integers
            return draw(shape, generator).to(dtype)
        low, high = common
        if real:
            made = torch.empty(shape, dtype=dtype, device=device)
            # Accelerators draw u up to 1, where low + u * (high - low) can round beyond high
            return made.uniform_(low, high, generator=generator).clamp_(low, high)
        if high == _INT64_MAX:
            # Without an upper end `random_` draws up to the dtype's largest number, included
            return torch.empty(shape, dtype=dtype, device=device).random_(low, None, generator=generator)
        return torch.randint(int(low), int(high) + 1, shape, dtype=dtype, device=device, generator=generator)

    def _draw_reals(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        low, high = self.ends
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

    def _draw_integers(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        # Arithmetic is modulo 2**64: `count` and `drawn` are unsigned numbers in int64 clothes. A count of 2**64
        # is 0 there, and to subtract it does nothing
        bottom, top = self.ends
        low = bottom.to(torch.int64)
        count = top.to(torch.int64) - low + 1
        drawn = torch.empty(shape, dtype=torch.int64, device=low.device).random_(
            _INT64_MIN, None, generator=generator
        )
        short = (drawn & _INT64_MAX) % count.clamp(min=1)
        # A count of 2**63 and more goes into 2**64 once: one subtraction is the remainder
        over = (drawn ^ _INT64_MIN) >= (count ^ _INT64_MIN)
        long = torch.where(over, drawn - count, drawn)
        return low + torch.where(count > 0, short, long)


def _written(name: str) -> property:
    """Return the property of an end that has memory for each element once it was looked at."""

    def get(space: ContinuousBox) -> Tensor:
        end: Tensor = vars(space)[name]
        # That of a part stays, as it isn't the memory of the spec: torch refuses to write into an expanded tensor.
        if end.numel() > 1 and 0 in end.stride() and not space.is_part:
            end = vars(space)[name] = end.contiguous()
            vars(space).pop("_found", None)
        return end

    def put(space: ContinuousBox, end: Tensor) -> None:
        vars(space)[name] = end

    return property(get, put)


# After the dataclass was made, which would take a property for a default.
ContinuousBox.low, ContinuousBox.high = _written("low"), _written("high")  # type: ignore[assignment]


def _in_place_of(old: Tensor, name: str, value: Any) -> Tensor:
    try:
        return spread(torch.as_tensor(value, dtype=old.dtype, device=old.device).expand(old.shape))
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"space.{name}: expected what expands to shape {tuple(old.shape)}, got {value!r}"
        ) from error


class BoxSpec(LeafSpec):
    """What `Bounded` and `Unbounded` share: a class for each domain, by default real dtypes and the others."""

    space: ContinuousBox
    strict = False

    def __init__(
        self,
        shape: torch.Size,
        space: ContinuousBox,
        device: torch.device | None,
        dtype: torch.dtype,
        domain: str | None,
        kinds: tuple[type[BoxSpec], type[BoxSpec]],
    ) -> None:
        """Become the class of a domain: of the one asked for, else that of the class, else what the dtype says.

        Args:
            shape: of one value.
            space: the numbers.
            device: see `LeafSpec`.
            dtype: of the values, a real one.
            domain: see `Bounded`.
            kinds: the class of continuous domains, and that of discrete ones.

        Raises:
            InvalidArgumentError: if the domain isn't "continuous" or "discrete".
        """
        super().__init__(shape, space, device, dtype)
        continuous, discrete = kinds
        if domain not in (None, "continuous", "discrete"):
            raise InvalidArgumentError(f"domain: expected 'continuous' or 'discrete', got {domain!r}")
        own = (
            "continuous"
            if isinstance(self, continuous)
            else "discrete"
            if isinstance(self, discrete)
            else None
        )
        self.domain = domain or own or ("continuous" if self.dtype.is_floating_point else "discrete")
        if type(self) in (continuous.__base__, continuous, discrete):
            self.__class__ = continuous if self.domain == "continuous" else discrete

    def cardinality(self) -> int | float:
        """Return the number of values in the domain; infinity for real numbers."""
        if self.dtype.is_floating_point:
            return math.inf
        if self.space.common is not None:
            low, high = self.space.common
            return int(high - low + 1) ** self.numel()
        lows, highs = (end.flatten().tolist() for end in self.space.ends)
        return math.prod(high - low + 1 for low, high in zip(lows, highs, strict=True))


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
