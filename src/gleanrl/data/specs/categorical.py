"""Specs of discrete choices: `Categorical`, `OneHot`, `Binary`, `MultiCategorical` and `MultiOneHot`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl._arrays.devices import as_device
from gleanrl.data.specs.base import (
    DeviceLike,
    as_items,
    as_size,
    blank,
    concrete,
    goes_back,
    indexing,
    on_parameters,
    outcome,
    require_listable,
    spread,
    within,
)
from gleanrl.data.specs.choices import (
    BoxList,
    CategoricalBox,
    ChoiceSpace,
    ChoiceSpec,
    IntegerSpec,
    OneHotSpec,
    ending_with,
    refuse_register,
)
from gleanrl.data.specs.leaf import require_real
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


def checked_count(name: str, n: Any) -> int:
    """Return `n` as an int.

    Raises:
        InvalidTypeError: if it isn't an integer.
        InvalidArgumentError: if it is negative.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise InvalidTypeError(f"{name}: expected an integer, got {n!r}")
    if n < 0:
        raise InvalidArgumentError(f"{name}: expected at least 0, got {n}")
    return int(n)


class _OneChoice(ChoiceSpec):
    @property
    def n(self) -> int:
        """The number of choices; `UnsupportedError` if it isn't fixed."""
        return int(self._known.n)

    def _describe(self) -> str:
        return f"n={self.space.n}" + ("" if self.mask is None else ", masked")


class Categorical(_OneChoice, IntegerSpec):
    """Integers from 0 to `n` (excluded).

    With `n=-1` the number of choices isn't fixed, and the domain holds all integers from 0. Methods that need the
    number, such as `rand`, raise until `set_provisional_n` has set it.

    Examples:
        >>> spec = Categorical(3, mask=torch.tensor([False, True, False]))
        >>> spec.rand((4,))
        tensor([1, 1, 1, 1])

    Args:
        n: the number of choices; -1 for any number. 0 means an empty domain, from which `rand` can't draw.
        shape: shape of one value; its elements are independent choices. None: `()`.
        device: device on which values are drawn; None: torch's default device.
        dtype: any real dtype that holds `n - 1`.
        mask: the allowed choices, a bool tensor that expands to `(*shape, n)`; None: all.

    Raises:
        InvalidArgumentError: if `n` is negative or doesn't fit the dtype, or the mask doesn't fit.
    """

    _provisional: CategoricalBox | None = None

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = (),
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.long,
        mask: Tensor | None = None,
    ) -> None:
        count = -1 if n == -1 else checked_count("n", n)
        super().__init__(() if shape is None else shape, CategoricalBox(count), device, dtype)
        self.update_mask(mask)

    def set_provisional_n(self, n: int) -> None:
        """Set the number of choices that `n`, `rand`, `enumerate`, `cardinality` and `to_one_hot` use.

        The domain doesn't change: `is_in` and `project` accept all integers from 0. Specs with a fixed number of
        choices ignore the provisional one.

        Raises:
            InvalidTypeError: if `n` isn't an integer.
            InvalidArgumentError: if `n` is negative.
            UnsupportedError: if the spec is a copy of a part of another spec.
        """
        self.require_own("set_provisional_n")
        self._provisional = CategoricalBox(checked_count("n", n))

    @property
    def _known(self) -> ChoiceSpace:
        if self.space.n != -1:
            return self.space
        if self._provisional is None:
            raise UnsupportedError("n: the number of choices isn't fixed; call set_provisional_n first")
        return self._provisional

    def update_mask(self, mask: Tensor | None) -> None:
        """Set the allowed choices of this spec, in place; see `ChoiceSpec.update_mask`.

        Raises:
            InvalidArgumentError: also if there is a mask, and the spec was made with `n=-1`.
        """
        if mask is not None and self.space.n == -1:
            raise InvalidArgumentError("mask: a mask needs a fixed number of choices, got n=-1")
        super().update_mask(mask)

    def _other_encoding(self) -> OneHot:
        return OneHot(self.n, (*self.shape, self.n), self.device, mask=self.mask)


class OneHot(_OneChoice, OneHotSpec):
    """Vectors of length `n` that hold a single one.

    `encode` takes integers and `to_numpy` returns integers, because environments use integers. `project` picks the
    largest element that the mask allows.

    Examples:
        >>> OneHot(3).encode(1)
        tensor([False,  True, False])

    Args:
        n: the number of choices. 0 means an empty domain, from which `rand` can't draw.
        shape: shape of one value, ending with `n`; None: `(n,)`.
        device: device on which values are drawn; None: torch's default device.
        dtype: any real dtype.
        use_register: must be False. True would number arbitrary values in the order in which `encode` meets them.
        mask: the allowed choices, a bool tensor that expands to `shape`; None: all.

    Raises:
        InvalidArgumentError: if `n` is negative, or the shape or the mask doesn't fit.
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        refuse_register(use_register)
        n = checked_count("n", n)
        super().__init__(ending_with("OneHot", n, shape), CategoricalBox(n), device, dtype)
        self.update_mask(mask)

    def _other_encoding(self) -> Categorical:
        return Categorical(self.n, self.batch_shape, self.device, mask=self.mask)


class Binary(Categorical):
    """Independent elements that are 0 or 1.

    Args:
        n: the size of the last dimension; None: taken from `shape`.
        shape: shape of one value; None: `(n,)`.
        device: device on which values are drawn; None: torch's default device.
        dtype: any real dtype.

    Raises:
        InvalidArgumentError: if neither `n` nor `shape` is given, or they disagree.
    """

    def __init__(
        self,
        n: int | None = None,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if n is not None:
            size = ending_with("Binary", checked_count("n", n), shape)
        elif shape is not None:
            size = as_size((shape,))
        else:
            raise InvalidArgumentError("Binary: expected n or shape, got neither")
        super().__init__(2, size, device, dtype)

    def cardinality(self) -> int:
        """Return the number of values that the last dimension can have."""
        return 2 ** (self.shape[-1] if self.shape else 1)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """Return all values of the last dimension, `(count, *shape)`; see `TensorSpec.enumerate`."""
        each = self.space.all(use_mask, self.device)
        if not self.shape:
            return each.to(self.dtype)
        if not self.shape[-1]:  # one value, without elements
            return torch.zeros((1, *self.shape), dtype=self.dtype, device=self.device)
        require_listable(len(each) ** self.shape[-1], self.numel())
        rows = torch.cartesian_prod(*[each] * self.shape[-1]).reshape(-1, self.shape[-1]).to(self.dtype)
        lead = self.shape[:-1]
        return rows.reshape(-1, *(1 for _ in lead), self.shape[-1]).expand(-1, *lead, -1).clone()

    def _check_dtype(self, dtype: torch.dtype) -> None:
        require_real(dtype)

    def _nearest(self, value: Tensor) -> Tensor:
        return self.space.nearest((value.to(torch.float64) > 0.5).to(torch.int64)).to(self.dtype)

    def _describe(self) -> str:
        return "" if self.mask is None else "masked"


def checked_counts(nvec: Any) -> Tensor:
    """Return a copy of `nvec` as an int64 tensor with at least one dimension.

    Raises:
        InvalidTypeError: if it doesn't consist of integers.
        InvalidArgumentError: if it is empty or has a negative count.
    """
    try:
        counts = torch.as_tensor(nvec)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(f"nvec: expected integers, got {nvec!r}") from error
    if counts.numel() and (counts.dtype.is_floating_point or counts.dtype == torch.bool):
        raise InvalidTypeError(f"nvec: expected integers, got {nvec!r}")
    if counts.ndim == 0:
        counts = counts.unsqueeze(0)
    if counts.numel() == 0 or bool((counts < 0).any()):
        raise InvalidArgumentError(f"nvec: expected a sequence of counts of at least 0, got {nvec!r}")
    return counts.to(torch.int64, copy=True)


class _SeveralChoices(ChoiceSpec):
    space: BoxList
    event_ndim = 1
    _single = False  # whether values may omit the last dimension, which has size one

    def _describe(self) -> str:
        counts = "varying" if self.space.common is None else list(self.space.common)
        return f"nvec={counts}" + ("" if self.mask is None else ", masked")


class MultiCategorical(_SeveralChoices, IntegerSpec):
    """Vectors of k integers; the i-th integer is from 0 to `nvec[i]` (excluded).

    An index may reach into the last dimension: `spec[..., 0]` is the spec of the first choice.

    Examples:
        >>> MultiCategorical([3, 2]).rand((4,)).shape
        torch.Size([4, 2])

    Args:
        nvec: the numbers of choices. It has several dimensions if they differ within the batch. A number is one count.
        shape: shape of one value, ending with the k of `nvec`; None: the shape of `nvec`.
        device: device on which values are drawn; None: torch's default device.
        dtype: any real dtype that holds the largest choice.
        mask: the allowed choices, which expand to `(*batch_shape, sum(nvec))`; or the allowed combinations, which
            expand to `(*batch_shape, *nvec)`. None: all. See `update_mask`.
        remove_singleton: applies to a spec made from a number, such as `MultiCategorical(5)`. True: drawn values omit
            the last dimension, and the domain holds both forms. Entries of a composite always have this dimension.

    Raises:
        InvalidArgumentError: if a count is negative or doesn't fit the dtype, or the shape or mask
            doesn't fit.
    """

    def __init__(
        self,
        nvec: Sequence[Any] | Tensor | np.ndarray | int,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
        remove_singleton: bool = True,
    ) -> None:
        counts = checked_counts(nvec).to(as_device(device))
        self._single = bool(remove_singleton) and shape is None and isinstance(nvec, (int, np.integer))
        size = ending_with("MultiCategorical", counts.shape[-1], counts.shape if shape is None else shape)
        try:
            space = BoxList(counts.expand(concrete(size)))
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"nvec: expected counts that expand to {tuple(size)}, got shape {tuple(counts.shape)}"
            ) from error
        super().__init__(size, space, device, dtype)
        self.update_mask(mask)

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Tensor:
        drawn = super()._rand(lead, generator)
        return drawn.squeeze(-1) if self._single and self.ndim == 1 else drawn

    def _fault(self, value: Any) -> str | None:
        fault = super()._fault(value)
        if fault is not None and self._single and self.ndim == 1 and isinstance(value, Tensor):
            return fault if super()._fault(value.unsqueeze(-1)) is not None else None
        return fault

    def as_entry(self) -> MultiCategorical:
        """Return the spec with values of exactly its shape, including a last dimension of one."""
        if not self._single:
            return super().as_entry()
        entry = self.clone()
        entry._single = False
        return entry

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of the values that `value[index]` would give, as a read-only copy.

        An index that leaves a single choice gives a `Categorical`.

        Raises:
            IndexRangeError: if the index is out of range.
            UnsupportedError: if the spec has a mask, and the counts differ within the new batch; or if the mask is
                joint, and the index selects several choices.
        """
        if goes_back(index):
            return super().__getitem__(index)
        items = spread(as_items(index, self.shape), self.ndim)
        if within(items, self.batch_ndim) is not None:
            return super().__getitem__(index)
        operation = indexing(items, self.shape)
        space = self.space.picked(on_parameters(operation, self.shape))
        if isinstance(space, CategoricalBox):
            return Categorical(space.n, (), self.device, self.dtype, space.mask).as_part()
        shape = outcome(operation(blank(self.shape)))
        return MultiCategorical(space.n, shape, self.device, self.dtype, space.mask).as_part()

    @property
    def nvec(self) -> Tensor:
        """The number of choices of each column, `(k,)` int64; with batch dimensions if they differ within the batch."""
        return torch.as_tensor(self.space.n if self.space.common is None else self.space.common)

    def _other_encoding(self) -> MultiOneHot:
        parts = self.space.parts
        return MultiOneHot(parts, (*self.batch_shape, sum(parts)), self.device, mask=self.mask)


class MultiOneHot(_SeveralChoices, OneHotSpec):
    """Vectors of k concatenated one-hot vectors; the i-th part has length `nvec[i]`.

    `encode` takes k integers and `to_numpy` returns k integers, because environments use integers. `project` picks
    the largest element of each part. With a mask it picks the largest allowed element, or with a joint mask the
    allowed combination nearest to the largest elements.

    Examples:
        >>> MultiOneHot([3, 2]).encode([1, 0])
        tensor([False,  True, False,  True, False])

    Args:
        nvec: the lengths of the parts.
        shape: shape of one value, ending with the sum of `nvec`; None: `(sum(nvec),)`.
        device: device on which values are drawn; None: torch's default device.
        dtype: any real dtype.
        use_register: must be False. True would number arbitrary values in the order in which `encode` meets them.
        mask: the allowed choices, which expand to `shape`; or the allowed combinations, which expand to
            `(*batch_shape, *nvec)`. None: all. See `update_mask`.

    Raises:
        InvalidArgumentError: if a count is negative, or the shape or the mask doesn't fit.
    """

    def __init__(
        self,
        nvec: Sequence[int] | Tensor | np.ndarray,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        refuse_register(use_register)
        counts = checked_counts(nvec).to(as_device(device))
        if counts.ndim != 1:
            raise InvalidArgumentError(f"nvec: expected one dimension, got shape {tuple(counts.shape)}")
        size = ending_with("MultiOneHot", int(counts.sum()), shape)
        super().__init__(size, BoxList(counts.expand((*concrete(size[:-1]), len(counts)))), device, dtype)
        self.update_mask(mask)

    @property
    def nvec(self) -> list[int]:
        """The lengths of the parts."""
        return list(self.space.parts)

    def _other_encoding(self) -> MultiCategorical:
        shape = (*self.batch_shape, *self.space.index_dims)
        return MultiCategorical(self.nvec, shape, self.device, mask=self.mask)


# As in other releases, so that `isinstance` with Categorical or OneHot tells a program the kind of encoding
Categorical.register(MultiCategorical)
OneHot.register(MultiOneHot)
