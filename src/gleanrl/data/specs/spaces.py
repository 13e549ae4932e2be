"""Small immutable objects that hold the numbers of a domain: bounds, counts, masks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Self

from gleanrl.errors import InvalidArgumentError, InvalidTypeError


@dataclass(frozen=True, eq=False)
class Space:
    """The numbers of a domain. Its tensors start with the batch dimensions of the spec they belong to."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the space with `function` applied to each of its tensors."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return type(self)(**{k: function(v) if isinstance(v, Tensor) else v for k, v in fields.items()})

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


@dataclass(frozen=True, eq=False)
class BoxSpace(Space):
    """An interval per element; both ends belong to it.

    Attributes:
        low: `(*shape)`, in the dtype of the spec.
        high: `(*shape)`, in the dtype of the spec.
    """

    low: Tensor
    high: Tensor

    @cached_property
    def common(self) -> tuple[Any, Any] | None:
        """The two bounds as Python numbers if they are the same for all elements, else None."""
        if self.low.numel() == 0:
            return None
        low, high = self.low.flatten()[0], self.high.flatten()[0]
        if torch.equal(self.low, low.expand_as(self.low)) and torch.equal(
            self.high, high.expand_as(self.high)
        ):
            return low.item(), high.item()
        return None


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
class DiscreteSpace(Space):
    """The integers from 0 to `n` (excluded), or those that a mask allows.

    Attributes:
        n: how many there are.
        mask: `(*batch, n)` bool, True where allowed; None allows all.
    """

    n: int
    mask: Tensor | None = None

    @cached_property
    def allowed(self) -> Allowed:
        """The mask, ready to be drawn from."""
        assert self.mask is not None
        return Allowed.of(self.mask)

    def draw(
        self,
        shape: Sequence[int],
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> Tensor:
        """Draw integers of shape `shape`, which ends with the batch dimensions."""
        if self.mask is None:
            return torch.randint(self.n, shape, generator=generator, dtype=dtype, device=device)
        return self.allowed.draw(shape, generator).to(dtype)

    def outside(self, index: Tensor) -> Tensor:
        """Return where the integers `(*lead, *batch)` aren't in the space, as booleans of the same shape."""
        return outside(index, self.n, self.mask)

    def nearest(self, index: Tensor) -> Tensor:
        """Return the member nearest to each int64, the lower one of two."""
        return nearest(index, self.n, self.mask)

    def count(self, batch_numel: int) -> int:
        """Return how many different batches of integers there are."""
        if self.mask is None:
            return self.n**batch_numel
        return math.prod(self.allowed.count.flatten().tolist())


@dataclass(frozen=True, eq=False)
class MultiDiscreteSpace(Space):
    """For each of k columns the integers from 0 to its count (excluded), or those that a mask allows.

    Attributes:
        nvec: `(*batch, k)` int64, the counts.
        mask: `(*batch, sum of the counts)` bool, the masks of the columns side by side; None allows all.
    """

    nvec: Tensor
    mask: Tensor | None = None

    @cached_property
    def common(self) -> tuple[int, ...] | None:
        """The counts of the columns if they are the same for the whole batch, else None."""
        rows = self.nvec.reshape(-1, self.nvec.shape[-1])
        return tuple(rows[0].tolist()) if len(rows) and bool((rows == rows[0]).all()) else None

    @cached_property
    def padded(self) -> Tensor | None:
        """The mask as `(*batch, k, largest count)`, False behind the end of a column."""
        if self.mask is None or self.common is None:
            return None
        widest = max(self.common)
        parts = (pad(part, (0, widest - part.shape[-1])) for part in self.mask.split(self.common, -1))
        return torch.stack(list(parts), -2)

    @cached_property
    def allowed(self) -> Allowed:
        """The mask, ready to be drawn from."""
        assert self.padded is not None
        return Allowed.of(self.padded)

    def draw(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Draw int64 of shape `shape`, which ends with `(*batch, k)`."""
        if self.padded is None:
            return draw_below(self.nvec, shape, generator)
        return self.allowed.draw(shape, generator)

    def outside(self, index: Tensor) -> Tensor:
        """Return where integers `(*lead, *batch, k)` aren't in the space, as booleans of that shape."""
        return outside(index, self.nvec.to(index.device), self.padded)

    def nearest(self, index: Tensor) -> Tensor:
        """Return the member nearest to each int64, the lower one of two."""
        return nearest(index, self.nvec.to(index.device), self.padded)

    def count(self) -> int:
        """Return how many different batches there are."""
        each = self.nvec if self.padded is None else self.allowed.count
        return math.prod(each.flatten().tolist())


def outside(index: Tensor, limit: int | Tensor, mask: Tensor | None) -> Tensor:
    """Return where integers are below 0, not below `limit`, or not allowed by `mask` (one more dimension)."""
    if index.dtype == torch.bool:
        index = index.to(torch.int64)
    out = (index < 0) | (index >= limit)
    if mask is None:
        return out
    place = index.to(torch.int64).clamp(0, mask.shape[-1] - 1).unsqueeze(-1)
    return out | ~mask.to(index.device).expand((*index.shape, mask.shape[-1])).gather(-1, place).squeeze(-1)


def nearest(index: Tensor, limit: int | Tensor, mask: Tensor | None) -> Tensor:
    """Return the allowed integer below `limit` that is nearest to each int64, the lower one of two."""
    index = index.clamp(min=0).clamp(max=limit - 1)
    if mask is None:
        return index
    distance = (torch.arange(mask.shape[-1], device=index.device) - index.unsqueeze(-1)).abs()
    return distance.masked_fill(~mask.to(index.device), mask.shape[-1]).argmin(-1)


def checked_mask(mask: Any, shape: Sequence[int], device: torch.device | None) -> Tensor:
    """Return `mask` expanded to `shape` on `device`, as a tensor of its own.

    Raises:
        InvalidTypeError: if it isn't a boolean tensor.
        InvalidArgumentError: if it can't be expanded.
    """
    if not isinstance(mask, Tensor):
        mask = torch.as_tensor(mask)
    if mask.dtype != torch.bool:
        raise InvalidTypeError(f"mask: expected dtype torch.bool, got {mask.dtype}")
    try:
        return mask.to(device).expand(tuple(shape)).clone()
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"mask: expected shape {tuple(shape)} or one that expands to it, got {tuple(mask.shape)}"
        ) from error


def require_choice(mask: Tensor) -> None:
    """Check that each row of a mask `(*batch, n)` allows something.

    Raises:
        InvalidArgumentError: if a row allows nothing; the message names the first one.
    """
    empty = ~mask.any(-1)
    if bool(empty.any()):
        where = tuple(empty.nonzero()[0].tolist())
        raise InvalidArgumentError(f"mask: expected a True in each row, got none at batch index {where}")
