"""The contract that every spec keeps: describe a domain of values, draw from it, check against it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from typing_extensions import Self

from gleanrl.data.specs.geometry import Geometry
from gleanrl.errors import InvalidTypeError, SpecError

DeviceLike = torch.device | str | int

# torch functions that accept specs; `stacking` fills this in, as the contract can't import those who keep it
TORCH_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


def make_device(device: DeviceLike | None) -> torch.device | None:
    """Return `device` as a `torch.device`, a CUDA device always with its number."""
    if device is None:
        return None
    made = torch.device(device)
    if made.type == "cuda" and made.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return made


def stack(specs: Sequence[TensorSpec], dim: int) -> Any:
    """Return `torch.stack(specs, dim)`."""
    return TORCH_FUNCTIONS[torch.stack](specs, dim)


def as_lead(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the dimensions that come before a spec's own as a tuple.

    Raises:
        InvalidTypeError: if they aren't a sequence.
    """
    try:
        return tuple(shape)
    except TypeError as error:
        raise InvalidTypeError(f"shape: expected a sequence of integers, got {shape!r}") from error


class TensorSpec(Geometry):
    """A domain of values: their shape, dtype and device, and which values are in it.

    A value fits a spec if its trailing dimensions are the spec's `shape`; any number of dimensions may stand
    before them. The device of a value isn't part of the domain. Specs compare by content and aren't hashable.

    Attributes:
        shape: the shape of one value.
        dtype: the dtype of the values; None where they have none (composites, non-tensors).
        device: where drawn values are made; None means torch's default device.
    """

    dtype: torch.dtype | None
    device: torch.device | None
    __hash__ = None  # type: ignore[assignment]

    @abstractmethod
    def rand(self, shape: Iterable[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values from the domain.

        Args:
            shape: dimensions that come before the spec's own.
            generator: where the randomness comes from; None: torch's global generator.

        Returns:
            values of shape `(*shape, *self.shape)`.
        """

    @abstractmethod
    def zero(self, shape: Iterable[int] = ()) -> Any:
        """Return zeros of shape `(*shape, *self.shape)`, be they in the domain or not."""

    @abstractmethod
    def one(self, shape: Iterable[int] = ()) -> Any:
        """Return ones of shape `(*shape, *self.shape)`, be they in the domain or not."""

    @abstractmethod
    def project(self, value: Any) -> Any:
        """Return `value` itself if it is in the domain, otherwise a close new value that is.

        Raises:
            SpecError: if nothing in the domain is close: a wrong type or shape, or a NaN.
        """

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """Return what an environment gave (numpy, a number, a list, a tensor) as a value of this spec."""

    @abstractmethod
    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return a value of this spec in the form that an environment takes."""

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtype of a value and nothing else.

        Args:
            value: what to check.
            key: the name of the value, for the message.

        Raises:
            InvalidTypeError: if the dtype isn't the spec's.
        """

    @abstractmethod
    def cardinality(self) -> int | float:
        """Return the number of values in the domain; infinity for continuous ones."""

    @abstractmethod
    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device or dtype; the spec itself where that changes nothing."""

    @abstractmethod
    def clone(self) -> Self:
        """Return an equal spec that shares nothing with this one."""

    @abstractmethod
    def _fault(self, value: Any) -> str | None:
        """Return why `value` isn't in the domain ("expected ..., got ..."), or None if it is."""

    def is_in(self, value: Any) -> bool:
        """Return whether `value`, with all its leading dimensions, is in the domain."""
        return self._fault(value) is None

    def contains(self, value: Any) -> bool:
        """Return whether `value` is in the domain; the same as `is_in`."""
        return self._fault(value) is None

    def assert_is_in(self, value: Any) -> None:
        """Check that `value` is in the domain.

        Raises:
            SpecError: if it isn't; the message says what was expected and what came.
        """
        fault = self._fault(value)
        if fault is not None:
            raise SpecError(f"assert_is_in: {fault}")

    def sample(self, shape: Iterable[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values from the domain; the same as `rand`."""
        return self.rand(shape, generator=generator)

    def zeros(self, shape: Iterable[int] = ()) -> Any:
        """Return zeros; the same as `zero`."""
        return self.zero(shape)

    def ones(self, shape: Iterable[int] = ()) -> Any:
        """Return ones; the same as `one`."""
        return self.one(shape)

    def cpu(self) -> Self:
        """Return the spec for the CPU."""
        return self.to("cpu")

    def cuda(self, device: DeviceLike | None = None) -> Self:
        """Return the spec for a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else device)

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of the values that `value[index]` would give."""
        return self._indexed(index)

    def __bool__(self) -> bool:
        """Return True: a spec is never empty in the sense of `if spec:`."""
        return True

    def _full(self, shape: Iterable[int]) -> torch.Size:
        """Return `(*shape, *self.shape)`."""
        try:
            return torch.Size((*shape, *self.shape))
        except TypeError as error:
            raise InvalidTypeError(f"shape: expected a sequence of integers, got {shape!r}") from error

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve the torch functions that make sense for specs (`torch.stack`)."""
        if function not in TORCH_FUNCTIONS:
            return NotImplemented
        return TORCH_FUNCTIONS[function](*args, **(kwargs or {}))
