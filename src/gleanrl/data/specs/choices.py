"""The numbers of choices: how many there are, which of them a mask allows, and one-hot vectors of them.

A choice is known by its *index*, an integer from 0. Several choices side by side have one index each, in a last
dimension; their masks and one-hot vectors stand in one *row*, one part after the other. A *joint* mask has one
dimension for each of several choices instead, and tells which combinations are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from gleanrl.data.specs.base import require_listable
from gleanrl.data.specs.geometry import Transform
from gleanrl.data.specs.spaces import Box
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

_NO_LIMIT = torch.iinfo(torch.int64).max

Device: TypeAlias = torch.device | None


@dataclass(frozen=True, eq=False)
class Allowed:
    """What a mask allows, in a form that can be drawn from at once.

    Attributes:
        order: `(*batch, n)` int64, the allowed positions first.
        count: `(*batch)` int64, how many positions are allowed.
    """

    order: Tensor
    count: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Allowed:
        """Read a mask of shape `(*batch, n)`."""
        return cls(mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True), mask.sum(-1))

    def draw(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Draw positions of shape `shape`, which ends with the batch dimensions, uniformly."""
        rank = draw_below(self.count, shape, generator)
        order = self.order.expand((*shape, self.order.shape[-1]))
        return order.gather(-1, rank.unsqueeze(-1)).squeeze(-1)


def draw_below(limit: Tensor, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Draw integers from 0 to `limit` (excluded, below 2**53); `shape` ends with that of `limit`."""
    # u <= 1 - 2**-53: u * limit is over half a spacing below limit, or exact, so never rounds up to it
    u = torch.rand(shape, dtype=torch.float64, device=limit.device, generator=generator)
    return u.mul_(limit).to(torch.int64)


@dataclass(frozen=True, eq=False)
class ChoiceSpace(Box):
    """Indices from 0 to a limit (excluded), or those that a mask allows; and one-hot vectors of them.

    Attributes:
        n: the limit, an int, -1 if there is none; `(*batch, k)` int64 for k choices side by side.
        mask: `(*batch, n)` bool, True where allowed, for k choices `(*batch, sum of the limits)`, or joint
            `(*batch, *limits)`; None allows all.
    """

    n: int | Tensor
    mask: Tensor | None = None

    @cached_property
    def index_dims(self) -> tuple[int, ...]:
        """The dimensions behind the batch that an index has: none, or k."""
        return () if isinstance(self.n, int) else (self.n.shape[-1],)

    @cached_property
    def is_void(self) -> bool:
        """Whether there is a choice among nothing."""
        return self.n == 0 if isinstance(self.n, int) else bool((self.n == 0).any())

    @cached_property
    def common(self) -> tuple[int, ...] | None:
        """The limits if they are the same for the whole batch, else None."""
        if isinstance(self.n, int):
            return (self.n,)
        rows = self.n.reshape(-1, self.n.shape[-1])
        return tuple(rows[0].tolist()) if len(rows) and bool((rows == rows[0]).all()) else None

    @property
    def parts(self) -> tuple[int, ...]:
        """The lengths of the parts of a row.

        Raises:
            UnsupportedError: if they differ within the batch.
        """
        if self.common is None:
            raise UnsupportedError(
                f"nvec: the counts {self.n} differ within the batch, so that masks and one-hot vectors have no common "
                "length; index or unbind the spec first"
            )
        return self.common

    @cached_property
    def joint(self) -> Tensor | None:
        """The mask `(*batch, *limits)` if it is joint, else None."""
        if self.mask is None or isinstance(self.n, int):
            return None
        return self.mask if self.is_joint(self.mask) else None

    def is_joint(self, mask: Tensor) -> bool:
        """Return whether a mask has one dimension for each of several choices."""
        if isinstance(self.n, int) or self.common is None or len(self.common) < 2:
            return False
        return tuple(mask.shape[-len(self.common) :]) == self.common

    def mask_dims(self, mask: Tensor) -> tuple[int, ...]:
        """Return the dimensions behind the batch that this mask has, once it is expanded."""
        parts = self.parts
        return parts if self.is_joint(mask) else (sum(parts),)

    @cached_property
    def by_index(self) -> Tensor | None:
        """The mask with one dimension more than an index, as long as the largest limit, False from each limit on.

        Of a joint mask, which index each choice has in an allowed combination.
        """
        if self.mask is None or isinstance(self.n, int):
            return self.mask
        if self.common is None:  # a batch of size 0
            return None
        widest, k = max(self.common), len(self.common)
        if self.joint is None:
            parts = list(self.mask.split(self.common, -1))
        else:
            others = [tuple(d for d in range(-k, 0) if d != i - k) for i in range(k)]
            parts = [self.joint.any(dims) for dims in others]
        return torch.stack([pad(part, (0, widest - part.shape[-1])) for part in parts], -2)

    @cached_property
    def combinations(self) -> Tensor:
        """The joint mask `(*batch, number of combinations)`."""
        assert self.joint is not None and self.common is not None
        return self.joint.flatten(-len(self.common))

    def _indices_of(self, combination: Tensor) -> Tensor:
        """Return the indices `(*lead, k)` of numbered combinations."""
        assert self.common is not None
        return torch.stack(torch.unravel_index(combination, self.common), -1)

    def _combination_of(self, index: Tensor) -> Tensor:
        """Return the numbers of the combinations of indices `(*lead, k)`, which are below their limits."""
        assert self.common is not None
        number = torch.zeros_like(index[..., 0])
        for i, count in enumerate(self.common):
            number = number * count + index[..., i]
        return number

    @cached_property
    def allowed(self) -> Allowed:
        """The mask, ready to be drawn from."""
        if self.joint is not None:
            return Allowed.of(self.combinations)
        assert self.by_index is not None
        return Allowed.of(self.by_index)

    def draw(
        self, shape: Sequence[int], generator: torch.Generator | None, dtype: torch.dtype, device: Device
    ) -> Tensor:
        """Draw indices of shape `shape`, which ends with those of one value.

        Raises:
            UnsupportedError: if there is no choice to draw.
        """
        if self.is_void:
            if torch.Size(shape).numel():
                raise UnsupportedError(
                    "rand: expected at least one choice, got none: n is 0, nothing can be drawn"
                )
            return torch.empty(shape, dtype=dtype, device=device)
        if self.joint is not None:
            return self._indices_of(self.allowed.draw(shape[:-1], generator)).to(dtype)
        if self.by_index is not None:
            return self.allowed.draw(shape, generator).to(dtype)
        if isinstance(self.n, int):
            return torch.randint(self.n, shape, generator=generator, dtype=dtype, device=device)
        return draw_below(self.n, shape, generator).to(dtype)

    def forbids_all(self) -> Tensor:
        """Return where the mask, which there is, leaves no choice: `(*batch)` bool."""
        if isinstance(self.n, int) or self.joint is not None:
            return self.allowed.count == 0
        return (self.allowed.count == 0).any(-1)

    def outside(self, index: Tensor) -> Tensor:
        """Return where indices aren't in the space, as booleans of the same shape."""
        if index.dtype == torch.bool:
            index = index.to(torch.int64)
        out, mask = (index < 0) | (index >= self.limit(index.device)), self.by_index
        if mask is None:
            return out
        if self.joint is not None:
            inside = torch.where(out, 0, index).to(torch.int64)
            return out | self._forbidden(inside).unsqueeze(-1)
        # Those beyond the limit are outside already; clamped, they can be looked up
        at = index.to(torch.int64).clamp(0, mask.shape[-1] - 1).unsqueeze(-1)
        return out | ~mask.to(index.device).expand((*index.shape, mask.shape[-1])).gather(-1, at).squeeze(-1)

    def _forbidden(self, index: Tensor) -> Tensor:
        """Return where a joint mask forbids the combination of int64 indices `(*lead, k)`, `(*lead)` bool."""
        number = self._combination_of(index).unsqueeze(-1)
        mask = self.combinations.to(index.device).expand((*number.shape[:-1], self.combinations.shape[-1]))
        return ~mask.gather(-1, number).squeeze(-1)

    def nearest(self, index: Tensor) -> Tensor:
        """Return the allowed index nearest to each int64, the lower one of two; with a joint mask, combinations."""
        index, mask = index.clamp(min=0).clamp(max=self.limit(index.device) - 1), self.by_index
        if mask is None:
            return index
        if self.joint is not None:
            every = self._indices_of(torch.arange(self.combinations.shape[-1], device=index.device))
            far = (every - index.unsqueeze(-2)).abs().sum(-1)
            return self._indices_of(
                far.masked_fill(~self.combinations.to(index.device), sum(self.parts)).argmin(-1)
            )
        distance = (torch.arange(mask.shape[-1], device=index.device) - index.unsqueeze(-1)).abs()
        return distance.masked_fill(~mask.to(index.device), mask.shape[-1]).argmin(-1)

    def count(self) -> int:
        """Return how many choices there are; those of the whole batch where they differ there."""
        return math.prod(self.common or torch.as_tensor(self.n).flatten().tolist())

    def all(self, use_mask: bool, device: Device) -> Tensor:
        """Return all indices, `(count)` int64, for k choices `(count, k)`.

        Args:
            use_mask: without those that the mask forbids.
            device: where to make them.

        Raises:
            UnsupportedError: if counts or masks differ within the batch.
        """
        allowed = torch.ones(sum(self.parts), dtype=torch.bool)
        if use_mask and self.mask is not None:
            mask = self.mask if self.joint is None else self.combinations
            rows = mask.reshape(-1, mask.shape[-1]).cpu()
            if bool((rows != rows[0]).any()):
                raise UnsupportedError(
                    "enumerate: the mask differs within the batch; index or unbind the spec first"
                )
            if self.joint is not None:
                return self._indices_of(rows[0].nonzero().squeeze(-1)).to(device)
            allowed = rows[0]
        indices = [part.nonzero().squeeze(-1) for part in allowed.split(self.parts)]
        require_listable(math.prod(map(len, indices)), len(indices))
        return torch.cartesian_prod(*indices).reshape(-1, *self.index_dims).to(device)

    def one_hot(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return indices as rows of one-hot vectors; an index outside is an error or all zeros."""
        if isinstance(self.n, int):
            row = index.unsqueeze(-1) == torch.arange(self.n, device=index.device)
            return row if dtype is torch.bool else row.to(dtype)
        parts = self.parts
        starts = torch.tensor((0, *parts[:-1]), device=index.device).cumsum(0)
        row = torch.zeros((*index.shape[:-1], sum(parts)), dtype=dtype, device=index.device)
        return row.scatter_(-1, index.to(torch.int64) + starts, 1)

    def peaks(self, row: Tensor) -> Tensor:
        """Return the index of the largest element of each part of a row, int64."""
        if isinstance(self.n, int):
            return row.argmax(-1)
        return torch.stack([part.argmax(-1) for part in row.split(self.parts, -1)], -1)

    def miscounted(self, chosen: Tensor, least: int) -> Tensor:
        """Return where a part of a row of booleans has fewer than `least` or several Trues, `(*lead, *batch)` bool."""
        parts = (chosen,) if isinstance(self.n, int) else chosen.split(self.parts, -1)
        sums = torch.stack([part.sum(-1) for part in parts], -1)
        return ((sums < least) | (sums > 1)).any(-1)

    def limit(self, device: torch.device) -> Any:
        """Return the limit, an int or a tensor on `device`."""
        if isinstance(self.n, int):
            return _NO_LIMIT if self.n == -1 else self.n
        return self.n.to(device)


class CategoricalBox(ChoiceSpace):
    """One choice; the arguments are those of `ChoiceSpace`."""

    n: int


class BoxList(ChoiceSpace):
    """Several choices side by side, also a sequence of their spaces.

    Args:
        n: the limits, `(*batch, k)` int64; or the spaces of the choices.
        mask: `(*batch, sum of the limits)` bool, or None.
    """

    n: Tensor

    def __init__(self, n: Tensor | Sequence[CategoricalBox], mask: Tensor | None = None) -> None:
        super().__init__(n if isinstance(n, Tensor) else torch.tensor([box.n for box in n]), mask)

    @classmethod
    def from_nvec(cls, nvec: Tensor) -> BoxList:
        """Return the choices of `nvec`, `(*batch, k)`."""
        return cls(nvec)

    def picked(self, operation: Transform) -> ChoiceSpace:
        """Return the space of the indices that `operation` takes out of those of one value.

        Raises:
            UnsupportedError: if there is a mask, and the limits differ within the new batch; or if the mask is joint,
                and several choices are left.
        """
        n, mask = operation(self.n), self.by_index
        if self.joint is not None and n.ndim:
            raise UnsupportedError(
                "index: some of several choices with a joint mask have no spec; take one choice"
            )
        mask = None if mask is None else operation(mask)
        if n.ndim == 0:
            return CategoricalBox(int(n), None if mask is None else mask[: int(n)])
        space = BoxList(n)
        if mask is None or n.numel() == 0:
            return space
        parts = [mask[..., i, :count] for i, count in enumerate(space.parts)]
        return BoxList(n, torch.cat(parts, -1))

    @property
    def boxes(self) -> list[ChoiceSpace]:
        """The spaces along the first dimension."""
        if self.common is not None:
            return [CategoricalBox(n) for n in self.common]
        return [BoxList(row) for row in self.n]

    def __iter__(self) -> Iterator[ChoiceSpace]:
        """Iterate over the spaces."""
        return iter(self.boxes)

    def __len__(self) -> int:
        """Return the number of spaces."""
        return len(self.boxes)


def checked_mask(mask: Any, shape: Sequence[int]) -> Tensor:
    """Return `mask` as booleans expanded to `shape`; it may share its memory.

    Raises:
        InvalidTypeError: if it is made of neither booleans nor integers.
        InvalidArgumentError: if an integer is neither 0 nor 1, or it can't be expanded.
    """
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise InvalidTypeError(f"mask: expected dtype torch.bool, or integers 0 and 1, got {mask.dtype}")
    if mask.dtype != torch.bool:
        other = (mask != 0) & (mask != 1)
        if bool(other.any()):
            where = tuple(other.nonzero()[0].tolist())
            raise InvalidArgumentError(
                f"mask: expected the integers 0 (forbidden) and 1 (allowed), got {mask[where].item()} at index {where}"
            )
        mask = mask != 0
    try:
        return mask.expand(tuple(shape))
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"mask: expected shape {tuple(shape)} or one that expands to it, got {tuple(mask.shape)}"
        ) from error


def require_choice(nothing: Tensor) -> None:
    """Check that nowhere in a batch a mask allows nothing.

    Raises:
        InvalidArgumentError: if it does somewhere; the message names the first place.
    """
    if bool(nothing.any()):
        where = tuple(nothing.nonzero()[0].tolist())
        raise InvalidArgumentError(f"mask: expected a True in each row, got none at batch index {where}")
