"""The two encodings of choices: as integers and as one-hot vectors, of one choice or of several side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.data.specs.choices import ChoiceSpace, checked_mask, require_choice
from gleanrl.data.specs.geometry import as_size
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.rounding import integer_limits, nearest_integer, ordered
from gleanrl.errors import InvalidArgumentError


class ChoiceSpec(LeafSpec):
    """What the encodings share: the mask, and the way from one to the other."""

    space: ChoiceSpace

    @property
    def mask(self) -> Tensor | None:
        """Which choices are allowed, `(*batch_shape, n)` bool; None allows all.

        For several choices `(*batch_shape, sum(nvec))`, their masks side by side.
        """
        return self.space.mask

    def update_mask(self, mask: Tensor | None) -> None:
        """Set which choices are allowed, in this object; `rand`, `is_in` and `project` obey.

        Args:
            mask: bool, expands to the shape of the attribute `mask`; it is copied. None allows all.

        Raises:
            InvalidTypeError: if it isn't boolean.
            InvalidArgumentError: if it doesn't expand to the shape, or forbids every choice somewhere.
            UnsupportedError: if the numbers of choices differ within the batch.
        """
        if mask is not None:
            mask = checked_mask(mask, (*self.batch_shape, sum(self.space.parts)), self.device)
        space = ChoiceSpace(self.space.n, mask)
        if space.by_index is not None:
            require_choice(space.by_index)
        self.space = space

    @abstractmethod
    def _index(self, value: Tensor) -> Tensor:
        """Return a value as indices."""

    @abstractmethod
    def _rows(self, value: Tensor) -> Tensor:
        """Return a value as one-hot vectors."""

    @abstractmethod
    def _other_encoding(self) -> Any:
        """Return the spec of the same choices in the other encoding, with the same mask."""

    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as integers, `(*lead, *batch_shape)`; several with a last dimension of their own.

        Args:
            value: `(*lead, *shape)`; integers are returned as they are.
            safe: False skips the check of the domain.

        Raises:
            SpecError: if a choice is outside the domain.
        """
        if safe is not False:
            self._require("to_categorical", value)
        return self._index(value)

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as one-hot vectors, `(*lead, *batch_shape, n)`; several in a row.

        Args:
            value: `(*lead, *shape)`; one-hot vectors are returned as they are.
            safe: False skips the check of the domain.

        Raises:
            SpecError: if a choice is outside the domain.
            UnsupportedError: if the numbers of choices differ within the batch.
        """
        if safe is not False:
            self._require("to_one_hot", value)
        return self._rows(value)

    def to_categorical_spec(self) -> Any:
        """Return the spec of `to_categorical`'s results, with the same mask."""
        return self if isinstance(self, IntegerSpec) else self._other_encoding()

    def to_one_hot_spec(self) -> Any:
        """Return the spec of `to_one_hot`'s results, with the same mask."""
        return self if isinstance(self, OneHotSpec) else self._other_encoding()

    def cardinality(self) -> int:
        """Return the number of values in the domain."""
        return self.space.count(self.batch_shape.numel())


class IntegerSpec(ChoiceSpec):
    """Choices as integers from 0."""

    def _check_dtype(self, dtype: torch.dtype) -> None:
        n = self.space.n
        most = n if isinstance(n, int) else max(n.flatten().tolist(), default=1)
        if most - 1 > integer_limits(dtype)[1]:
            raise InvalidArgumentError(f"dtype: {most} choices don't fit in {dtype}")

    def _index(self, value: Tensor) -> Tensor:
        return value

    def _rows(self, value: Tensor) -> Tensor:
        return self.space.one_hot(value, torch.bool)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.space.draw(shape, generator, self.dtype, self.device)

    def _outside(self, value: Tensor) -> Tensor:
        outside = self.space.outside(ordered(value))
        return outside.any(-1) if self.event_ndim else outside

    def _nearest(self, value: Tensor) -> Tensor:
        high = torch.as_tensor(self.space.n, device=value.device) - 1
        index = nearest_integer(value, torch.zeros_like(high), high, torch.int64)
        return self.space.nearest(index).to(self.dtype)


class OneHotSpec(ChoiceSpec):
    """Choices as one-hot vectors, several in a row.

    `encode` takes integers, `to_numpy` gives integers: they are what environments use.
    """

    event_ndim = 1

    def _check_dtype(self, dtype: torch.dtype) -> None:
        require_ones(dtype)

    def _index(self, value: Tensor) -> Tensor:
        return self.space.peaks(_comparable(value))

    def _rows(self, value: Tensor) -> Tensor:
        return value

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        index = self.space.draw((*shape[:-1], *self.space.index_dims), generator, torch.int64, self.device)
        return self.space.one_hot(index, self.dtype)

    def _outside(self, value: Tensor) -> Tensor:
        chosen = value != 0
        outside = self.space.not_single(chosen)
        if value.dtype != torch.bool:
            outside |= (chosen & (value != 1)).any(-1)
        if self.mask is not None:
            outside |= (chosen & ~self.mask.to(value.device)).any(-1)
        return outside

    def _nearest(self, value: Tensor) -> Tensor:
        ranked = _comparable(value).to(torch.float64)
        if self.mask is not None:
            ranked = ranked.masked_fill(~self.mask.to(value.device), float("-inf"))
        # Where all are -inf (forbidden or given) the peak may be a forbidden choice, hence `nearest`
        return self.space.one_hot(self.space.nearest(self.space.peaks(ranked)), self.dtype)

    def _encoded(self, value: Any) -> Tensor:
        shape = torch.Size((*self.batch_shape, *self.space.index_dims))
        return self.space.one_hot(self._indices(value, shape, self.space.outside), self.dtype)

    def _decoded(self, value: Tensor) -> np.ndarray:
        return self._index(value).numpy()


def _comparable(value: Tensor) -> Tensor:
    """Return `value` in a dtype that has an argmax."""
    return value if value.dtype.is_floating_point else value.to(torch.int64)


def ending_with(name: str, n: int, shape: Sequence[int] | int | None) -> torch.Size:
    """Return `shape`, or `(n,)` for None, after checking that it ends with `n`.

    Raises:
        InvalidArgumentError: if it doesn't.
    """
    size = as_size((n if shape is None else shape,))
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
