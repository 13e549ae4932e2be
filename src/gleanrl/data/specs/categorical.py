"""Specs of discrete choices: `Categorical`, `OneHot`, `Binary`, `MultiCategorical` and `MultiOneHot`.

Each is a `ChoiceSpec` with its constructor, and an encoding from `choices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

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
    BitEncoding,
    BoxList,
    CategoricalBox,
    ChoiceSpace,
    Encoding,
    OneHotEncoding,
    checked_mask,
    ending_with,
    refuse_register,
    require_choice,
)
from gleanrl.data.specs.leaf import (
    LeafSpec,
    check_readable,
    first_offender,
    in_dtype,
    tensor_copy,
    with_last_dimension,
)
from gleanrl.data.specs.mapping import Changes
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError, UnsupportedError


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


class ChoiceSpec(LeafSpec):
    """Base class of specs of choices: it holds the mask, and converts one encoding to the other."""

    space: ChoiceSpace
    encoding: ClassVar[Encoding]

    def __init__(
        self,
        shape: Sequence[int] | int,
        space: ChoiceSpace,
        device: DeviceLike | None,
        dtype: torch.dtype,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__(shape, space, device, dtype)
        self.update_mask(mask)

    @property
    def _known(self) -> ChoiceSpace:
        """The space that holds the number of choices, fixed or provisional."""
        return self.space

    @property
    def mask(self) -> Tensor | None:
        """The allowed choices, `(*batch_shape, n)` bool; None allows all.

        For several choices it is their concatenated masks, `(*batch_shape, sum(nvec))`. A joint mask is
        `(*batch_shape, *nvec)`.
        """
        return self.space.mask

    def update_mask(self, mask: Tensor | None) -> None:
        """Set the allowed choices of this spec, in place; `rand`, `is_in` and `project` use them.

        The call replaces `Changes.latest`, so that results computed from specs are computed again. After an error the
        old mask holds.

        Args:
            mask: bool, or integers 0 and 1; it expands to the shape of the attribute `mask`, and is copied. A mask of
                several choices whose shape ends with `nvec` is joint: it allows combinations. None allows all.

        Raises:
            InvalidTypeError: if it consists of neither booleans nor integers.
            InvalidArgumentError: if it doesn't expand to the shape, forbids all choices somewhere, or has an integer
                other than 0 and 1. Also if the number of choices isn't fixed.
            UnsupportedError: if the numbers of choices differ within the batch, or the spec is a copy of a part of
                another spec.
        """
        self.require_own("update_mask")
        if mask is not None:
            mask = self.expanded_mask(mask).to(self.device).clone()
        self.take(replace(self.space, mask=mask))

    def take(self, space: ChoiceSpace) -> None:
        """Install a space that `masked` of an equal spec has returned, and replace `Changes.latest`.

        Raises:
            InvalidArgumentError: if the mask forbids all choices somewhere; then nothing changes.
        """
        if space.by_index is not None:
            require_choice(space.forbids_all())
        self.space = space
        Changes.note()

    def expanded_mask(self, mask: Any) -> Tensor:
        """Return a mask as booleans with the shape of the attribute `mask`; see `update_mask`."""
        mask = torch.as_tensor(mask)
        return checked_mask(mask, (*concrete(self.batch_shape), *self.space.mask_dims(mask)))

    def masked(self, mask: Tensor) -> ChoiceSpace:
        """Return this spec's space with a copy of an expanded mask."""
        return replace(self.space, mask=mask.to(self.device, copy=True))

    def _check_dtype(self, dtype: torch.dtype) -> None:
        self.encoding.check_dtype(self.space, dtype)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        if not self.encoding.one_hot:
            return self._known.draw(shape, generator, self.dtype, self.device)
        dims = (*shape[:-1], *self.space.index_dims)
        index = self.space.draw(dims, generator, torch.int64, self.device)
        return self.encoding.value(self.space, index, self.dtype)

    def rand_index(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draw like `rand`, but return the int64 indices of the choices.

        With equal generators, `rand` returns the values of these indices.

        Args:
            shape: shape of the result without `index_dims`; it ends with the batch dimensions.
            generator: the source of randomness; None: torch's global generator.
        """
        dims = (*shape, *self.space.index_dims)
        return self._known.draw(dims, generator, torch.int64, self.device)

    def _outside(self, value: Tensor) -> Tensor:
        return self.encoding.outside(self.space, value)

    def _unreadable(self, value: Tensor) -> Tensor:
        return self.encoding.outside(self.space, value, least=0)

    def _nearest(self, value: Tensor) -> Tensor:
        index = self.encoding.nearest(self.space, value)
        return self.encoding.value(self.space, index, self.dtype)

    def _encoded(self, value: Any, device: torch.device | None) -> Tensor:
        if not self.encoding.one_hot:
            return super()._encoded(value, device)
        shape = torch.Size((*self.batch_shape, *self.space.index_dims))
        index = with_last_dimension("encode", self, tensor_copy(value, torch.int64, device), shape)
        offending = self.space.outside(index)
        if bool(offending.any()):
            raise SpecError(f"encode: expected choices of {self!r}, {first_offender(offending, index)}")
        return self.encoding.value(self.space, index, self.dtype)

    def _decoded(self, value: Tensor) -> np.ndarray:
        return self.encoding.index(self.space, value).numpy()

    def _describe(self) -> str:
        counts = "varying" if self.space.common is None else list(self.space.common)
        text = f"nvec={counts}" if self.space.index_dims else f"n={self.space.n}"
        return text if self.mask is None else f"{text}, masked"

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as integers, `(*lead, *batch_shape)`; for several choices `(*lead, *batch_shape, k)`.

        Integers made from one-hot vectors are int64.

        Args:
            val: `(*lead, *shape)`; integers are returned unchanged. It may have another dtype that holds the choices.
            safe: whether to check the domain; None: check it, but decode a one-hot vector of zeros, as in `zero()`, as
                the first choice.

        Raises:
            SpecError: if the domain is checked, and the value has another shape or dtype, or a choice is outside.
        """
        return self.encoding.index(self.space, self._readable("to_categorical", val, safe))

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """Return the choices as one-hot vectors, `(*lead, *batch_shape, n)`; vectors of several choices concatenated.

        Vectors made from integers are boolean.

        Args:
            val: `(*lead, *shape)`; one-hot vectors, and zeros in their place, are returned unchanged. It may have
                another dtype that holds the choices.
            safe: as in `to_categorical`.

        Raises:
            SpecError: if the domain is checked, and the value has another shape or dtype, or a choice is outside.
            UnsupportedError: if the numbers of choices differ within the batch, or the number isn't fixed.
        """
        value = self._readable("to_one_hot", val, safe)
        return self.encoding.rows(self._known, value)

    def _readable(self, where: str, val: Tensor, safe: bool | None) -> Tensor:
        """Return a value in this spec's dtype, and check it unless `safe` is False; see `to_categorical`."""
        if safe is False:
            return val
        val = in_dtype(val, self.dtype)
        check_readable(where, self, val, safe)
        return val

    def to_categorical_spec(self) -> Any:
        """Return the int64 spec of the same choices as integers, with the same mask; an integer spec returns itself."""
        return self._recoded(Categorical, MultiCategorical) if self.encoding.one_hot else self

    def to_one_hot_spec(self) -> Any:
        """Return the boolean spec of the same choices as one-hot vectors, with the same mask.

        A one-hot spec returns itself.
        """
        return self if self.encoding.one_hot else self._recoded(OneHot, MultiOneHot)

    def _recoded(self, single: Any, several: Any) -> Any:
        """Return the spec of the same choices in the other encoding, made by the class for one or several choices."""
        space = self._known
        dims = space.index_dims if self.encoding.one_hot else (sum(space.parts),)
        kind, n = (several, space.parts) if space.index_dims else (single, space.n)
        return kind(n, (*self.batch_shape, *dims), self.device, mask=self.mask)

    def index(self, index: Tensor | int, tensor_to_index: Tensor) -> Tensor:
        """Return the elements of a tensor at the positions that choices give, in either encoding.

        Args:
            index: the choices, `(*lead, *shape)`.
            tensor_to_index: `(*any, n)`.

        Returns:
            `(*any)` for one choice, `(*any, k)` for the k choices in the last dimension of `to_categorical(index)`.

        Raises:
            SpecError: if a choice is outside the domain.
        """
        chosen = self.to_categorical(torch.as_tensor(index)).to(tensor_to_index.device, torch.int64)
        lead = tensor_to_index.shape[:-1]
        if chosen.ndim == 0:
            return tensor_to_index.gather(-1, chosen.expand(*lead, 1)).squeeze(-1)
        return tensor_to_index.gather(-1, chosen.expand(*lead, chosen.shape[-1]))

    def _projected(self, value: Tensor) -> Tensor:
        if self.space.is_void and value.shape[: value.ndim - self.event_ndim].numel():
            raise SpecError(
                f"project: no value is near to {value.tolist()}: {self!r} is an empty domain; give each choice an n of "
                "at least 1"
            )
        return super()._projected(value)

    def cardinality(self) -> int:
        """Return the number of choices of one element, or of combinations of several choices, without regard to a mask.

        If the numbers differ within the batch, return the product over the batch.

        Raises:
            UnsupportedError: if the number of choices isn't fixed.
        """
        return self._known.count()

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """Return the choices, `(count, *shape)`; see `TensorSpec.enumerate`."""
        index = self._known.all(use_mask, self.device)
        require_listable(len(index), self.numel())
        batch, dims = concrete(self.batch_shape), self.space.index_dims
        index = index.reshape(-1, *(1 for _ in batch), *dims).expand(-1, *batch, *dims)
        return self.encoding.value(self.space, index, self.dtype).contiguous()


class Categorical(ChoiceSpec):
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

    encoding = Encoding()
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
        super().__init__(() if shape is None else shape, CategoricalBox(count), device, dtype, mask)

    @property
    def n(self) -> int:
        """The number of choices; `UnsupportedError` if it isn't fixed."""
        return int(self._known.n)

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


class OneHot(ChoiceSpec):
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

    encoding = OneHotEncoding()
    event_ndim = 1

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
        super().__init__(ending_with("OneHot", n, shape), CategoricalBox(n), device, dtype, mask)

    @property
    def n(self) -> int:
        """The number of choices."""
        return int(self.space.n)


class Binary(ChoiceSpec):
    """Independent elements that are 0 or 1.

    Args:
        n: the size of the last dimension; None: taken from `shape`.
        shape: shape of one value; None: `(n,)`.
        device: device on which values are drawn; None: torch's default device.
        dtype: any real dtype.

    Raises:
        InvalidArgumentError: if neither `n` nor `shape` is given, or they disagree.
    """

    encoding = BitEncoding()
    n = OneHot.n
    set_provisional_n = Categorical.set_provisional_n

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
        super().__init__(size, CategoricalBox(2), device, dtype)

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


class MultiCategorical(ChoiceSpec):
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

    space: BoxList
    encoding = Encoding()
    event_ndim = 1
    _single = False  # whether values may omit the last dimension, which has size one

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
        super().__init__(size, space, device, dtype, mask)

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


class MultiOneHot(ChoiceSpec):
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

    space: BoxList
    encoding = OneHotEncoding()
    event_ndim = 1

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
        space = BoxList(counts.expand((*concrete(size[:-1]), len(counts))))
        super().__init__(size, space, device, dtype, mask)

    @property
    def nvec(self) -> list[int]:
        """The lengths of the parts."""
        return list(self.space.parts)


# As in other releases, so that `isinstance` with Categorical or OneHot tells a program the kind of encoding
Categorical.register(Binary)
Categorical.register(MultiCategorical)
OneHot.register(MultiOneHot)
