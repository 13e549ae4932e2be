"""Several choices, as integers (`MultiCategorical`) or as one-hot vectors in a row (`MultiOneHot`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike
from gleanrl.data.specs.choice import last_is, require_ones, scores
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.rounding import integer_limits, nearest_integer, ordered
from gleanrl.data.specs.spaces import MultiDiscreteSpace, checked_mask, require_choice
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


def checked_counts(nvec: Any) -> Tensor:
    """Return `nvec` as an int64 tensor of its own with at least one dimension.

    Raises:
        InvalidTypeError: if it isn't made of integers.
        InvalidArgumentError: if it is a single number, empty, or has a count below 1.
    """
    try:
        counts = torch.as_tensor(nvec)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(f"nvec: expected integers, got {nvec!r}") from error
    if counts.numel() and (counts.dtype.is_floating_point or counts.dtype == torch.bool):
        raise InvalidTypeError(f"nvec: expected integers, got {nvec!r}")
    if counts.ndim == 0 or counts.numel() == 0 or bool((counts < 1).any()):
        raise InvalidArgumentError(f"nvec: expected a sequence of counts of at least 1, got {nvec!r}")
    return counts.to(torch.int64, copy=True)


class _MultiChoice(LeafSpec):
    """What the two encodings of several choices share: the counts and the mask."""

    space: MultiDiscreteSpace
    event_ndim = 1

    @property
    def nvec(self) -> Tensor:
        """The number of choices of each column, `(k,)` int64; with batch dimensions if they differ there."""
        common = self.space.common
        return self.space.nvec if common is None else torch.tensor(common)

    @property
    def mask(self) -> Tensor | None:
        """Which choices are allowed, `(*batch_shape, sum(nvec))` bool; None allows all."""
        return self.space.mask

    def update_mask(self, mask: Tensor | None) -> None:
        """Set which choices are allowed, in this object; `rand`, `is_in` and `project` obey.

        Args:
            mask: bool, expands to `(*batch_shape, sum(nvec))`, the masks of the columns side by side; it is
                copied. None allows all.

        Raises:
            InvalidTypeError: if it isn't boolean.
            InvalidArgumentError: if it doesn't expand to the shape, or forbids every choice of a column.
            UnsupportedError: if the counts differ within the batch.
        """
        if mask is not None:
            mask = checked_mask(mask, (*self.batch_shape, sum(self._columns("update_mask"))), self.device)
        space = MultiDiscreteSpace(self.space.nvec, mask)
        if space.padded is not None:
            require_choice(space.padded)
        self.space = space

    @abstractmethod
    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as integers, `(*lead, *batch_shape, k)`.

        Args:
            value: `(*lead, *shape)`.
            safe: False skips the check of the domain.

        Raises:
            SpecError: if a choice is outside the domain.
        """

    @abstractmethod
    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as one-hot vectors in a row, `(*lead, *batch_shape, sum(nvec))`.

        Args:
            value: `(*lead, *shape)`.
            safe: False skips the check of the domain.

        Raises:
            SpecError: if a choice is outside the domain.
            UnsupportedError: if the counts differ within the batch.
        """

    def to_categorical_spec(self) -> MultiCategorical:
        """Return the spec of `to_categorical`'s results, with the same mask."""
        if isinstance(self, MultiCategorical):
            return self
        return MultiCategorical(self.nvec, self.space.nvec.shape, self.device, mask=self.mask)

    def to_one_hot_spec(self) -> MultiOneHot:
        """Return the spec of `to_one_hot`'s results, with the same mask."""
        if isinstance(self, MultiOneHot):
            return self
        columns = self._columns("to_one_hot_spec")
        return MultiOneHot(columns, (*self.batch_shape, sum(columns)), self.device, mask=self.mask)

    def cardinality(self) -> int:
        """Return the number of values in the domain."""
        return self.space.count()

    def _columns(self, name: str) -> tuple[int, ...]:
        """Return the counts of the columns, which must be the same for the whole batch."""
        if self.space.common is None:
            raise UnsupportedError(
                f"{name}: the counts of {self!r} differ within the batch; index or unbind it first"
            )
        return self.space.common

    def _in_a_row(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return integers `(*lead, *batch, k)` as one-hot vectors in a row."""
        columns = self._columns("to_one_hot")
        starts = torch.tensor((0, *columns[:-1]), device=index.device).cumsum(0)
        row = torch.zeros((*index.shape[:-1], sum(columns)), dtype=dtype, device=index.device)
        return row.scatter_(-1, index.to(torch.int64) + starts, 1)

    def _describe(self) -> str:
        counts = "varying" if self.space.common is None else list(self.space.common)
        return f"nvec={counts}" + ("" if self.mask is None else ", masked")


class MultiCategorical(_MultiChoice):
    """Vectors of k integers, the i-th from 0 to `nvec[i]` (excluded).

    Examples:
        >>> MultiCategorical([3, 2]).rand((4,)).shape
        torch.Size([4, 2])

    Args:
        nvec: the counts; more than one dimension if they differ within the batch.
        shape: of one value, ending with the k of `nvec`; None: the shape of `nvec`.
        device: where values are drawn; None: torch's default device.
        dtype: integer or boolean; it must hold the largest choice.
        mask: bool, expands to `(*batch_shape, sum(nvec))`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if a count isn't positive or doesn't fit the dtype, or the shape or mask
            doesn't fit.
    """

    def __init__(
        self,
        nvec: Sequence[Any] | Tensor | np.ndarray,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
    ) -> None:
        counts = checked_counts(nvec)
        largest = int(counts.max())
        if largest - 1 > integer_limits(dtype)[1]:
            raise InvalidArgumentError(f"nvec: {largest} choices don't fit in {dtype}")
        size = last_is("MultiCategorical", counts.shape[-1], counts.shape if shape is None else shape)
        try:
            counts = counts.expand(size)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"nvec: expected counts that expand to {tuple(size)}, got shape {tuple(counts.shape)}"
            ) from error
        super().__init__(size, MultiDiscreteSpace(counts), device, dtype)
        self.space = self.space.map(lambda t: t.to(self.device))
        self.update_mask(mask)

    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return `value` itself, checked unless `safe` is False."""
        if safe is not False:
            self._require("to_categorical", value)
        return value

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as boolean one-hot vectors in a row, `(*lead, *batch_shape, sum(nvec))`."""
        if safe is not False:
            self._require("to_one_hot", value)
        return self._in_a_row(value, torch.bool)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.space.draw(shape, generator).to(self.dtype)

    def _outside(self, value: Tensor) -> Tensor:
        return self.space.outside(ordered(value)).any(-1)

    def _nearest(self, value: Tensor) -> Tensor:
        high = self.space.nvec.to(value.device) - 1
        return self.space.nearest(nearest_integer(value, torch.zeros_like(high), high, torch.int64)).to(
            self.dtype
        )

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return type(self)(self.space.nvec, self.shape, self.device, dtype, self.mask)


class MultiOneHot(_MultiChoice):
    """Vectors made of k one-hot vectors, the i-th of length `nvec[i]`.

    `encode` takes k integers, `to_numpy` gives k integers: they are what environments use. `project` picks
    the largest element of each part that the mask allows.

    Examples:
        >>> MultiOneHot([3, 2]).encode([1, 0])
        tensor([False,  True, False,  True, False])

    Args:
        nvec: the lengths of the parts.
        shape: of one value, ending with their sum; None: `(sum(nvec),)`.
        device: where values are drawn; None: torch's default device.
        dtype: any real dtype.
        mask: bool, expands to `shape`: which choices are allowed; None: all.

    Raises:
        InvalidArgumentError: if a count isn't positive, or the shape or the mask doesn't fit.
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor | np.ndarray,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.bool,
        mask: Tensor | None = None,
    ) -> None:
        counts = checked_counts(nvec)
        if counts.ndim != 1:
            raise InvalidArgumentError(f"nvec: expected one dimension, got shape {tuple(counts.shape)}")
        size = last_is("MultiOneHot", int(counts.sum()), shape)
        require_ones(dtype)
        super().__init__(size, MultiDiscreteSpace(counts.expand((*size[:-1], len(counts)))), device, dtype)
        self.space = self.space.map(lambda t: t.to(self.device))
        self.update_mask(mask)

    def to_categorical(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as int64, `(*lead, *batch_shape, k)`."""
        if safe is not False:
            self._require("to_categorical", value)
        return self._largest(scores(value))

    def to_one_hot(self, value: Tensor, safe: bool | None = None) -> Tensor:
        """Return `value` itself, checked unless `safe` is False."""
        if safe is not False:
            self._require("to_one_hot", value)
        return value

    def _largest(self, value: Tensor) -> Tensor:
        """Return the position of the largest element of each part, `(*lead, *batch, k)` int64."""
        return torch.stack([part.argmax(-1) for part in value.split(self._columns("to_categorical"), -1)], -1)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        index = self.space.draw((*shape[:-1], self.space.nvec.shape[-1]), generator)
        return self._in_a_row(index, self.dtype)

    def _outside(self, value: Tensor) -> Tensor:
        chosen = value != 0
        parts = chosen.split(self._columns("is_in"), -1)
        outside = (torch.stack([part.sum(-1) for part in parts], -1) != 1).any(-1)
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
        return self._in_a_row(self.space.nearest(self._largest(ranked)), self.dtype)

    def _encoded(self, value: Any) -> Tensor:
        return self._in_a_row(self._indices(value, self.space.nvec.shape, self.space.outside), self.dtype)

    def _decoded(self, value: Tensor) -> np.ndarray:
        return self._largest(scores(value)).numpy()

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        return type(self)(self.nvec, self.shape, self.device, dtype, self.mask)
