"""The two encodings of choices: as integers and as one-hot vectors, of one choice or of several side by side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.data.specs.base import require_listable
from gleanrl.data.specs.choices import ChoiceSpace, checked_mask, require_choice
from gleanrl.data.specs.geometry import as_size, concrete
from gleanrl.data.specs.leaf import LeafSpec, check_readable
from gleanrl.data.specs.locks import Changes
from gleanrl.data.specs.rounding import in_dtype, integer_limits, nearest_integer, ordered
from gleanrl.errors import InvalidArgumentError, SpecError, UnsupportedError


class ChoiceSpec(LeafSpec):
    """What the encodings share: the mask, and the way from one to the other."""

    space: ChoiceSpace

    @property
    def _known(self) -> ChoiceSpace:
        """The space that says how many choices there are."""
        return self.space

    @property
    def mask(self) -> Tensor | None:
        """Which choices are allowed, `(*batch_shape, n)` bool; None allows all.

        For several choices `(*batch_shape, sum(nvec))`, their masks side by side, or joint `(*batch_shape, *nvec)`.
        """
        return self.space.mask

    def update_mask(self, mask: Tensor | None) -> None:
        """Set which choices are allowed, in this object; `rand`, `is_in` and `project` obey.

        Args:
            mask: bool, or integers 0 and 1; expands to the shape of the attribute `mask`; it is copied. For several
                choices it may be joint: a mask whose shape ends with `nvec` tells which combinations are allowed. None
                allows all.

        Raises:
            InvalidTypeError: if it is made of neither booleans nor integers.
            InvalidArgumentError: if it doesn't expand to the shape, forbids every choice somewhere, or has an integer
                other than 0 and 1.
            UnsupportedError: if the numbers of choices differ within the batch.
        """
        self.require_own("update_mask")
        if mask is not None:
            mask = self.expanded_mask(mask).to(self.device).clone()
        self.take(replace(self.space, mask=mask))

    def take(self, space: ChoiceSpace) -> None:
        """Take the space of a mask, one that `masked` of a spec like this one returned."""
        if space.by_index is not None:
            require_choice(space.forbids_all())
        self.space = space
        Changes.note()

    def expanded_mask(self, mask: Any) -> Tensor:
        """Return a mask that `update_mask` takes as booleans of the shape of the attribute `mask`; see there."""
        mask = torch.as_tensor(mask)
        return checked_mask(mask, (*concrete(self.batch_shape), *self.space.mask_dims(mask)))

    def masked(self, mask: Tensor) -> ChoiceSpace:
        """Return the space of an expanded mask, which is copied."""
        return replace(self.space, mask=mask.to(self.device, copy=True))

    @abstractmethod
    def _index(self, value: Tensor) -> Tensor:
        """Return a value as indices."""

    @abstractmethod
    def _rows(self, value: Tensor) -> Tensor:
        """Return a value as one-hot vectors."""

    @abstractmethod
    def _of_index(self, index: Tensor) -> Tensor:
        """Return indices as a new value."""

    @abstractmethod
    def _other_encoding(self) -> Any:
        """Return the spec of the same choices in the other encoding, with the same mask."""

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as integers, `(*lead, *batch_shape)`; several with a last dimension of their own.

        Args:
            val: `(*lead, *shape)`; integers are returned as they are. It may have another dtype that holds the choices.
            safe: whether to check the domain; None: do, but read all zeros where a one-hot vector should be, as in
                `zero()`, as the first choice.

        Raises:
            SpecError: if a choice is outside the domain.
        """
        if safe is not False:
            val = in_dtype(val, self.dtype)
            check_readable("to_categorical", self, val, safe)
        return self._index(val)

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as one-hot vectors, `(*lead, *batch_shape, n)`; several in a row.

        Args:
            val: `(*lead, *shape)`; one-hot vectors are returned as they are, all zeros, too. Dtypes as in
                `to_categorical`.
            safe: as in `to_categorical`.

        Raises:
            SpecError: if a choice is outside the domain.
            UnsupportedError: if the numbers of choices differ within the batch.
        """
        if safe is not False:
            val = in_dtype(val, self.dtype)
            check_readable("to_one_hot", self, val, safe)
        return self._rows(val)

    def to_categorical_spec(self) -> Any:
        """Return the spec of `to_categorical`'s results, with the same mask."""
        return self if isinstance(self, IntegerSpec) else self._other_encoding()

    def to_one_hot_spec(self) -> Any:
        """Return the spec of `to_one_hot`'s results, with the same mask."""
        return self if isinstance(self, OneHotSpec) else self._other_encoding()

    def index(self, index: Tensor | int, tensor_to_index: Tensor) -> Tensor:
        """Return the elements of a tensor that choices stand for, whatever their encoding.

        Args:
            index: choices, `(*lead, *shape)`.
            tensor_to_index: `(*any, n)`.

        Returns:
            `(*any)` for one choice, `(*any, k)` for the k choices in the last dimension of `to_categorical(index)`.
        """
        chosen = self.to_categorical(torch.as_tensor(index)).to(tensor_to_index.device, torch.int64)
        lead = tensor_to_index.shape[:-1]
        if chosen.ndim == 0:
            return tensor_to_index.gather(-1, chosen.expand(*lead, 1)).squeeze(-1)
        return tensor_to_index.gather(-1, chosen.expand(*lead, chosen.shape[-1]))

    def _projected(self, value: Tensor) -> Tensor:
        if self.space.is_void and value.shape[: value.ndim - self.event_ndim].numel():
            raise SpecError(
                f"project: nothing is near to {value.tolist()}: {self!r} has a choice among nothing"
            )
        return super()._projected(value)

    def cardinality(self) -> int:
        """Return the number of choices of one element, or of several side by side, whatever a mask forbids.

        Where it differs within the batch, that of all elements.
        """
        return self._known.count()

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """Return the choices, `(count, *shape)`; see `TensorSpec.enumerate`."""
        index = self._known.all(use_mask, self.device)
        require_listable(len(index), self.numel())
        batch, dims = concrete(self.batch_shape), self.space.index_dims
        index = index.reshape(-1, *(1 for _ in batch), *dims).expand(-1, *batch, *dims)
        return self._of_index(index)


class IntegerSpec(ChoiceSpec):
    """Choices as integers from 0."""

    def _check_dtype(self, dtype: torch.dtype) -> None:
        n = self.space.n
        most = n if isinstance(n, int) else max(n.flatten().tolist(), default=1)
        if not dtype.is_floating_point and most - 1 > integer_limits(dtype)[1]:
            raise InvalidArgumentError(f"dtype: {most} choices don't fit in {dtype}")

    def _index(self, value: Tensor) -> Tensor:
        return value

    def _rows(self, value: Tensor) -> Tensor:
        return self._known.one_hot(value, torch.bool)

    def _of_index(self, index: Tensor) -> Tensor:
        return index.to(self.dtype, copy=True)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self._known.draw(shape, generator, self.dtype, self.device)

    def _outside(self, value: Tensor) -> Tensor:
        outside = self.space.outside(ordered(value))
        if value.dtype.is_floating_point:
            outside |= value != value.round()
        return outside.any(-1) if self.event_ndim else outside

    def _nearest(self, value: Tensor) -> Tensor:
        high = torch.as_tensor(self.space.limit(value.device), device=value.device) - 1
        index = nearest_integer(value, torch.zeros_like(high), high, torch.int64)
        return self.space.nearest(index).to(self.dtype)


class OneHotSpec(ChoiceSpec):
    """Choices as one-hot vectors, several in a row.

    `encode` takes integers, `to_numpy` gives integers: they are what environments use.
    """

    event_ndim = 1

    def _index(self, value: Tensor) -> Tensor:
        return self.space.peaks(_comparable(value))

    def _rows(self, value: Tensor) -> Tensor:
        return value

    def _of_index(self, index: Tensor) -> Tensor:
        return self.space.one_hot(index, self.dtype)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.space.one_hot(self.rand_index(shape[:-1], generator), self.dtype)

    def rand_index(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draw as `rand` does, and return the indices, int64.

        Args:
            shape: of the vectors, the batch's dimensions included.
            generator: where the randomness comes from; None: torch's global generator.
        """
        dims = (*shape, *self.space.index_dims)
        return self.space.draw(dims, generator, torch.int64, self.device)

    def _outside(self, value: Tensor) -> Tensor:
        return self._wrong(value, least=1)

    def _unreadable(self, value: Tensor) -> Tensor:
        return self._wrong(value, least=0)  # the peak of all zeros is the first choice

    def _wrong(self, value: Tensor, least: int) -> Tensor:
        chosen = value != 0
        outside = self.space.miscounted(chosen, least)
        if value.dtype != torch.bool:
            outside |= (chosen & (value != 1)).any(-1)
        if self.space.joint is not None:
            outside |= self.space.outside(self._index(value)).any(-1)
        elif self.mask is not None:
            outside |= (chosen & ~self.mask.to(value.device)).any(-1)
        return outside

    def _nearest(self, value: Tensor) -> Tensor:
        ranked = _comparable(value).to(torch.float64)
        if self.mask is not None and self.space.joint is None:
            ranked = ranked.masked_fill(~self.mask.to(value.device), float("-inf"))
        # Where all are -inf (forbidden or given) the peak may be a forbidden choice, hence `nearest`
        return self.space.one_hot(self.space.nearest(self.space.peaks(ranked)), self.dtype)

    def _encoded(self, value: Any, device: torch.device | None) -> Tensor:
        shape = torch.Size((*self.batch_shape, *self.space.index_dims))
        return self.space.one_hot(self._indices(value, shape, device, self.space.outside), self.dtype)

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


def refuse_register(use_register: bool) -> None:
    """Check that values aren't to be numbered in the order in which they come.

    Raises:
        UnsupportedError: if they are.
    """
    if use_register:
        raise UnsupportedError(
            "use_register: one-hot specs take integers from 0; number other values yourself"
        )
