"""Values that aren't tensors: strings, objects, anything."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection
from torch import Tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike, TensorSpec
from gleanrl.data.specs.geometry import Transform, Unbindable, as_size, blank, concrete, fits, outcome
from gleanrl.devices import as_device
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


class NonTensor(Unbindable, TensorSpec):
    """Anything that tensordict wraps as non-tensor data, of a batch size; in the domain is also what isn't wrapped yet.

    `rand`, `zero` and `one` give the example; `encode` wraps what isn't wrapped yet.

    Args:
        shape: the batch size.
        device: of the wrapper; None: none.
        dtype: what the attribute says; values have none.
        example_data: what drawn values hold.
        batched: whether drawn values are stacks with one wrapper for each position; None: no.
        feature_dims: in other words: how many of the last dimensions one wrapper has; None: all.

    Raises:
        InvalidArgumentError: if both `batched` and `feature_dims` are given.
    """

    domain = None
    space: None = None  # no numbers describe it

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
        """How many of the last dimensions one wrapper has."""
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
        """Return `val` wrapped as non-tensor data; wrapped values are checked and returned as they are."""
        return self.project(val) if is_non_tensor(val) else self._wrapped(val, torch.Size())

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return what the wrapper holds, for stacked data a nested list; checked unless `safe` is False."""
        checked = val if safe is False else self.project(val)
        if not is_non_tensor(checked):
            return checked
        return checked.data if isinstance(checked, NonTensorData) else checked.tolist()

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check that `value` is no tensor or TensorDict; see `TensorSpec.type_check`."""
        if _is_tensor_data(value):
            name = "" if key is None else f" key {key!r}"
            raise InvalidTypeError(f"type_check:{name} expected non-tensor data, got {type(value).__name__}")

    def cardinality(self) -> float:
        """Return infinity."""
        return math.inf

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device; the spec itself where that changes nothing, as a dtype."""
        device = self.device if isinstance(dest, torch.dtype) else as_device(dest)
        return self if device == self.device else self._replaced(device=device)

    def clone(self) -> Self:
        """Return an equal spec; the example is shared."""
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
        """Compare by content, the example and the layout of drawn values included."""
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
    """Return whether two values that aren't tensors of a spec are equal; arrays are, if all elements are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        equal = a == b
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
    except (TypeError, ValueError, RuntimeError):  # of unlike shapes, or not comparable
        return False


def _is_tensor_data(value: Any) -> bool:
    return isinstance(value, Tensor) or (is_tensor_collection(value) and not is_non_tensor(value))
