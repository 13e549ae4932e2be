"""The contract that every spec keeps: describe a domain of values, draw from it, check against it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import resolve_name
from typing_extensions import Self

from gleanrl.data.specs.geometry import Geometry
from gleanrl.data.specs.spaces import lost_change
from gleanrl.errors import InvalidTypeError, SpecError, UnsupportedError

DeviceLike = torch.device | str | int

# torch functions that accept specs, by torch's names of arguments; `stacks` adds its own, as the contract can't
# import those who keep it
TORCH_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.index_select: lambda input, dim, index: input.index_select(dim, index),
    torch.squeeze: lambda input, dim=None: input.squeeze(dim),
    torch.unsqueeze: lambda input, dim: input.unsqueeze(dim),
}


def stack(specs: Sequence[TensorSpec], dim: int) -> Any:
    """Return `torch.stack(specs, dim)`."""
    return TORCH_FUNCTIONS[torch.stack](specs, dim)


def as_lead(shape: Iterable[int] | None) -> torch.Size:
    """Return the dimensions that come before a spec's own; None means none.

    Raises:
        InvalidTypeError: if they aren't a sequence of integers.
    """
    # Composites hand their leading dimensions on to every entry, at every step of a random policy
    if type(shape) is torch.Size:
        return shape
    if shape is None:
        return torch.Size()
    try:
        return torch.Size(tuple(shape))
    except TypeError as error:
        raise InvalidTypeError(f"shape: expected a sequence of integers, got {shape!r}") from error


MOST_ROWS = 2**20
"""The most values that `enumerate` gives."""
_MOST_ELEMENTS = 2**28


def require_listable(count: int, width: int = 1) -> None:
    """Check that so many values of so many elements each can be listed.

    Raises:
        UnsupportedError: if that would take too much memory; the message gives the count.
    """
    if count > MOST_ROWS or count * width > _MOST_ELEMENTS:
        raise UnsupportedError(
            f"enumerate: expected at most {MOST_ROWS:,} values with {_MOST_ELEMENTS:,} elements together, got "
            f"{count:,} values of {width:,} elements; enumerate parts of the spec, or draw values with rand()"
        )


def combinations(values: Sequence[Any]) -> list[Any]:
    """Return several stacks of values so that their rows are all combinations; the last one changes fastest."""
    if not values:
        return []
    require_listable(math.prod(map(len, values)), len(values))
    picks = torch.cartesian_prod(*(torch.arange(len(each)) for each in values)).reshape(-1, len(values))
    return [each[pick] for each, pick in zip(values, picks.unbind(-1), strict=True)]


def check_in(where: str, spec: TensorSpec, value: Any) -> None:
    """Check that `value` is in the domain of `spec`; the message names the call, `where`.

    Raises:
        SpecError: if it isn't.
    """
    fault = spec._fault(value)
    if fault is not None:
        raise SpecError(f"{where}: {fault}")


class TensorSpec(Geometry):
    """A domain of values: their shape, dtype and device, and which values are in it.

    A value fits a spec if its trailing dimensions are the spec's `shape`; any number of dimensions may stand
    before them. The device of a value isn't part of the domain. Specs compare by content and aren't hashable.

    Attributes:
        shape: the shape of one value; any size fits where it is -1, and values that the spec makes have size 1 there.
        dtype: the dtype of the values; None where they have none (composites, non-tensors).
        device: where values are made; None where that isn't fixed (composites, non-tensors).
        domain: "continuous" or "discrete", "composite" for composites, None for non-tensors, choices, and stacks whose
            members differ in it.
    """

    dtype: torch.dtype | None
    device: torch.device | None
    domain: str | None
    __hash__ = None  # type: ignore[assignment]
    # Whether this is a part of another spec, in a copy: a change would not reach that one, hence raises
    is_part = False

    def as_part(self) -> Self:
        """Return this spec, which was made for that, as a part of another one that refuses changes."""
        self.is_part = True
        return self

    def as_entry(self) -> Self:
        """Return this spec as an entry of a composite: one that can be changed, with values of its shape."""
        return self.clone() if self.is_part else self

    def require_own(self, change: str) -> None:
        """Check that a change of this spec wouldn't be lost.

        Raises:
            UnsupportedError: if it is a copy of a part of another spec.
        """
        if self.is_part:
            raise lost_change(change)

    @abstractmethod
    def _rand(self, lead: torch.Size, generator: torch.Generator | None) -> Any:
        """Draw values of shape `(*lead, *self.shape)`."""

    @abstractmethod
    def _filled(self, lead: torch.Size, number: int) -> Any:
        """Return values of shape `(*lead, *self.shape)` that hold a number only, 0 or 1."""

    @abstractmethod
    def _misfit(self, value: Any) -> str | None:
        """Return why `value` can't have the shape of this spec ("expected ..., got ..."), or None."""

    @abstractmethod
    def _fault(self, value: Any) -> str | None:
        """Return why `value` isn't in the domain ("expected ..., got ..."), or None if it is."""

    @abstractmethod
    def _projected(self, value: Any) -> Any:
        """Return a value in the domain near `value`, which is outside but has the right shape."""

    @abstractmethod
    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return what an environment gave (numpy, a number, a list, a tensor) as a value of this spec.

        Args:
            val: what the environment gave.
            ignore_device: leave the result where the input was, to be moved with others.
        """

    @abstractmethod
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return a value of this spec in the form that an environment takes.

        Args:
            val: `(*lead, *self.shape)`.
            safe: whether to check the domain; None: discrete specs do, continuous ones don't.

        Raises:
            SchemaError: if the shape doesn't fit.
            SpecError: if the domain is checked and the value is outside.
        """

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
        """Return the number of values that `enumerate` gives; infinity for continuous specs."""

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return the values of a discrete spec, stacked along a new first dimension.

        The choices of a batch of specs are made together: all elements choose the first, all choose the second, ...

        Args:
            use_mask: leave out what a mask forbids.

        Raises:
            UnsupportedError: if the domain isn't finite, or has more than `MOST_ROWS` values.
        """
        raise UnsupportedError(f"enumerate: {self!r} has infinitely many values")

    @abstractmethod
    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """Return the spec for another device or dtype; the spec itself where that changes nothing.

        Raises:
            InvalidTypeError: if `dest` is a dtype and the values have none (composites, non-tensors).
        """

    @abstractmethod
    def clone(self) -> Self:
        """Return an equal spec that shares nothing with this one."""

    def rand(self, shape: Iterable[int] | None = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values from the domain.

        Args:
            shape: dimensions that come before the spec's own.
            generator: where the randomness comes from; None: torch's global generator.

        Returns:
            values of shape `(*shape, *self.shape)`: tensors; TensorDicts of composites, without the entries that are
            None (lazy stacks where the members of a stack differ in keys or shapes); the example of non-tensors.

        Raises:
            UnsupportedError: if leaves of different shapes would have to become one tensor.
        """
        return self._rand(as_lead(shape), generator)

    def sample(self, shape: Iterable[int] | None = (), *, generator: torch.Generator | None = None) -> Any:
        """Draw values from the domain; the same as `rand`."""
        return self.rand(shape, generator=generator)

    def zero(self, shape: Iterable[int] | None = ()) -> Any:
        """Return zeros of shape `(*shape, *self.shape)`, be they in the domain or not."""
        return self._filled(as_lead(shape), 0)

    def zeros(self, shape: Iterable[int] | None = ()) -> Any:
        """Return zeros; the same as `zero`."""
        return self.zero(shape)

    def one(self, shape: Iterable[int] | None = ()) -> Any:
        """Return ones of shape `(*shape, *self.shape)`, be they in the domain or not."""
        return self._filled(as_lead(shape), 1)

    def ones(self, shape: Iterable[int] | None = ()) -> Any:
        """Return ones; the same as `one`."""
        return self.one(shape)

    def project(self, val: Any) -> Any:
        """Return `val` itself if it is in the domain, otherwise a close value that is.

        Tensors stay as they are, and a new one is returned; in a TensorDict entries are replaced.

        Raises:
            SpecError: if nothing in the domain is close: a wrong type or shape, a missing key, or a NaN.
        """
        if self._fault(val) is None:
            return val
        misfit = self._misfit(val)
        if misfit is not None:
            raise SpecError(f"project: {misfit}")
        return self._projected(val)

    def is_in(self, val: Any) -> bool:
        """Return whether `val`, with all its leading dimensions, is in the domain."""
        return self._fault(val) is None

    def contains(self, item: Any) -> bool:
        """Return whether `item` is in the domain; the same as `is_in`."""
        return self._fault(item) is None

    def assert_is_in(self, value: Any) -> None:
        """Check that `value` is in the domain.

        Raises:
            SpecError: if it isn't; the message says what was expected and what came.
        """
        check_in("assert_is_in", self, value)

    def clear_device_(self) -> Self:
        """Forget the device of a composite; a spec of tensors has one always.

        Returns:
            the spec itself.
        """
        return self

    def memoize_encode(self, mode: bool = True) -> None:
        """Accept what other releases need for speed: here `encode` has nothing to remember."""

    def erase_memoize_cache(self) -> None:
        """Forget what `memoize_encode` remembered: nothing."""

    def cpu(self) -> Self:
        """Return the spec for the CPU."""
        return self.to("cpu")

    def cuda(self, device: DeviceLike | None = None) -> Self:
        """Return the spec for a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else device)

    def __bool__(self) -> bool:
        """Return True: a spec is never empty in the sense of `if spec:`."""
        return True

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve the torch functions that make sense for specs, those of `TORCH_FUNCTIONS`.

        Raises:
            InvalidTypeError: for any other.
        """
        if function not in TORCH_FUNCTIONS:
            served = ", ".join(sorted(f"torch.{each.__name__}" for each in TORCH_FUNCTIONS))
            raise InvalidTypeError(
                f"{resolve_name(function) or function}: specs aren't tensors; expected one of {served}, or a method of "
                "the spec"
            )
        return TORCH_FUNCTIONS[function](*args, **(kwargs or {}))
