"""How one value of a gymnasium space becomes one leaf of a record, and back.

A codec serves one leaf: `encode` turns what an environment returned into an array of the leaf's shape and
dtype, `decode` turns a row of an action column into what the environment's `step` takes. Both the steppers
and the TensorDict path convert through these objects, so that there is one rule for what is accepted.
"""

from __future__ import annotations

import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.block import numpy_dtype
from gleanrl.data.specs import TensorSpec
from gleanrl.errors import EnvironmentContractError, PolicyError
from gleanrl.tree import Path, as_key

Array: TypeAlias = np.ndarray[Any, Any]


class Codec(ABC):
    """One leaf: its key, its spec, and the conversions between the space's values and arrays of that spec.

    Not thread-safe: a codec remembers the dtype in which its values came first.

    Args:
        key: where the leaf stands; messages name it.
        spec: the leaf's spec, without batch dimensions.
    """

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
                "make the policy's output match the action spec"
            )

    def _fail(self, value: Any, expected: str | None = None) -> EnvironmentContractError:
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

    def decode_all(self, column: Array) -> list[Any]:
        """Return the T rows of one copy of the column."""
        copied = self.decode(column)
        return list(copied) if copied.ndim > 1 else [copied[t, ...] for t in range(len(copied))]

    def _checked(self, value: Any) -> Array:
        try:
            array, chosen = as_array(value)
        except ValueError as cause:
            raise self._fail(value) from cause
        if array.shape != self.shape:
            raise self._fail(array, None if self.accepted is None else f"shape {self.shape} {self.accepted}")
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
            raise self._fail(array, f"shape {self.shape} {self.accepted}")
        return array

    def _typed(self, array: Array) -> Array:
        """Return Python numbers in the declared dtype, if it can hold them."""
        typed = array.astype(self.dtype)
        if self.dtype.kind != "f" and not np.array_equal(typed, array):
            raise self._fail(array.tolist(), f"numbers that {self.dtype} holds")
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
                raise self._fail(value)
            array = array.reshape(self.shape)
        with np.errstate(over="ignore"):  # infinities are looked for once a batch, whatever they came from
            return array.astype(self.dtype)

    def decode(self, row: Array) -> Any:
        """Return the row: nobody passes a reward to an environment."""
        return row.copy()

    def _number(self, value: Any) -> float:
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            return float(value)
        except (TypeError, ValueError) as cause:
            raise self._fail(value, f"a number for shape {self.shape} {self.dtype}") from cause


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


class CategoricalCodec(Codec):
    """One of n integers from `start`, as an integer from 0.

    Args:
        key: where the leaf stands.
        spec: a Categorical spec of shape ``()``.
        n: the number of choices.
        start: the smallest of the space's integers.
        dtype: the space's dtype, which the environment's `step` gets.
    """

    def __init__(self, key: Path, spec: TensorSpec, n: int, start: int, dtype: np.dtype[Any]) -> None:
        super().__init__(key, spec)
        self.n, self.start, self.action_dtype = n, start, dtype

    def encode(self, value: Any) -> Array:
        """Return the choice, counted from 0."""
        return np.asarray(self._choice(value), self.dtype)

    def decode(self, row: Array) -> Any:
        """Return a scalar of the space's dtype; numbers outside the space are passed on."""
        return self.action_dtype.type(int(row) + self.start)

    def decode_all(self, column: Array) -> list[Any]:
        """Return T scalars of the space's dtype."""
        return list((column + self.start).astype(self.action_dtype))

    def _choice(self, value: Any) -> int:
        try:
            choice = operator.index(value) - self.start
        except TypeError as cause:
            raise self._fail(value, self._domain()) from cause
        if not 0 <= choice < self.n:
            raise self._fail(value, self._domain())
        return choice

    def _domain(self) -> str:
        return f"an integer from {self.start} to {self.start + self.n - 1}"


class OneHotCodec(CategoricalCodec):
    """One of n integers from `start`, as a vector with a single one; arguments as in `CategoricalCodec`."""

    @cached_property
    def _choices(self) -> list[Any]:
        # NumPy scalars: gymnasium checks them faster than Python integers, and its spaces sample them.
        return list(np.arange(self.start, self.start + self.n).astype(self.action_dtype))

    def encode(self, value: Any) -> Array:
        """Return the choice as a one-hot vector."""
        row = np.zeros(self.shape, self.dtype)
        row[self._choice(value)] = 1
        return row

    def decode(self, row: Array) -> Any:
        """Return a scalar of the space's dtype."""
        values = row.tolist()
        try:
            if values.count(0) == self.n - 1:
                return self._choices[values.index(1)]
        except ValueError:  # the one value that isn't 0 isn't 1 either
            pass
        raise no_choice(self.key, row)

    def decode_all(self, column: Array) -> list[Any]:
        """Return T scalars of the space's dtype."""
        choices = one_hot_choices(column)
        if choices is None:
            raise no_choice(self.key, column)
        return list((choices + self.start).astype(self.action_dtype, copy=False))


class MultiOneHotCodec(Codec):
    """Several choices, each as a one-hot vector, one behind the other.

    Args:
        key: where the leaf stands.
        spec: a MultiOneHot spec.
        nvec: the number of choices of each.
        start: the smallest integer of each.
        dtype: the space's dtype, which the environment's `step` gets.
    """

    def __init__(self, key: Path, spec: TensorSpec, nvec: Array, start: Array, dtype: np.dtype[Any]) -> None:
        super().__init__(key, spec)
        self.nvec, self.start, self.action_dtype = nvec.astype(np.int64), start.astype(np.int64), dtype
        self._ends = np.cumsum(self.nvec)

    def encode(self, value: Any) -> Array:
        """Return the choices as one row of zeros and ones."""
        expected = (
            f"{len(self.nvec)} integers from {self.start.tolist()}, of {self.nvec.tolist()} values each"
        )
        try:
            array, _ = as_array(value)
        except ValueError as cause:
            raise self._fail(value, expected) from cause
        if array.shape != self.nvec.shape or array.dtype.kind not in "biu":
            raise self._fail(value, expected)
        choices = array.astype(np.int64) - self.start
        if ((choices < 0) | (choices >= self.nvec)).any():
            raise self._fail(array.tolist(), expected)
        row = np.zeros(self.shape, self.dtype)
        row[self._ends - self.nvec + choices] = 1
        return row

    def decode(self, row: Array) -> Any:
        """Return an array of the space's dtype, one integer for each choice."""
        return self.decode_all(row[None])[0]

    def decode_all(self, column: Array) -> list[Any]:
        """Return T arrays of the space's dtype."""
        picked = [one_hot_choices(part) for part in np.split(column, self._ends[:-1], axis=-1)]
        if any(part is None for part in picked):
            raise no_choice(self.key, column)
        return list(
            (np.stack([p for p in picked if p is not None], -1) + self.start).astype(self.action_dtype)
        )


class StackCodec(Codec):
    """A tuple of values of one shape and dtype, stacked along a new first dimension.

    Args:
        key: where the leaf stands.
        spec: the stacked spec.
        parts: the codec of each element.
    """

    def __init__(self, key: Path, spec: TensorSpec, parts: Sequence[Codec]) -> None:
        super().__init__(key, spec)
        self.parts = tuple(parts)

    def encode(self, value: Any) -> Array:
        """Return the stacked elements."""
        if not isinstance(value, (tuple, list)) or len(value) != len(self.parts):
            raise self._fail(value, f"a tuple of {len(self.parts)} values")
        return np.stack([part.encode(item) for part, item in zip(self.parts, value, strict=True)])

    def decode(self, row: Array) -> Any:
        """Return the elements as a tuple."""
        return tuple(part.decode(row[i, ...]) for i, part in enumerate(self.parts))

    def decode_all(self, column: Array) -> list[Any]:
        """Return T tuples."""
        columns = [part.decode_all(column[:, i]) for i, part in enumerate(self.parts)]
        return list(zip(*columns, strict=True))


def one_hot_choices(column: Array) -> Array | None:
    """Return the positions of the ones in ``(T, n)``, ``(T,)`` int64; None if any row isn't one-hot."""
    choices = column.argmax(-1)
    # A 1 in every row and as many numbers that aren't 0 as rows: a single 1 in each.
    if np.count_nonzero(column) != len(column) or (column[np.arange(len(column)), choices] != 1).any():
        return None
    return choices


def no_choice(key: Path, rows: Array) -> PolicyError:
    """Return the error for rows that should be one-hot and aren't."""
    shown = np.array2string(rows, threshold=16)
    return PolicyError(
        f"action {as_key(key)!r}: expected one-hot vectors (a single 1 among zeros), got {shown}"
    )
