"""One choice among n, as an integer (`Categorical`) or as a vector with a single one (`OneHot`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.rounding import integer_limits, nearest_integer, ordered
from gleanrl.data.specs.spaces import DiscreteSpace, checked_mask, require_choice
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


def checked_count(name: str, n: Any) -> int:
    """Return `n` as an int.

    Raises:
        InvalidTypeError: if it isn't an integer.
        InvalidArgumentError: if it isn't positive.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise InvalidTypeError(f"{name}: expected an integer, got {n!r}")
    if n < 1:
        raise InvalidArgumentError(f"{name}: expected at least 1, got {n}")
    return int(n)


def one_hot(index: Tensor, n: int) -> Tensor:
    """Return integers from 0 to `n` (excluded) as boolean one-hot vectors, `(*index.shape, n)`."""
    return index.unsqueeze(-1) == torch.arange(n, device=index.device)


def scores(value: Tensor) -> Tensor:
    """Return `value` in a dtype that has an argmax."""
    return value if value.dtype.is_floating_point else value.to(torch.int64)


class _Choice(LeafSpec):
    """What the two encodings of one choice share: the number of choices and the mask."""

    space: DiscreteSpace

    @property
    def n(self) -> int:
        """The number of choices."""
        return self.space.n

    @property
    def mask(self) -> Tensor | None:
        """Which choices are allowed, `(*batch_shape, n)` bool; None allows all."""
        return self.space.mask

    def update_mask(self, mask: Tensor | None) -> None:
        """Set which choices are allowed, in this object; `rand`, `is_in` and `project` obey.

        Args:
            mask: bool, expands to `(*batch_shape, n)`; it is copied. None allows all.

        Raises:
            InvalidTypeError: if it isn't boolean.
            InvalidArgumentError: if it doesn't expand to the shape, or forbids every choice somewhere.
        """
        if mask is not None:
            mask = checked_mask(mask, (*self.batch_shape, self.n), self.device)
            require_choice(mask)
        self.space = DiscreteSpace(self.n, mask)

    @abstractmethod
    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as integers, `(*lead, *batch_shape)`.

        Args:
            value: `(*lead, *shape)`.
            safe: False skips the check of the domain.

        Raises:
            SpecError: if a choice is outside the domain.
        """

    @abstractmethod
    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as one-hot vectors, `(*lead, *batch_shape, n)`.

        Args:
            value: `(*lead, *shape)`.
            safe: False skips the check of the domain.

        Raises:
            SpecError: if a choice is outside the domain.
        """

    def to_categorical_spec(self) -> Categorical:
        """Return the spec of `to_categorical`'s results, with the same mask."""
        if isinstance(self, Categorical):
            return self
        return Categorical(self.n, self.batch_shape, self.device, mask=self.mask)

    def to_one_hot_spec(self) -> OneHot:
        """Return the spec of `to_one_hot`'s results, with the same mask."""
        if isinstance(self, OneHot):
            return self
        return OneHot(self.n, (*self.batch_shape, self.n), self.device, mask=self.mask)

    def cardinality(self) -> int:
        """Return the number of values in the domain."""
        return self.space.count(self.batch_shape.numel())

    def _describe(self) -> str:
        return f"n={self.n}" + ("" if self.mask is None else ", masked")


class Categorical(_Choice):
    """Integers from 0 to `n` (excluded).

    Examples:
        >>> spec = Categorical(3, mask=torch.tensor([False, True, False]))
        >>> spec.rand((4,))
        tensor([1, 1, 1, 1])

    Args:
        n: the number of choices, at least 1.
        shape: of one value; each element is a choice of its own.
        device: where values are drawn; None: torch's default device.
        dtype: integer or boolean; it must hold `n - 1`.
        mask: bool, expands to `(*shape, n)`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if `n` isn't positive or doesn't fit the dtype, or the mask doesn't fit.
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int = (),
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.long,
        mask: Tensor | None = None,
    ) -> None:
        n = checked_count("n", n)
        if n - 1 > integer_limits(dtype)[1]:
            raise InvalidArgumentError(f"n: {n} choices don't fit in {dtype}")
        super().__init__((shape,) if isinstance(shape, int) else shape, DiscreteSpace(n), device, dtype)
        self.update_mask(mask)

    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return `value` itself, checked unless `safe` is False."""
        if safe is not False:
            self._require("to_categorical", value)
        return value

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as boolean one-hot vectors, `(*lead, *shape, n)`."""
        if safe is not False:
            self._require("to_one_hot", value)
        return one_hot(value, self.n)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.space.draw(shape, generator, self.dtype, self.device)

    def _outside(self, value: Tensor) -> Tensor:
        return self.space.outside(ordered(value))

    def _nearest(self, value: Tensor) -> Tensor:
        low, high = (torch.tensor(x, device=value.device) for x in (0, self.n - 1))
        return self.space.nearest(nearest_integer(value, low, high, torch.int64)).to(self.dtype)

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return type(self)(self.n, self.shape, self.device, dtype, self.mask)


class OneHot(_Choice):
    """Vectors of length `n` with a single one.

    `encode` takes integers, `to_numpy` gives integers: they are what environments use. `project` picks the
    largest element that the mask allows.

    Examples:
        >>> OneHot(3).encode(1)
        tensor([False,  True, False])

    Args:
        n: the number of choices, at least 1.
        shape: of one value, ending with `n`; None: `(n,)`.
        device: where values are drawn; None: torch's default device.
        dtype: any real dtype.
        mask: bool, expands to `shape`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if `n` isn't positive, or the shape or the mask doesn't fit.
    """

    event_ndim = 1

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.bool,
        mask: Tensor | None = None,
    ) -> None:
        n = checked_count("n", n)
        size = last_is("OneHot", n, shape)
        require_ones(dtype)
        super().__init__(size, DiscreteSpace(n), device, dtype)
        self.update_mask(mask)

    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as int64, `(*lead, *batch_shape)`."""
        if safe is not False:
            self._require("to_categorical", value)
        return scores(value).argmax(-1)

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return `value` itself, checked unless `safe` is False."""
        if safe is not False:
            self._require("to_one_hot", value)
        return value

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        drawn = one_hot(self.space.draw(shape[:-1], generator, torch.int64, self.device), self.n)
        return drawn if self.dtype == torch.bool else drawn.to(self.dtype)

    def _outside(self, value: Tensor) -> Tensor:
        chosen = value != 0
        outside = chosen.sum(-1) != 1
        if value.dtype != torch.bool:
            outside |= (chosen & (value != 1)).any(-1)
        if self.mask is not None:
            outside |= (chosen & ~self.mask.to(value.device)).any(-1)
        return outside

    def _nearest(self, value: Tensor) -> Tensor:
        # With -inf everywhere (forbidden or given) argmax may point at a forbidden choice, hence the second
        # step
        ranked = scores(value).to(torch.float64)
        if self.mask is not None:
            ranked = ranked.masked_fill(~self.mask.to(value.device), float("-inf"))
        return one_hot(self.space.nearest(ranked.argmax(-1)), self.n).to(self.dtype)

    def _encoded(self, value: Any) -> Tensor:
        return one_hot(self._indices(value, self.batch_shape, self.space.outside), self.n).to(self.dtype)

    def _decoded(self, value: Tensor) -> np.ndarray:
        return scores(value).argmax(-1).numpy()

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return type(self)(self.n, self.shape, self.device, dtype, self.mask)


def last_is(name: str, n: int, shape: Sequence[int] | int | None) -> torch.Size:
    """Return `shape`, or `(n,)` for None, after checking that it ends with `n`.

    Raises:
        InvalidArgumentError: if it doesn't.
    """
    size = torch.Size((n,) if shape is None else (shape,) if isinstance(shape, int) else shape)
    if not size or size[-1] != n:
        raise InvalidArgumentError(f"{name}: expected a shape that ends with {n}, got {tuple(size)}")
    return size


def require_ones(dtype: torch.dtype) -> None:
    """Check that a dtype is one for vectors of zeros and ones.

    Raises:
        InvalidArgumentError: if it isn't.
    """
    if not dtype.is_floating_point:
        integer_limits(dtype)
