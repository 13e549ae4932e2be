"""The numbers between two bounds, `ContinuousBox`, and what the specs that have one share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.spaces import Box, is_one_number, lost_change, spread
from gleanrl.errors import InvalidArgumentError

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
