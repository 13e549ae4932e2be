"""Choices: `ChoiceSpace` (counts and masks), and the encodings of choices as integers or one-hot vectors.

The *index* of a choice is an integer from 0. A value of k choices has k indices in its last dimension. Masks and
one-hot vectors of k choices are concatenated to one *row*. A *joint* mask has one dimension for each of the k
choices instead: it allows or forbids combinations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from gleanrl.data.specs.base import Transform, as_size, require_listable
from gleanrl.data.specs.leaf import Box, integer_limits, nearest_integer, ordered, require_real
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError

_NO_LIMIT = torch.iinfo(torch.int64).max

Device: TypeAlias = torch.device | None


@dataclass(frozen=True, eq=False)
class Allowed:
    """The allowed positions of a mask, sorted so that a draw is one lookup.

    Attributes:
        order: `(*batch, n)` int64, the allowed positions first.
        count: `(*batch)` int64, the number of allowed positions.
    """

    order: Tensor
    count: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Allowed:
        """Return the allowed positions of a mask of shape `(*batch, n)`."""
        return cls(mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True), mask.sum(-1))

    def draw(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Draw positions uniformly; `shape` is the result's shape, and ends with the batch dimensions."""
        rank = draw_below(self.count, shape, generator)
        order = self.order.expand((*shape, self.order.shape[-1]))
        return order.gather(-1, rank.unsqueeze(-1)).squeeze(-1)


def draw_below(limit: Tensor, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Draw integers from 0 to `limit` (excluded; below 2**53); `shape` ends with the shape of `limit`."""
    # u is at most 1 - 2**-53. So u * limit is exact, or more than half a float spacing below limit: it never rounds
    # up to limit
    u = torch.rand(shape, dtype=torch.float64, device=limit.device, generator=generator)
    return u.mul_(limit).to(torch.int64)


@dataclass(frozen=True, eq=False)
class ChoiceSpace(Box):
    """The domain of one choice or of k choices: indices from 0 to a limit (excluded) that a mask allows.

    Attributes:
        n: the limit, an int; -1 for no limit. For k choices `(*batch, k)` int64.
        mask: `(*batch, n)` bool, True where allowed. For k choices `(*batch, sum of the limits)`, or joint
            `(*batch, *limits)`. None allows all.
    """

    n: int | Tensor
    mask: Tensor | None = None

    @cached_property
    def index_dims(self) -> tuple[int, ...]:
        """The dimensions of an index after the batch dimensions: `()` for one choice, `(k,)` for k choices."""
        return () if isinstance(self.n, int) else (self.n.shape[-1],)

    @cached_property
    def is_void(self) -> bool:
        """Whether a choice has the limit 0, so that the domain is empty."""
        return self.n == 0 if isinstance(self.n, int) else bool((self.n == 0).any())

    @cached_property
    def common(self) -> tuple[int, ...] | None:
        """The limits if they are equal in the whole batch, else None."""
        if isinstance(self.n, int):
            return (self.n,)
        rows = self.n.reshape(-1, self.n.shape[-1])
        return tuple(rows[0].tolist()) if len(rows) and bool((rows == rows[0]).all()) else None

    @property
    def parts(self) -> tuple[int, ...]:
        """The lengths of the parts of a row.

        Raises:
            UnsupportedError: if the limits differ within the batch.
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
        """Return whether a mask has one dimension for each of k choices, k being at least 2."""
        if isinstance(self.n, int) or self.common is None or len(self.common) < 2:
            return False
        return tuple(mask.shape[-len(self.common) :]) == self.common

    def mask_dims(self, mask: Tensor) -> tuple[int, ...]:
        """Return the dimensions of an expanded mask after the batch dimensions.

        Raises:
            InvalidArgumentError: if there is no limit.
            UnsupportedError: if the limits differ within the batch.
        """
        if isinstance(self.n, int) and self.n == -1:
            raise InvalidArgumentError("mask: a mask needs a fixed number of choices, got n=-1")
        parts = self.parts
        return parts if self.is_joint(mask) else (sum(parts),)

    @cached_property
    def by_index(self) -> Tensor | None:
        """The mask `(*batch, k, largest limit)`: whether each index of each choice is allowed; for one choice the mask.

        Indices from a choice's limit on are False. With a joint mask, an index is allowed if some allowed combination
        holds it.
        """
        if self.mask is None or isinstance(self.n, int):
            return self.mask
        if self.common is None:  # the batch has size 0: a mask needs equal limits in any other batch
            return None
        widest, k = max(self.common), len(self.common)
        if self.joint is None:
            parts = list(self.mask.split(self.common, -1))
        else:
            other_dims = [tuple(d for d in range(-k, 0) if d != i - k) for i in range(k)]
            parts = [self.joint.any(dims) for dims in other_dims]
        return torch.stack([pad(part, (0, widest - part.shape[-1])) for part in parts], -2)

    @cached_property
    def combinations(self) -> Tensor:
        """The joint mask `(*batch, number of combinations)`."""
        assert self.joint is not None and self.common is not None
        return self.joint.flatten(-len(self.common))

    def _indices_of(self, combination: Tensor) -> Tensor:
        """Return the indices `(*lead, k)` of combinations, given by their numbers."""
        assert self.common is not None
        return torch.stack(torch.unravel_index(combination, self.common), -1)

    def _combination_of(self, index: Tensor) -> Tensor:
        """Return the numbers `(*lead)` of combinations, given by indices `(*lead, k)` below their limits."""
        assert self.common is not None
        number = torch.zeros_like(index[..., 0])
        for i, count in enumerate(self.common):
            number = number * count + index[..., i]
        return number

    @cached_property
    def allowed(self) -> Allowed:
        """The allowed positions of the mask, sorted for draws; combinations for a joint mask. There must be a mask."""
        if self.joint is not None:
            return Allowed.of(self.combinations)
        assert self.by_index is not None
        return Allowed.of(self.by_index)

    def draw(
        self, shape: Sequence[int], generator: torch.Generator | None, dtype: torch.dtype, device: Device
    ) -> Tensor:
        """Draw indices uniformly among the allowed ones, with a joint mask among the allowed combinations.

        Args:
            shape: shape of the result; it ends with the batch dimensions and `index_dims`.
            generator: the source of randomness; None: torch's global generator.
            dtype: dtype of the result.
            device: device of the result, used if there is no mask.

        Raises:
            UnsupportedError: if the domain is empty, and `shape` has elements.
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
        """Return where the mask forbids all choices: `(*batch)` bool; the space must have a mask."""
        if isinstance(self.n, int) or self.joint is not None:
            return self.allowed.count == 0
        return (self.allowed.count == 0).any(-1)

    def outside(self, index: Tensor) -> Tensor:
        """Return where indices are outside the domain, as booleans of the same shape.

        With a joint mask, all k indices of a forbidden combination are outside.
        """
        if index.dtype == torch.bool:
            index = index.to(torch.int64)
        out, mask = (index < 0) | (index >= self.limit(index.device)), self.by_index
        if mask is None:
            return out
        if self.joint is not None:
            inside = torch.where(out, 0, index).to(torch.int64)
            return out | self._forbidden(inside).unsqueeze(-1)
        # Indices beyond the limit are outside already; `clamp` makes them valid for `gather`
        at = index.to(torch.int64).clamp(0, mask.shape[-1] - 1).unsqueeze(-1)
        return out | ~mask.to(index.device).expand((*index.shape, mask.shape[-1])).gather(-1, at).squeeze(-1)

    def _forbidden(self, index: Tensor) -> Tensor:
        """Return where the joint mask forbids combinations, `(*lead)` bool, for int64 indices `(*lead, k)`."""
        number = self._combination_of(index).unsqueeze(-1)
        mask = self.combinations.to(index.device).expand((*number.shape[:-1], self.combinations.shape[-1]))
        return ~mask.gather(-1, number).squeeze(-1)

    def nearest(self, index: Tensor) -> Tensor:
        """Return the allowed index nearest to each int64 index; of two at equal distance, the lower one.

        With a joint mask, return the allowed combination with the smallest sum of distances.
        """
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
        """Return the number of values of one element; the product over the whole batch if the limits differ."""
        return math.prod(self.common or torch.as_tensor(self.n).flatten().tolist())

    def all(self, use_mask: bool, device: Device) -> Tensor:
        """Return all indices, `(count)` int64, for k choices `(count, k)`.

        Args:
            use_mask: leave out the indices that the mask forbids.
            device: device of the result.

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
        """Return indices as rows of one-hot vectors.

        An index outside gives zeros for one choice, and raises or sets a wrong element for k choices.
        """
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
        """Return where a part of a row has fewer than `least` Trues, or more than one: `(*lead, *batch)` bool."""
        parts = (chosen,) if isinstance(self.n, int) else chosen.split(self.parts, -1)
        sums = torch.stack([part.sum(-1) for part in parts], -1)
        return ((sums < least) | (sums > 1)).any(-1)

    def limit(self, device: torch.device) -> Any:
        """Return the limit, an int or a tensor on `device`; the largest int64 if there is no limit."""
        if isinstance(self.n, int):
            return _NO_LIMIT if self.n == -1 else self.n
        return self.n.to(device)


class CategoricalBox(ChoiceSpace):
    """The domain of one choice; it takes the arguments of `ChoiceSpace`."""

    n: int


class BoxList(ChoiceSpace):
    """The domain of k choices; also a sequence of the spaces of its choices.

    Args:
        n: the limits, `(*batch, k)` int64; or a list with the space of each choice, whose masks aren't used.
        mask: `(*batch, sum of the limits)` or joint `(*batch, *limits)`, bool; None: all are allowed.
    """

    n: Tensor

    def __init__(self, n: Tensor | Sequence[CategoricalBox], mask: Tensor | None = None) -> None:
        super().__init__(n if isinstance(n, Tensor) else torch.tensor([box.n for box in n]), mask)

    @classmethod
    def from_nvec(cls, nvec: Tensor) -> BoxList:
        """Return the space with the limits `nvec`, `(*batch, k)`."""
        return cls(nvec)

    def picked(self, operation: Transform) -> ChoiceSpace:
        """Return the space of the indices that `operation` selects from the indices of one value.

        Raises:
            UnsupportedError: if the space has a mask, and the limits differ within the new batch; or if the mask is
                joint, and `operation` selects several choices.
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
        """The spaces of the k choices; if the limits differ within the batch, the spaces of its first dimension.

        These spaces have no masks, even if this space has one.
        """
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
    """Return `mask` as booleans expanded to `shape`; the result may share memory with `mask`.

    Raises:
        InvalidTypeError: if `mask` consists of neither booleans nor integers.
        InvalidArgumentError: if an integer is neither 0 nor 1, or `mask` doesn't expand to `shape`.
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
    """Check that a mask allows a choice everywhere in the batch.

    Args:
        nothing: where the mask forbids all choices, bool.

    Raises:
        InvalidArgumentError: if an element of `nothing` is True; the message names the first one.
    """
    if bool(nothing.any()):
        where = tuple(nothing.nonzero()[0].tolist())
        raise InvalidArgumentError(f"mask: expected a True in each row, got none at batch index {where}")


class Encoding:
    """How the values of a spec write the indices of its choices: unchanged, as integers from 0.

    Its methods take the space of the choices.
    """

    one_hot: ClassVar[bool] = False  # whether one choice is a vector; environments use its index

    def check_dtype(self, space: ChoiceSpace, dtype: torch.dtype) -> None:
        """Check that a dtype holds all values of the space.

        Raises:
            InvalidArgumentError: if it doesn't.
        """
        most = space.n if isinstance(space.n, int) else max(space.n.flatten().tolist(), default=1)
        if not dtype.is_floating_point and most - 1 > integer_limits(dtype)[1]:
            raise InvalidArgumentError(f"dtype: {most} choices don't fit in {dtype}")

    def index(self, space: ChoiceSpace, value: Tensor) -> Tensor:
        """Return a value as indices."""
        return value

    def rows(self, space: ChoiceSpace, value: Tensor) -> Tensor:
        """Return a value as one-hot vectors, boolean unless the value consists of one-hot vectors itself."""
        return space.one_hot(value, torch.bool)

    def value(self, space: ChoiceSpace, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return indices as a value, which may share memory with them."""
        return index.to(dtype)

    def outside(self, space: ChoiceSpace, value: Tensor, least: int = 1) -> Tensor:
        """Return where values are outside the domain: bool, without the dimensions of one value.

        Args:
            space: the space.
            value: values of the spec's shape and dtype.
            least: 0 accepts one-hot vectors of zeros, which are read as the first choice.
        """
        outside = space.outside(ordered(value))
        if value.dtype.is_floating_point:
            outside |= value != value.round()
        return outside.any(-1) if space.index_dims else outside

    def nearest(self, space: ChoiceSpace, value: Tensor) -> Tensor:
        """Return the allowed indices nearest to a value, which may have any real dtype."""
        high = torch.as_tensor(space.limit(value.device), device=value.device) - 1
        return space.nearest(nearest_integer(value, torch.zeros_like(high), high, torch.int64))


class BitEncoding(Encoding):
    """Integers 0 and 1, of any real dtype; numbers above a half are near to 1."""

    def check_dtype(self, space: ChoiceSpace, dtype: torch.dtype) -> None:
        """Check that a dtype is real; see `Encoding`."""
        require_real(dtype)

    def nearest(self, space: ChoiceSpace, value: Tensor) -> Tensor:
        """Return the nearest allowed bits; see `Encoding`."""
        return space.nearest((value.to(torch.float64) > 0.5).to(torch.int64))


class OneHotEncoding(Encoding):
    """One-hot vectors of any real dtype. Vectors of several choices are concatenated."""

    one_hot = True

    def check_dtype(self, space: ChoiceSpace, dtype: torch.dtype) -> None:
        """Check that a dtype is real; see `Encoding`."""
        require_real(dtype)

    def index(self, space: ChoiceSpace, value: Tensor) -> Tensor:
        """Return the positions of the largest elements, int64."""
        return space.peaks(_comparable(value))

    def rows(self, space: ChoiceSpace, value: Tensor) -> Tensor:
        """Return the value itself."""
        return value

    def value(self, space: ChoiceSpace, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return new one-hot vectors."""
        return space.one_hot(index, dtype)

    def outside(self, space: ChoiceSpace, value: Tensor, least: int = 1) -> Tensor:
        """Return where a part isn't one-hot, or its choice isn't allowed; see `Encoding`."""
        chosen = value != 0
        outside = space.miscounted(chosen, least)
        if value.dtype != torch.bool:
            outside |= (chosen & (value != 1)).any(-1)
        if space.joint is not None:
            outside |= space.outside(self.index(space, value)).any(-1)
        elif space.mask is not None:
            outside |= (chosen & ~space.mask.to(value.device)).any(-1)
        return outside

    def nearest(self, space: ChoiceSpace, value: Tensor) -> Tensor:
        """Return the positions of the largest elements that the mask allows; see `Encoding`."""
        ranked = _comparable(value).to(torch.float64)
        if space.mask is not None and space.joint is None:
            ranked = ranked.masked_fill(~space.mask.to(value.device), float("-inf"))
        # If all elements are -inf, `peaks` may return a forbidden choice: `nearest` corrects it
        return space.nearest(space.peaks(ranked))


def _comparable(value: Tensor) -> Tensor:
    """Return `value` in a dtype for which torch implements argmax."""
    return value if value.dtype.is_floating_point else value.to(torch.int64)


def ending_with(name: str, n: int, shape: Sequence[int] | int | None) -> torch.Size:
    """Return `shape` as a size, or `(n,)` for None, after checking that it ends with `n`.

    Raises:
        InvalidArgumentError: if it doesn't; the message starts with `name`, the name of the spec's class.
    """
    size = as_size((n if shape is None else shape,))
    if not size or size[-1] != n:
        raise InvalidArgumentError(f"{name}: expected a shape that ends with {n}, got {tuple(size)}")
    return size


def refuse_register(use_register: bool) -> None:
    """Check the argument `use_register` of a one-hot spec.

    Raises:
        UnsupportedError: if it is True. Then the spec would number arbitrary values in the order of their arrival.
    """
    if use_register:
        raise UnsupportedError(
            "use_register: one-hot specs take integers from 0; number other values yourself"
        )
