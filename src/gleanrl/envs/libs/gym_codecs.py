"""How one value of a gymnasium space becomes one leaf of a record, and back.

A codec serves one leaf: `encode` turns what an environment returned into an array of the leaf's shape and
dtype, `decode` turns a row of an action column into what the environment's `step` takes. Both the steppers
and the TensorDict path convert through these objects, so that there is one rule for what is accepted.

The codec of a vector environment (`Codec.batched`) has leaves ``(P, *leaf)``. gymnasium batches values in its own
way: P integers of a Discrete are one array, a Tuple of Boxes is a tuple of batched arrays, a Dict a dict of them.
Codecs of choices stand in `gleanrl.envs.libs.gym_choices`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.data.specs import TensorSpec
from gleanrl.errors import EnvironmentContractError, PolicyError
from gleanrl.rollouts.fitting import advice
from gleanrl.schema import numpy_dtype
from gleanrl.tree import Path, as_key

Array: TypeAlias = np.ndarray[Any, Any]


class Codec(ABC):
    """One leaf: its key, its spec, and the conversions between the space's values and arrays of that spec.

    Leaves that are lists have objects in place of arrays; see `gleanrl.envs.libs.gym_lists`.

    Not thread-safe: a codec remembers the dtype in which its values came first.

    Args:
        key: where the leaf stands; messages name it.
        spec: the leaf's spec, without batch dimensions.
    """

    is_list = False
    """Whether its leaf is a list of objects."""

    def __init__(self, key: Path, spec: TensorSpec) -> None:
        assert spec.dtype is not None
        self.key = key
        self.spec = spec
        self.shape = tuple(spec.shape)
        self.dtype = numpy_dtype(spec.dtype)

    @abstractmethod
    def encode(self, value: Any) -> Array:
        """Return `value` as an array of the leaf's shape and dtype; it may share memory with `value`.

        Raises:
            EnvironmentContractError: naming the key, what was expected and what came.
        """

    @abstractmethod
    def decode(self, row: Array) -> Any:
        """Return what `step` takes for one row of the column; it shares no memory with `row`.

        Raises:
            PolicyError: if the row encodes no action.
        """

    @abstractmethod
    def batched(self, num_envs: int) -> Codec:
        """Return the codec of the values of P environments at once, ``(P, *leaf)``, as gymnasium batches them."""

    @property
    def decodes_to_itself(self) -> bool:
        """Whether `decode` returns any row as it is."""
        return False

    def decode_all(self, column: Array) -> list[Any]:
        """Return what `step` takes for each of the T rows of ``column``, ``(T, *shape)``."""
        return [self.decode(column[t, ...]) for t in range(len(column))]

    def check_action(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Check that an action of this shape and dtype can be decoded.

        Raises:
            PolicyError: naming the key, what was expected and what came.
        """
        if tuple(shape) != self.shape or dtype is not self.spec.dtype:
            raise PolicyError(
                f"action {as_key(self.key)!r}: expected shape {self.shape} {self.spec.dtype}, "
                f"got {tuple(shape)} {dtype}; nothing is cast or broadcast: "
                f"{advice(shape, dtype, self.shape, self.spec.dtype or dtype)}"
            )

    def batched_spec(self, num_envs: int) -> TensorSpec:
        """Return the spec of P environments' leaves."""
        return self.spec.expand((num_envs, *self.shape))

    def fail(self, value: Any, expected: str | None = None) -> EnvironmentContractError:
        """Return the error for a value that isn't one of the space."""
        wanted = expected or f"shape {self.shape} {self.dtype}"
        return EnvironmentContractError(f"key {as_key(self.key)!r} expected {wanted}, got {describe(value)}")


def describe(value: Any) -> str:
    """Return what a value is, for a message: shape and dtype of an array, type and text of anything else."""
    if isinstance(value, (np.ndarray, np.generic)):
        return f"shape {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def as_array(value: Any) -> tuple[Array, bool]:
    """Return `value` as an array, and whether its dtype is one that the environment chose.

    Python numbers and lists have no dtype of their own: they take the declared one.

    Raises:
        ValueError: if the value is no regular array of numbers.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        array, chosen = np.asarray(value), True
    elif isinstance(value, torch.Tensor):
        array, chosen = value.detach().cpu().numpy(), True
    else:
        array, chosen = np.asarray(value), hasattr(value, "__array__")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"dtype {array.dtype} holds no numbers")
    return array, chosen


class ArrayCodec(Codec):
    """Arrays as they are, or shifted by a start: Box, MultiBinary, MultiDiscrete.

    The first array fixes the dtype that is accepted from then on. If it isn't the declared one, values are
    cast to the declared one, with one warning. Any later change of shape or dtype raises.

    Args:
        key: where the leaf stands.
        spec: its spec.
        start: what is subtracted from observations and added to actions, ``shape``; None for nothing.
        action_dtype: the dtype that the environment's `step` gets; None for the spec's.
    """

    def __init__(
        self,
        key: Path,
        spec: TensorSpec,
        start: Array | None = None,
        action_dtype: np.dtype[Any] | None = None,
    ) -> None:
        super().__init__(key, spec)
        self.start = start
        self.action_dtype = action_dtype or self.dtype
        self.accepted: np.dtype[Any] | None = None

    def encode(self, value: Any) -> Array:
        """Return `value` as an array, after checking shape and dtype."""
        if type(value) is not np.ndarray or value.shape != self.shape or value.dtype is not self.accepted:
            value = self._checked(value)
        if self.start is not None:
            value = value - self.start
        return value if value.dtype == self.dtype else value.astype(self.dtype)

    def decode(self, row: Array) -> Array:
        """Return a copy of the row, in the space's dtype."""
        if self.start is not None:
            row = row + self.start
        return np.array(row, self.action_dtype)

    def batched(self, num_envs: int) -> ArrayCodec:
        """Return the codec of arrays ``(P, *shape)``."""
        spec = self.batched_spec(num_envs)
        start = None if self.start is None else np.broadcast_to(self.start, spec.shape)
        return ArrayCodec(self.key, spec, start, self.action_dtype)

    def decode_all(self, column: Array) -> list[Any]:
        """Return the T rows of one copy of the column."""
        copied = self.decode(column)
        return list(copied) if copied.ndim > 1 else [copied[t, ...] for t in range(len(copied))]

    def _checked(self, value: Any) -> Array:
        try:
            array, chosen = as_array(value)
        except ValueError as cause:
            raise self.fail(value) from cause
        if array.shape != self.shape:
            raise self.fail(array, None if self.accepted is None else f"shape {self.shape} {self.accepted}")
        if not chosen:
            return self._typed(array)
        if self.accepted is None:
            self.accepted = array.dtype
            if array.dtype != self.dtype:
                warnings.warn(
                    f"key {as_key(self.key)!r} is declared as {self.dtype}, but the environment returns "
                    f"{array.dtype}; values are cast to {self.dtype}: fix the space or the environment",
                    stacklevel=2,
                )
        elif array.dtype != self.accepted:
            raise self.fail(array, f"shape {self.shape} {self.accepted}")
        return array

    def _typed(self, array: Array) -> Array:
        """Return Python numbers in the declared dtype, if it can hold them."""
        typed = array.astype(self.dtype)
        if self.dtype.kind != "f" and not np.array_equal(typed, array):
            raise self.fail(array.tolist(), f"numbers that {self.dtype} holds")
        return typed


class RewardCodec(Codec):
    """Rewards: anything that is a number, cast to the spec; arrays must have the spec's shape.

    A reward may lack the spec's last dimension of size 1: ``()`` fits ``(1,)``.
    """

    def encode(self, value: Any) -> Array:
        """Return the reward in the spec's shape and dtype."""
        try:
            array, _ = as_array(value)
        except ValueError:
            array = np.asarray(self._number(value))
        if array.shape != self.shape:
            if (*array.shape, 1) != self.shape:
                raise self.fail(value)
            array = array.reshape(self.shape)
        with np.errstate(over="ignore"):  # infinities are looked for once a batch, whatever they came from
            return array.astype(self.dtype)

    def decode(self, row: Array) -> Any:
        """Return the row: nobody passes a reward to an environment."""
        return row.copy()

    def batched(self, num_envs: int) -> RewardCodec:
        """Return the codec of the rewards of P environments."""
        return RewardCodec(self.key, self.batched_spec(num_envs))

    def _number(self, value: Any) -> float:
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            return float(value)
        except (TypeError, ValueError) as cause:
            raise self.fail(value, f"a number for shape {self.shape} {self.dtype}") from cause


class StackCodec(Codec):
    """A tuple of values of one shape and dtype, stacked along a new dimension.

    Args:
        key: where the leaf stands.
        spec: the stacked spec.
        parts: the codec of each element.
        axis: the new dimension: 0, or 1 behind that of the environments.
    """

    def __init__(self, key: Path, spec: TensorSpec, parts: Sequence[Codec], axis: int = 0) -> None:
        super().__init__(key, spec)
        self.parts, self.axis = tuple(parts), axis

    def encode(self, value: Any) -> Array:
        """Return the stacked elements."""
        if not isinstance(value, (tuple, list)) or len(value) != len(self.parts):
            raise self.fail(value, f"a tuple of {len(self.parts)} values")
        return np.stack([part.encode(item) for part, item in zip(self.parts, value, strict=True)], self.axis)

    def decode(self, row: Array) -> Any:
        """Return the elements as a tuple."""
        return tuple(part.decode(_element(row, self.axis, i)) for i, part in enumerate(self.parts))

    def batched(self, num_envs: int) -> StackCodec:
        """Return the codec of a tuple of batched values."""
        parts = [part.batched(num_envs) for part in self.parts]
        return StackCodec(self.key, self.batched_spec(num_envs), parts, self.axis + 1)

    def decode_all(self, column: Array) -> list[Any]:
        """Return T tuples."""
        columns = [part.decode_all(_element(column, self.axis + 1, i)) for i, part in enumerate(self.parts)]
        return list(zip(*columns, strict=True))


def _element(array: Array, axis: int, i: int) -> Array:
    index: Any = (*(slice(None),) * axis, i, ...)
    return array[index]


def as_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool: bools of Python and NumPy, arrays of one bool, and the integers 0 and 1.

    Raises:
        EnvironmentContractError: for anything else; None and text have a truth value too, but not one that was meant.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    array = np.asarray(value) if not isinstance(value, (str, bytes)) and value is not None else None
    if array is not None and array.size == 1 and (array.dtype.kind == "b" or array.dtype.kind in "iu"):
        number = array.item()
        if number in (0, 1):
            return bool(number)
    raise EnvironmentContractError(f"step: {name} expected a bool, got {describe(value)}")


def as_flags(name: str, value: Any, num_envs: int) -> Array:
    """Return the flags of all environments, ``(P,)`` bool: bools or the integers 0 and 1.

    Raises:
        EnvironmentContractError: for anything else.
    """
    if isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (num_envs,):
        return value
    array = np.asarray(value)
    numbers = array.dtype.kind in "iu" and bool(((array == 0) | (array == 1)).all())
    if array.shape != (num_envs,) or not (numbers or array.dtype.kind == "b"):
        raise EnvironmentContractError(f"step: {name} expected {num_envs} bools, got {describe(value)}")
    return array.astype(np.bool_)
