"""Values that aren't tensors: strings, objects, anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, is_non_tensor
from typing_extensions import Self

from gleanrl.data.specs.base import DeviceLike, TensorSpec, make_device
from gleanrl.data.specs.geometry import Transform, Unbindable, as_size, shape_after
from gleanrl.errors import InvalidTypeError


class NonTensor(Unbindable, TensorSpec):
    """Anything that tensordict wraps as non-tensor data, of a batch size.

    `rand`, `zero` and `one` give the example; `encode` wraps what isn't wrapped yet.

    Args:
        shape: the batch size.
        device: of the wrapper; None: none.
        example_data: what drawn values hold.
    """

    dtype = None

    def __init__(
        self, shape: Sequence[int] | int = (), device: DeviceLike | None = None, example_data: Any = None
    ) -> None:
        self.shape = as_size((shape,))
        self.device = make_device(device)
        self.example_data = example_data

    @property
    def batch_ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> NonTensorData:
        return self._wrapped(self.example_data, lead)

    def _filled(self, lead: torch.Size, number: int) -> NonTensorData:
        return self._wrapped(self.example_data, lead)

    def _wrapped(self, data: Any, lead: torch.Size) -> NonTensorData:
        return NonTensorData(data, batch_size=(*lead, *self.shape), device=self.device)

    def _projected(self, value: Any) -> Any:
        return value

    def encode(self, value: Any) -> Any:
        """Return `value` wrapped as non-tensor data; wrapped values are checked and returned as they are."""
        return self.project(value) if is_non_tensor(value) else self._wrapped(value, torch.Size())

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return what the wrapper holds, for stacked data a nested list; checked unless `safe` is False."""
        wrapped = value if safe is False else self.project(value)
        return wrapped.data if isinstance(wrapped, NonTensorData) else wrapped.tolist()

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check that `value` is non-tensor data; see `TensorSpec.type_check`."""
        if not is_non_tensor(value):
            name = "" if key is None else f" key {key!r}"
            raise InvalidTypeError(f"type_check:{name} expected non-tensor data, got {type(value).__name__}")

    def cardinality(self) -> float:
        """Return infinity."""
        return math.inf

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device; the spec itself where that changes nothing."""
        if isinstance(dest, torch.dtype):
            raise InvalidTypeError(f"to: non-tensor data has no dtype, got {dest}")
        device = make_device(dest)
        return self if device == self.device else type(self)(self.shape, device, self.example_data)

    def clone(self) -> Self:
        """Return an equal spec; the example is shared."""
        return type(self)(self.shape, self.device, self.example_data)

    def _reshaped(self, transform: Transform) -> Self:
        return type(self)(shape_after(transform, self.shape), self.device, self.example_data)

    def _misfit(self, value: Any) -> str | None:
        return self._fault(value)

    def _fault(self, value: Any) -> str | None:
        if not is_non_tensor(value):
            return f"expected {self!r}, got {type(value).__name__}"
        shape = value.batch_size
        if shape[len(shape) - self.ndim :] != self.shape:
            return f"expected {self!r}, got batch size {tuple(shape)}"
        return None

    def __eq__(self, other: object) -> bool:
        """Compare shape and device; the example isn't part of the domain."""
        if not isinstance(other, NonTensor):
            return NotImplemented
        return (self.shape, self.device) == (other.shape, other.device)

    def __repr__(self) -> str:
        """Return shape and device."""
        device = "" if self.device is None else f", device={str(self.device)!r}"
        return f"NonTensor(shape={tuple(self.shape)}{device})"
