"""`NonTensor`, the spec of values that aren't tensors, and `Choice`, a choice among several specs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection
from torch import Tensor
from typing_extensions import Self

from gleanrl._arrays.devices import as_device
from gleanrl.data.specs.base import (
    DeviceLike,
    TensorSpec,
    Transform,
    as_size,
    blank,
    concrete,
    fits,
    outcome,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


class NonTensor(TensorSpec):
    """A domain of strings and other objects that tensordict wraps as non-tensor data; `shape` is the batch size.

    Objects that aren't wrapped yet are in the domain, too. `rand`, `zero` and `one` return the example. `encode` wraps
    objects that aren't wrapped yet.

    Args:
        shape: the batch size.
        device: device of the wrapper; None: no device.
        dtype: value of the attribute `dtype`; the values have no dtype.
        example_data: the object that drawn values hold.
        batched: whether drawn values are stacks with one wrapper for each position; None: no. True means
            ``feature_dims=0``.
        feature_dims: how many of the last dimensions belong to one wrapper; None: all.

    Raises:
        InvalidArgumentError: if both `batched` and `feature_dims` are given.
    """

    domain = None
    space: None = None  # the domain has no parameters

    def __init__(
        self,
        shape: Sequence[int] | int = (1,),
        device: DeviceLike | None = None,
        dtype: torch.dtype | None = None,
        example_data: Any = None,
        batched: bool | None = None,
        feature_dims: int | None = None,
    ) -> None:
        if batched is not None and feature_dims is not None:
            raise InvalidArgumentError("NonTensor: give either batched or feature_dims")
        self.shape = as_size((shape,))
        self.device = as_device(device)
        self.dtype = dtype
        self.example_data = example_data
        self.batched = bool(batched)
        self._feature_dims = 0 if batched else feature_dims

    @property
    def feature_dims(self) -> int:
        """How many of the last dimensions belong to one wrapper."""
        return self.ndim if self._feature_dims is None else self._feature_dims

    @property
    def batch_ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Any:
        return self._wrapped(self.example_data, lead)

    def _filled(self, lead: torch.Size, number: int) -> Any:
        return self._wrapped(self.example_data, lead)

    def _wrapped(self, data: Any, lead: torch.Size) -> Any:
        shape = (*lead, *concrete(self.shape))
        stacked = 0 if self._feature_dims is None else len(shape) - self._feature_dims
        wrapped = NonTensorData(data, batch_size=shape[stacked:], device=self.device)
        for size in reversed(shape[:stacked]):
            wrapped = NonTensorStack(*[wrapped] * size)
        return wrapped

    def _projected(self, value: Any) -> Any:
        return value

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return `val` wrapped as non-tensor data; a wrapped value is returned unchanged.

        Raises:
            SpecError: if a wrapped value isn't in the domain.
        """
        return self.project(val) if is_non_tensor(val) else self._wrapped(val, torch.Size())

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return the wrapped object, for a stack a nested list; a value that isn't wrapped is returned unchanged.

        Raises:
            SpecError: if the value isn't in the domain, unless `safe` is False.
        """
        checked = val if safe is False else self.project(val)
        if not is_non_tensor(checked):
            return checked
        return checked.data if isinstance(checked, NonTensorData) else checked.tolist()

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check that `value` is neither a tensor nor a TensorDict; see `TensorSpec.type_check`."""
        if _is_tensor_data(value):
            name = "" if key is None else f" key {key!r}"
            raise InvalidTypeError(f"type_check:{name} expected non-tensor data, got {type(value).__name__}")

    def cardinality(self) -> float:
        """Return infinity."""
        return math.inf

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device; the spec itself if the device is the same, or `dest` is a dtype."""
        device = self.device if isinstance(dest, torch.dtype) else as_device(dest)
        return self if device == self.device else self._replaced(device=device)

    def clone(self) -> Self:
        """Return an equal spec, which shares the example with this one."""
        return self._replaced()

    def without_example(self) -> Self:
        """Return the spec without an example; the spec itself if it has none."""
        return self if self.example_data is None else self._replaced(example_data=None)

    def _replaced(self, **attributes: Any) -> Self:
        new = copy.copy(self)
        vars(new).update(attributes, is_part=False)
        return new

    def _reshaped(self, transform: Transform) -> Self:
        return self._replaced(shape=outcome(transform(blank(self.shape))))

    def _misfit(self, value: Any) -> str | None:
        return self._fault(value)

    def _fault(self, value: Any) -> str | None:
        if _is_tensor_data(value):
            return f"expected {self!r}, got {type(value).__name__}"
        if not is_non_tensor(value):
            return None
        shape = value.batch_size
        if not fits(shape, self.shape):
            return f"expected {self!r}, got batch size {tuple(shape)}"
        return None

    def __eq__(self, other: object) -> bool:
        """Compare by content, including the example and the layout of drawn values."""
        if not isinstance(other, NonTensor):
            return NotImplemented
        own = (type(self), self.shape, self.device, self.dtype, self.feature_dims)
        return own == (
            type(other),
            other.shape,
            other.device,
            other.dtype,
            other.feature_dims,
        ) and same_object(self.example_data, other.example_data)

    def __repr__(self) -> str:
        """Return shape, device and example."""
        device = "" if self.device is None else f", device={str(self.device)!r}"
        example = "" if self.example_data is None else f", example_data={self.example_data!r}"
        return f"NonTensor(shape={tuple(self.shape)}{device}{example})"


def same_object(a: Any, b: Any) -> bool:
    """Return whether two objects have the same type and are equal; arrays are equal if all their elements are.

    Objects whose comparison raises count as unequal, unless they are identical.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        equal = a == b
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
    except (TypeError, ValueError, RuntimeError):  # arrays of unlike shapes, or objects without a comparison
        return False


def _is_tensor_data(value: Any) -> bool:
    return isinstance(value, Tensor) or (is_tensor_collection(value) and not is_non_tensor(value))


class Constant(NonTensor):
    """A domain with one value, which isn't a tensor: the example."""

    def cardinality(self) -> int:
        """Return one."""
        return 1

    def enumerate(self, use_mask: bool = False) -> list[Any]:
        """Return a list with the value."""
        return [self.rand()]

    def _fault(self, value: Any) -> str | None:
        fault = super()._fault(value)
        if fault is None and not same_object(actual := self.to_numpy(value, safe=False), self.example_data):
            fault = f"expected {self.example_data!r}, got {actual!r}"
        return fault

    def __repr__(self) -> str:
        """Return the value and the shape."""
        return f"Constant({self.example_data!r}, shape={tuple(self.shape)})"


class ConstantStack(Constant):
    """A domain with one value, a stack of objects that aren't tensors.

    Args:
        shape: shape of the stack.
        device: device of the wrappers; None: no device.
        example_data: the objects, a nested list of shape `shape`.
    """

    def _wrapped(self, data: Any, lead: torch.Size) -> Any:
        stacked = _stacked(data, len(self.shape), self.device)
        for size in reversed(lead):
            stacked = NonTensorStack(*[stacked] * size)
        return stacked

    def _fault(self, value: Any) -> str | None:
        fault = NonTensor._fault(self, value)
        if fault is not None or not is_non_tensor(value):
            actual: Any = value
        else:
            actual = value.tolist()
            # Along the leading dimensions, all positions must hold equal objects
            for _ in range(value.ndim - self.ndim):
                actual = actual[0] if all(same_object(each, actual[0]) for each in actual[1:]) else actual
        if fault is None and not same_object(actual, self.example_data):
            fault = f"expected {self.example_data!r}, got {actual!r}"
        return fault

    def _reshaped(self, transform: Transform) -> Any:
        flat: list[Any] = self.example_data
        for _ in self.shape[1:]:
            flat = [value for part in flat for value in part]
        numbers = transform(torch.arange(len(flat)).reshape(self.shape))
        if numbers.ndim == 0:
            return Constant((), self.device, example_data=flat[int(numbers)])
        return ConstantStack(numbers.shape, self.device, example_data=_picked(flat, numbers.tolist()))


def _picked(flat: list[Any], numbers: Any) -> Any:
    return [_picked(flat, part) for part in numbers] if isinstance(numbers, list) else flat[numbers]


def _stacked(data: Any, ndim: int, device: torch.device | None) -> Any:
    if ndim == 0:
        return NonTensorData(data, device=device)
    return NonTensorStack(*[_stacked(each, ndim - 1, device) for each in data])


class Choice(TensorSpec):
    """The union of several domains with the same kind, shape, dtype and device.

    `rand` picks one of the choices uniformly, and draws all values from it. `zero`, `one` and `project` use the first
    choice. `project` returns a value of another choice unchanged.

    Examples:
        >>> from gleanrl.data.specs import Bounded
        >>> Choice([Bounded(0, 1, (1,)), Bounded(2, 3, (1,))]).is_in(torch.tensor([1.5]))
        False
        >>> Choice([NonTensorData("left"), NonTensorData("right")]).cardinality()
        2

    Args:
        choices: at least one item, each a spec, `NonTensorData` or `NonTensorStack`.

    Attributes:
        choices: the specs; `NonTensorData` and `NonTensorStack` become specs whose domain has only this value.

    Raises:
        InvalidArgumentError: if `choices` is empty, or the choices differ in kind, shape, dtype or device.
        InvalidTypeError: if an item has another type.
    """

    domain = None
    space: None = None  # each choice has its own space

    def __init__(self, choices: Sequence[Any]) -> None:
        self.choices = [_as_spec(choice) for choice in choices]
        kinds = {(type(spec), spec.shape, spec.dtype, spec.device) for spec in self.choices}
        if len(kinds) != 1:
            raise InvalidArgumentError(
                f"Choice: expected choices of one kind, shape, dtype and device, got {self.choices}"
            )
        _, self.shape, self.dtype, self.device = kinds.pop()

    @property
    def num_choices(self) -> int:
        """The number of choices."""
        return len(self.choices)

    @property
    def batch_ndim(self) -> int:
        """The number of leading dimensions that shape operations may touch."""
        return self.choices[0].batch_ndim

    def _parts(self) -> Sequence[TensorSpec]:
        """Return the choices."""
        return self.choices

    def _mapped(self, function: Callable[[TensorSpec], TensorSpec]) -> Self:
        return type(self)([function(spec) for spec in self.choices])

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Any:
        device = "cpu" if generator is None else generator.device
        drawn = int(torch.randint(self.num_choices, (), generator=generator, device=device))
        return self.choices[drawn]._rand(lead, generator)

    def _filled(self, lead: torch.Size, number: int) -> Any:
        return self.choices[0]._filled(lead, number)

    def _misfit(self, value: Any) -> str | None:
        return self.choices[0]._misfit(value)

    def _fault(self, value: Any) -> str | None:
        faults = [spec._fault(value) for spec in self.choices]
        return None if None in faults else f"none of the choices: {'; '.join(map(str, faults))}"

    def _projected(self, value: Any) -> Any:
        return self.choices[0].project(value)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Convert a value of an environment to a value of this spec, without checking that a choice allows it."""
        first = self.choices[0]
        if isinstance(first, ConstantStack):
            return val if is_non_tensor(val) else first._wrapped(val, torch.Size())
        kind = NonTensor(self.shape, self.device) if isinstance(first, Constant) else first
        return kind.encode(val, ignore_device=ignore_device)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Convert a value to the form that an environment takes.

        Raises:
            SpecError: if no choice allows the value, unless `safe` is False.
        """
        if safe is not False:
            self.assert_is_in(val)
        return self.choices[0].to_numpy(val, safe=False)

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtype of a value and nothing else; see `TensorSpec.type_check`."""
        self.choices[0].type_check(value, key)

    def cardinality(self) -> int | float:
        """Return the sum of the choices' cardinalities."""
        return sum(spec.cardinality() for spec in self.choices)

    def enumerate(self, use_mask: bool = False) -> list[Any]:
        """Return the values of all choices, one after the other."""
        return [value for spec in self.choices for value in spec.enumerate(use_mask)]

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device or dtype."""
        return self._mapped(lambda spec: spec.to(dest))

    def _reshaped(self, transform: Transform) -> Self:
        return self._mapped(lambda spec: spec._reshaped(transform))

    def __eq__(self, other: object) -> bool:
        """Compare the choices, in their order."""
        if not isinstance(other, Choice):
            return NotImplemented
        return self.choices == other.choices

    def __repr__(self) -> str:
        """Return the choices."""
        return f"Choice({self.choices!r})"


def _as_spec(choice: Any) -> TensorSpec:
    if isinstance(choice, NonTensorData):
        return Constant(choice.batch_size, choice.device, example_data=choice.data)
    if isinstance(choice, NonTensorStack):
        return ConstantStack(choice.batch_size, choice.device, example_data=choice.tolist())
    if not isinstance(choice, TensorSpec):
        raise InvalidTypeError(f"Choice: expected specs, NonTensorData or NonTensorStack, got {choice!r}")
    return choice
