"""`LeafSpec`, the base class of specs for single tensors, `Box`, the parameters of one, and conversions between dtypes.

Each kind of spec implements `_draw`, `_outside` and `_nearest`; `LeafSpec` builds the public methods on them.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from gleanrl._arrays.devices import as_device
from gleanrl.data.specs.base import (
    DeviceLike,
    TensorSpec,
    Transform,
    as_size,
    blank,
    check_in,
    concrete,
    fits,
    on_parameters,
    outcome,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, SpecError

LARGE = 1 << 12
"""Number of elements above which a bound with one value everywhere is stored as an expanded scalar."""


class Box:
    """The parameters of a spec; subclasses are dataclasses. Its tensors start with the spec's batch dimensions."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the space with `function` applied to each of its tensors."""
        new = object.__new__(type(self))
        for name in _names(self):
            value = vars(self)[name]
            object.__setattr__(new, name, function(value) if isinstance(value, Tensor) else value)
        return new

    def clone(self) -> Self:
        """Return an equal space that shares no memory with this one."""
        return self.map(_copied)

    def as_part(self) -> Self:
        """Return the space for a read-only copy of a part of a spec; subclasses with settable fields refuse changes."""
        return self.clone()

    def to(self, device: torch.device | str | int) -> Self:
        """Return the space on another device."""
        return self.map(lambda t: t.to(device))

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(vars(self)[name], vars(other)[name]) for name in _names(self))

    __hash__ = None  # type: ignore[assignment]


def is_one_number(tensor: Tensor) -> bool:
    """Return whether a tensor is a large expanded scalar, for example the bound of all elements of an image."""
    return tensor.numel() > LARGE and not any(tensor.stride())


def spread(bound: Tensor) -> Tensor:
    """Return a bound with memory for each element, so that it can be changed in place.

    A large expanded scalar is returned unchanged, since a copy would cost as much memory as an image.
    """
    return bound if is_one_number(bound) else bound.contiguous()


def _copied(tensor: Tensor) -> Tensor:
    # `clone` of an expanded tensor allocates each element, and specs of images are copied often.
    return tensor.flatten()[0].clone().expand(tensor.shape) if is_one_number(tensor) else tensor.clone()


def _names(space: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(space)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


# torch can't compare tensors of these dtypes. int64 holds all of their numbers, and can be compared
_UNORDERED = (torch.uint16, torch.uint32)


def integer_limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer or boolean dtype.

    Raises:
        InvalidArgumentError: if the dtype is floating-point, complex or uint64.
    """
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.uint64:
        raise InvalidArgumentError(f"dtype: expected an integer dtype other than uint64, got {dtype}")
    limits = torch.iinfo(dtype)
    return int(limits.min), int(limits.max)


def require_real(dtype: torch.dtype) -> None:
    """Check that a spec can have this dtype: floating-point, boolean, or integer other than uint64.

    Raises:
        InvalidArgumentError: if it can't.
    """
    if not dtype.is_floating_point:
        integer_limits(dtype)


def ordered(value: Tensor) -> Tensor:
    """Return `value` in a dtype that torch can compare."""
    return value.to(torch.int64) if value.dtype in _UNORDERED else value


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in another real dtype if the conversion keeps every number.

    Otherwise, and if `value` isn't a tensor, return `value` unchanged.
    """
    if not isinstance(value, Tensor) or value.dtype == dtype or value.dtype.is_complex:
        return value
    there, here = value.to(dtype), ordered(value)
    # A round trip detects every loss except wrapped integers, whose sign changes.
    exact = (ordered(there.to(value.dtype)) == here) & ((ordered(there) < 0) == (here < 0))
    return there if bool(exact.all()) else value


def nearest_integer(value: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the integer of `dtype` between `low` and `high` (both included) that is nearest to each number.

    Args:
        value: any real dtype, without NaN; halves are rounded to the even neighbour.
        low: int64, broadcasts with `value`.
        high: int64, broadcasts with `value`.
        dtype: dtype of the result; it can hold `low` and `high`.
    """
    if not value.dtype.is_floating_point:
        return torch.minimum(torch.maximum(value.to(torch.int64), low), high).to(dtype)
    value = value.to(torch.float64)
    # The result uses `inner` only strictly between the bounds, because the conversion of a number beyond int64 is
    # undefined
    inner = torch.minimum(torch.maximum(value.round().to(torch.int64), low), high)
    return torch.where(value <= low, low, torch.where(value >= high, high, inner)).to(dtype)


def first_offender(outside: Tensor, value: Tensor) -> str:
    """Return text about the first value marked in `outside`, a boolean tensor over the leading dimensions."""
    index = tuple(outside.nonzero()[0].tolist())
    return f"got {value[index].tolist()}" + (f" at index {index}" if index else "")


def tensor_copy(value: Any, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a copy of `value` as a tensor.

    A floating-point dtype takes any number, and rounds it. An integer or boolean dtype takes only numbers that it
    holds exactly. With `device` None the copy stays on the value's device, which is the CPU for arrays and lists.

    Raises:
        InvalidTypeError: if the value doesn't consist of real numbers.
        SpecError: if an integer or boolean dtype can't hold a number exactly.
    """
    if isinstance(value, Tensor):
        source = value.detach()
    else:
        try:
            array = np.array(value)
        except ValueError as error:
            raise InvalidTypeError(f"encode: expected numbers in a regular array, got {value!r}") from error
        if array.dtype.kind not in "biuf":
            raise InvalidTypeError(
                f"encode: expected numbers, got {type(value).__name__} with dtype {array.dtype}"
            )
        source = torch.from_numpy(array)
    if source.dtype.is_complex:
        raise InvalidTypeError(
            f"encode: expected real numbers, got {source.dtype}; pass the real and imaginary parts (torch.view_as_real)"
        )
    made = source.to(device=device, dtype=dtype, copy=True)
    if not dtype.is_floating_point and source.dtype != dtype:
        wrong = made.to(source.dtype).to(source.device) != source
        if source.dtype == torch.uint64 and dtype.is_signed:
            # Numbers above the dtype's limit wrap to negative ones and back, so that the comparison misses them
            wrong = wrong | (made < 0).to(source.device)
        if bool(wrong.any()):
            raise SpecError(
                f"encode: expected numbers that {dtype} holds exactly, {first_offender(wrong, source)}"
            )
    return made


def with_last_dimension(where: str, spec: LeafSpec, value: Tensor, shape: torch.Size) -> Tensor:
    """Return `value` if its shape ends with `shape`; a missing last dimension of size one is added.

    The dimension is added only to a value without leading dimensions.

    Raises:
        SchemaError: if the shape doesn't fit; the message starts with `where`, the name of the call.
    """
    if shape and shape[-1] == 1 and value.shape == shape[:-1]:
        value = value.unsqueeze(-1)
    if not fits(value.shape, shape):
        raise SchemaError(
            f"{where}: expected shape (..., {', '.join(map(str, shape))}) for {spec!r}, got {tuple(value.shape)}"
        )
    return value


def check_readable(where: str, spec: LeafSpec, value: Any, safe: bool | None) -> None:
    """Check that `value` can be decoded by `spec`; with `safe`, check that it is in the domain.

    Raises:
        SpecError: if the check fails; the message starts with `where`, the name of the call.
    """
    fault = spec._fault(value) if safe else spec._fault_by(value, spec._unreadable)
    if fault is not None:
        raise SpecError(f"{where}: {fault}")


class LeafSpec(TensorSpec):
    """A domain of tensors of one shape and dtype.

    Attributes:
        space: the parameters of the domain.
    """

    space: Box
    dtype: torch.dtype
    device: torch.device
    domain = "discrete"
    # How many of the last dimensions encode one value
    event_ndim: ClassVar[int] = 0
    # Whether `encode` and `to_numpy` check the domain by default
    strict: ClassVar[bool] = True

    def __init__(
        self, shape: Sequence[int] | int, space: Box, device: DeviceLike | None, dtype: torch.dtype
    ) -> None:
        self.shape, self.space, self.dtype = as_size((shape,)), space, dtype
        self.device = as_device(device) or torch.empty(0).device
        self._check_dtype(dtype)

    @abstractmethod
    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        """Draw values; `shape` includes the leading dimensions and the spec's own."""

    @abstractmethod
    def _outside(self, value: Tensor) -> Tensor | None:
        """Return where `value` is outside the domain, as booleans; None if no value can be outside.

        Args:
            value: a tensor of the right shape and dtype.

        Returns:
            a bool tensor with the shape of `value` without its last `event_ndim` dimensions.
        """

    @abstractmethod
    def _nearest(self, value: Tensor) -> Tensor:
        """Return a value in the domain close to `value`, which has the right shape but may have another dtype."""

    def _unreadable(self, value: Tensor) -> Tensor | None:
        """Return where `value` can't be decoded; by default where it is outside the domain (see `_outside`)."""
        return self._outside(value)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Check that values of the domain can have this dtype; by default any real dtype.

        Raises:
            InvalidArgumentError: if they can't.
        """
        require_real(dtype)

    @property
    def batch_ndim(self) -> int:
        """The number of leading dimensions that shape operations may touch."""
        return len(self.shape) - self.event_ndim

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self._draw(lead + concrete(self.shape), generator)

    def _filled(self, lead: torch.Size, number: int) -> Tensor:
        make = torch.ones if number else torch.zeros
        return make((*lead, *concrete(self.shape)), dtype=self.dtype, device=self.device)

    def _projected(self, value: Tensor) -> Tensor:
        if value.dtype.is_complex:
            raise SpecError(
                f"project: expected {self!r}, got dtype {value.dtype}; no real number is nearest to it"
            )
        if value.dtype.is_floating_point and bool((nan := value.isnan()).any()):
            raise SpecError(
                f"project: expected {self!r}, {first_offender(nan, value)}; no value is nearest to a NaN: "
                "replace it first"
            )
        return self._nearest(value)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Tensor:
        """Convert a value of an environment (NumPy array, number, list or tensor) to a new tensor of this spec.

        One-hot specs take the integers of the choices. The value may have leading dimensions. Without leading
        dimensions, a missing last dimension of size one is added, so that a reward of `1.0` fits shape `(1,)`. Specs of
        choices check the domain.
        `Bounded` specs don't, because environments return values outside their own bounds.

        Args:
            val: the value that the environment returned.
            ignore_device: leave the result on the device of the input (the CPU for arrays and lists), so that the
                caller can move several results at once.

        Raises:
            InvalidTypeError: if the value doesn't consist of real numbers.
            SchemaError: if the shape doesn't fit.
            SpecError: if an integer or boolean dtype can't hold a number exactly, or a choice is outside the domain.
        """
        return self._encoded(val, None if ignore_device else self.device)

    def to_numpy(self, val: Tensor, safe: bool | None = None) -> np.ndarray:
        """Convert a tensor to an array; one-hot vectors become the integers of their choices.

        The array shares the memory of a CPU tensor of the spec's dtype, unless it is decoded from one-hot vectors.
        Choices may have another dtype that holds them exactly. A one-hot vector of zeros, as in `zero()`, is decoded as
        the first choice, unless `safe` is True.

        Args:
            val: `(*lead, *self.shape)`.
            safe: whether to check the domain; None: check it, except for `Bounded` and `Unbounded` specs.

        Raises:
            SpecError: if the domain is checked, and the value has another shape or dtype, or is outside.
            SchemaError: if the domain isn't checked, and the shape doesn't fit.
        """
        if self.strict and safe is not False:
            val = in_dtype(val, self.dtype)
        if safe or (safe is None and self.strict):
            check_readable("to_numpy", self, val, safe)
        elif (misfit := self._misfit(val)) is not None:
            raise SchemaError(f"to_numpy: {misfit}")
        return self._decoded(val.detach().cpu())

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtype of a tensor and nothing else; see `TensorSpec.type_check`."""
        got = getattr(value, "dtype", type(value).__name__)
        if got != self.dtype:
            name = "" if key is None else f" key {key!r}"
            raise InvalidTypeError(f"type_check:{name} expected dtype {self.dtype}, got {got}")

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device or dtype; the spec itself if `dest` changes nothing.

        Raises:
            InvalidArgumentError: if values of the domain can't have the dtype, or torch doesn't know the device.
        """
        if isinstance(dest, torch.dtype):
            return self if dest == self.dtype else self._with_dtype(dest)
        device = as_device(dest)
        if device in (None, self.device):
            return self
        return self._replaced(device=device, space=self.space.map(lambda t: t.to(device)))

    def clone(self) -> Self:
        """Return an equal spec that shares no memory with this one; it isn't read-only, even if this one is."""
        return self._replaced(space=self.space.clone())

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        if not isinstance(other, LeafSpec):
            return NotImplemented
        return (
            type(self) is type(other)
            and (self.shape, self.dtype, self.device) == (other.shape, other.dtype, other.device)
            and self.space == other.space
        )

    def __repr__(self) -> str:
        """Return the class name, the domain, shape, dtype and device."""
        words = [w for w in (self._describe(), f"shape={tuple(self.shape)}") if w]
        words.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
        if self.device.type != "cpu":
            words.append(f"device={str(self.device)!r}")
        return f"{type(self).__name__}({', '.join(words)})"

    def _describe(self) -> str:
        """Return the part of the repr that describes the domain."""
        return ""

    def _encoded(self, value: Any, device: torch.device | None) -> Tensor:
        """Return a value of an environment as a new tensor of this spec's dtype and shape.

        Only `strict` specs check the domain. With `device` None the tensor stays on the value's device.
        """
        encoded = with_last_dimension("encode", self, tensor_copy(value, self.dtype, device), self.shape)
        if self.strict:
            check_in("encode", self, encoded)
        return encoded

    def _decoded(self, value: Tensor) -> np.ndarray:
        """Return a detached CPU tensor as the array that an environment takes."""
        return value.numpy()

    def _with_dtype(self, dtype: torch.dtype) -> Self:
        """Return the spec with another dtype; raise `InvalidArgumentError` if its values can't have this dtype."""
        self._check_dtype(dtype)
        return self._replaced(dtype=dtype)

    def _replaced(self, **attributes: Any) -> Self:
        new = copy.copy(self)
        new.is_part = False
        for name, attribute in attributes.items():
            setattr(new, name, attribute)
        return new

    def opened(self, dim: int) -> Self:
        """Return the spec with dimension `dim` dynamic; its parameters must be equal along `dim`."""
        sizes = list(self.shape)
        sizes[dim] = -1
        return self._replaced(shape=torch.Size(sizes), space=self.space.map(lambda t: t.narrow(dim, 0, 1)))

    def as_part(self) -> Self:
        """Make this spec and its space read-only, and return it; see `TensorSpec.as_part`."""
        self.space = self.space.as_part()
        return super().as_part()

    def _reshaped(self, transform: Transform) -> Self:
        batch = outcome(transform(blank(self.batch_shape)))
        space = self.space.map(on_parameters(transform, self.batch_shape))
        return self._replaced(shape=batch + self.shape[self.batch_ndim :], space=space)

    def _misfit(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return f"expected {self!r}, got {type(value).__name__}"
        if not fits(value.shape, self.shape):
            return f"expected {self!r}, got shape {tuple(value.shape)}"
        return None

    def _fault(self, value: Any) -> str | None:
        return self._fault_by(value, self._outside)

    def _fault_by(self, value: Any, wrong: Callable[[Tensor], Tensor | None]) -> str | None:
        fault = self._misfit(value)
        if fault is not None:
            return fault
        if value.dtype != self.dtype:
            return f"expected {self!r}, got dtype {value.dtype}"
        outside = wrong(value)
        if outside is None or not bool(outside.any()):
            return None
        return f"expected {self!r}, {first_offender(outside, value)}"
