"""Codecs: conversions between values of gymnasium spaces and arrays of one leaf.

`Codec.encode` turns a value that an environment returned into an array of the leaf's shape and dtype. `Codec.decode`
turns a row of an action column into the argument of the environment's `step`. The steppers and the TensorDict methods
use the same codecs, so both accept the same values.

The codec of a vector environment (`Codec.batched`) has leaves ``(P, *leaf)``. gymnasium batches each space in its own
way: P integers of a Discrete are one array, a Tuple of Boxes is a tuple of batched arrays, a Dict is a dict of them.

Choices (Discrete, MultiDiscrete) become integers from 0 or one-hot vectors. The codecs for one choice of one
environment compute with Python numbers, several times as fast as NumPy on a single number. The codecs for P
environments compute with arrays. `MultiOneHotCodec` serves both.

Spaces without a single fixed shape (text, sequences, graphs, tuples of different elements) have list leaves, see
`gleanrl._arrays.ragged`. There `encode` returns the object of one record instead of an array.
"""

from __future__ import annotations

import math
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl._arrays.native import positions_of_ones
from gleanrl._arrays.schema import numpy_dtype
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._rollout.row_writers import advice
from gleanrl.data.specs import NonTensor, TensorSpec
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.errors import EnvironmentContractError, PolicyError, SpaceError

Array: TypeAlias = np.ndarray[Any, Any]


class Codec(ABC):
    """One leaf: its key, its spec, and the conversions between values of the space and arrays of the spec.

    List leaves (see `ListCodec`) convert to objects instead of arrays.

    Not thread-safe: a codec stores the dtype of its first value.

    Args:
        key: path of the leaf; error messages name it.
        spec: the leaf's spec, without batch dimensions.
    """

    is_list = False
    """Whether the leaf is a list of objects."""

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
            EnvironmentContractError: if it doesn't fit. The message names the key, the expected and the actual value.
        """

    @abstractmethod
    def decode(self, row: Array) -> Any:
        """Return the argument of `step` for one row of the column; it shares no memory with `row`.

        One-hot codecs write into `row` if it holds several ones; see `one_hot_choices`.

        Raises:
            PolicyError: if the row encodes no action.
        """

    @abstractmethod
    def batched(self, num_envs: int) -> Codec:
        """Return the codec for the values of P environments, ``(P, *leaf)``, in gymnasium's batched form."""

    @property
    def decodes_to_itself(self) -> bool:
        """Whether `decode` returns every row unchanged."""
        return False

    def decode_all(self, column: Array) -> list[Any]:
        """Return the argument of `step` for each of the T rows of ``column``, ``(T, *shape)``."""
        return [self.decode(column[t, ...]) for t in range(len(column))]

    def check_action(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Check that an action of this shape and dtype can be decoded.

        Raises:
            PolicyError: if not. The message names the key, the expected and the actual shape and dtype.
        """
        if tuple(shape) != self.shape or dtype is not self.spec.dtype:
            raise PolicyError(
                f"action {as_key(self.key)!r}: expected shape {self.shape} {self.spec.dtype}, "
                f"got {tuple(shape)} {dtype}; nothing is cast or broadcast: "
                f"{advice(shape, dtype, self.shape, self.spec.dtype or dtype)}"
            )

    def batched_spec(self, num_envs: int) -> TensorSpec:
        """Return the spec of the leaves of P environments, ``(P, *leaf)``."""
        return self.spec.expand((num_envs, *self.shape))

    def fail(self, value: Any, expected: str | None = None) -> EnvironmentContractError:
        """Return the error for a value that isn't in the space; the caller raises it."""
        wanted = expected or f"shape {self.shape} {self.dtype}"
        return EnvironmentContractError(f"key {as_key(self.key)!r} expected {wanted}, got {describe(value)}")


def describe(value: Any) -> str:
    """Return a description of `value` for a message: shape and dtype of an array, else type and text."""
    if isinstance(value, (np.ndarray, np.generic)):
        return f"shape {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def as_array(value: Any) -> tuple[Array, bool]:
    """Return `value` as an array, and whether the environment chose its dtype.

    Python numbers and lists have no dtype, so that they take the declared one.

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
    """Arrays, unchanged or shifted by a start: Box, MultiBinary, MultiDiscrete.

    The first array fixes the accepted dtype. If it differs from the declared dtype, all values are cast, with one
    warning. Any later change of shape or dtype is an error.

    Args:
        key: path of the leaf.
        spec: its spec.
        start: array of shape ``shape``, subtracted from observations and added to actions; None for no shift.
        action_dtype: dtype of the argument of the environment's `step`; None for the spec's dtype.
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
        """Return `value` as an array, after a check of its shape and dtype."""
        if type(value) is not np.ndarray or value.shape != self.shape or value.dtype is not self.accepted:
            value = self._checked(value)
        if self.start is not None:
            value = value - self.start
        return value if value.dtype == self.dtype else value.astype(self.dtype)

    def decode(self, row: Array) -> Array:
        """Return a copy of the row in the dtype of the space."""
        if self.start is not None:
            row = row + self.start
        return np.array(row, self.action_dtype)

    def batched(self, num_envs: int) -> ArrayCodec:
        """Return the codec for arrays ``(P, *shape)``."""
        spec = self.batched_spec(num_envs)
        start = None if self.start is None else np.broadcast_to(self.start, spec.shape)
        return ArrayCodec(self.key, spec, start, self.action_dtype)

    def decode_all(self, column: Array) -> list[Any]:
        """Copy the column once and return its T rows."""
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
        """Convert Python numbers to the declared dtype; raise if the dtype can't hold them exactly."""
        typed = array.astype(self.dtype)
        if self.dtype.kind != "f" and not np.array_equal(typed, array):
            raise self.fail(array.tolist(), f"numbers that {self.dtype} holds")
        return typed


class RewardCodec(Codec):
    """Rewards: any number, cast to the spec's dtype. Arrays must have the spec's shape.

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
        with np.errstate(over="ignore"):  # a whole-batch check finds infinities of any origin
            return array.astype(self.dtype)

    def decode(self, row: Array) -> Any:
        """Return a copy of the row; required by the base class, although rewards are never decoded."""
        return row.copy()

    def batched(self, num_envs: int) -> RewardCodec:
        """Return the codec for the rewards of P environments."""
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
        key: path of the leaf.
        spec: the stacked spec.
        parts: the codec of each element.
        axis: index of the new dimension: 0, or 1 after the dimension of the environments.
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
        """Return the codec for a tuple of batched values."""
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
    """Return `value` as a bool.

    Accepted are bools of Python and NumPy, arrays of one bool, and the integers 0 and 1.

    Raises:
        EnvironmentContractError: for anything else. None and text have a truth value, too, but are likely mistakes.
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
    """Return the flags of P environments, ``(P,)`` bool, from bools or the integers 0 and 1.

    An array that has this form already is returned itself.

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


class CategoricalCodec(Codec):
    """One of n integers from `start`, converted to an integer from 0.

    Args:
        key: path of the leaf.
        spec: a Categorical spec of shape ``()``.
        n: the number of choices.
        start: the smallest integer of the space.
        dtype: the dtype of the space, in which the environment's `step` gets the choice.
    """

    def __init__(self, key: Path, spec: TensorSpec, n: int, start: int, dtype: np.dtype[Any]) -> None:
        super().__init__(key, spec)
        self.n, self.start, self.action_dtype = n, start, dtype

    @property
    def decodes_to_itself(self) -> bool:
        """Whether an integer decodes to itself."""
        return not self.shape and self.start == 0 and self.action_dtype == self.dtype

    def encode(self, value: Any) -> Array:
        """Return the choice as an integer from 0."""
        return np.asarray(self._choice(value), self.dtype)

    def decode(self, row: Array) -> Any:
        """Return a scalar of the space's dtype. Numbers outside the space are passed on unchecked."""
        return self.action_dtype.type(int(row) + self.start)

    def decode_all(self, column: Array) -> list[Any]:
        """Return T scalars of the space's dtype."""
        return list((column + self.start).astype(self.action_dtype))

    def batched(self, num_envs: int) -> BatchedCategoricalCodec:
        """Return the codec for P integers."""
        return BatchedCategoricalCodec(self, self.batched_spec(num_envs))

    def _choice(self, value: Any) -> int:
        try:
            choice = operator.index(value) - self.start
        except TypeError as cause:
            raise self.fail(value, self._domain()) from cause
        if not 0 <= choice < self.n:
            raise self.fail(value, self._domain())
        return choice

    def _domain(self) -> str:
        return f"an integer from {self.start} to {self.start + self.n - 1}"


class OneHotCodec(CategoricalCodec):
    """One of n integers from `start`, converted to a one-hot vector; arguments as for `CategoricalCodec`."""

    @cached_property
    def _choices(self) -> list[Any]:
        # NumPy scalars, as gymnasium's spaces sample them; gymnasium checks these faster than Python integers.
        return list(np.arange(self.start, self.start + self.n).astype(self.action_dtype))

    def batched(self, num_envs: int) -> BatchedOneHotCodec:
        """Return the codec for P one-hot vectors."""
        return BatchedOneHotCodec(self, self.batched_spec(num_envs))

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
        except ValueError:  # the only nonzero value isn't 1
            pass
        choices = one_hot_choices(row[None])
        if choices is None:
            raise no_choice(self.key, row)
        return self._choices[choices[0]]

    def decode_all(self, column: Array) -> list[Any]:
        """Return T scalars of the space's dtype."""
        choices: Any = positions_of_ones(column)
        if choices is None:
            choices = one_hot_choices(column)
        if choices is None:
            raise no_choice(self.key, column)
        known = self._choices
        return [known[choice] for choice in choices]


class BatchedCategoricalCodec(Codec):
    """P integers from a start, converted to integers from 0.

    Args:
        one: the codec of one environment.
        spec: the spec of all environments, ``(P, *leaf)``.
    """

    def __init__(self, one: CategoricalCodec | BatchedCategoricalCodec, spec: TensorSpec) -> None:
        super().__init__(one.key, spec)
        self.n: int = one.n
        self.start: int = one.start
        self.action_dtype: np.dtype[Any] = one.action_dtype
        self._batch = self.shape[: spec.batch_ndim]

    def encode(self, value: Any) -> Array:
        """Return the choices as integers from 0."""
        return self._choices(value).astype(self.dtype)

    def decode(self, row: Array) -> Array:
        """Return integers of the space's dtype. Numbers outside the space are passed on unchecked."""
        return (row + self.start).astype(self.action_dtype)

    def decode_all(self, column: Array) -> list[Any]:
        """Return the argument of `step` for each of the T rows of ``(T, P)``."""
        return list(self.decode(column))

    def batched(self, num_envs: int) -> BatchedCategoricalCodec:
        """Return the codec for `num_envs` such batches."""
        return type(self)(self, self.batched_spec(num_envs))

    def _choices(self, value: Any) -> Array:
        expected = f"{math.prod(self._batch)} integers from {self.start} to {self.start + self.n - 1}"
        try:
            array, _ = as_array(value)
        except ValueError as cause:
            raise self.fail(value, expected) from cause
        if array.shape != self._batch or array.dtype.kind not in "iu":
            raise self.fail(value, expected)
        choices = array.astype(np.int64) - self.start
        if choices.size and not 0 <= choices.min() <= choices.max() < self.n:
            raise self.fail(array.tolist(), expected)
        return choices


class BatchedOneHotCodec(BatchedCategoricalCodec):
    """P integers from a start, converted to one-hot vectors; arguments as for `BatchedCategoricalCodec`."""

    def encode(self, value: Any) -> Array:
        """Return the choices as one-hot vectors, ``(P, n)``."""
        rows = np.zeros(self.shape, self.dtype)
        choices = self._choices(value).reshape(-1)
        rows.reshape(-1, self.n)[np.arange(len(choices)), choices] = 1
        return rows

    def decode(self, row: Array) -> Array:
        """Return integers of the space's dtype, in the shape of `row` without its last dimension."""
        rows = row.reshape(-1, self.n)
        known = positions_of_ones(np.ascontiguousarray(rows))
        choices = one_hot_choices(rows) if known is None else np.array(known, np.int64)
        if choices is None:
            raise no_choice(self.key, row)
        return (choices.reshape(row.shape[:-1]) + self.start).astype(self.action_dtype, copy=False)


class MultiOneHotCodec(Codec):
    """Several choices, converted to concatenated one-hot vectors; for one environment or for P.

    Args:
        key: path of the leaf.
        spec: a MultiOneHot spec.
        nvec: for each choice, the number of its values.
        start: for each choice, its smallest integer.
        dtype: the dtype of the space, in which the environment's `step` gets the choices.
    """

    def __init__(self, key: Path, spec: TensorSpec, nvec: Array, start: Array, dtype: np.dtype[Any]) -> None:
        super().__init__(key, spec)
        self.nvec, self.start, self.action_dtype = nvec.astype(np.int64), start.astype(np.int64), dtype
        self._ends = np.cumsum(self.nvec)
        self._batch = self.shape[:-1]

    def encode(self, value: Any) -> Array:
        """Return the choices as a vector of zeros and ones, or as P such vectors."""
        expected = (
            f"{len(self.nvec)} integers from {self.start.tolist()}, of {self.nvec.tolist()} values each"
        )
        if self._batch:
            expected = f"{self._batch[0]} times {expected}"
        try:
            array, _ = as_array(value)
        except ValueError as cause:
            raise self.fail(value, expected) from cause
        if array.shape != (*self._batch, len(self.nvec)) or array.dtype.kind not in "biu":
            raise self.fail(value, expected)
        choices = array.astype(np.int64) - self.start
        if ((choices < 0) | (choices >= self.nvec)).any():
            raise self.fail(array.tolist(), expected)
        rows = np.zeros(self.shape, self.dtype)
        # `ones`: for each choice, the index of its 1 in the concatenated one-hot vectors.
        flat, ones = (
            rows.reshape(-1, self.shape[-1]),
            (self._ends - self.nvec + choices).reshape(-1, len(self.nvec)),
        )
        flat[np.arange(len(flat))[:, None], ones] = 1
        return rows

    def decode(self, row: Array) -> Array:
        """Return an array of the space's dtype, one integer for each choice, ``(choices,)`` or ``(P, choices)``."""
        rows = row.reshape(-1, row.shape[-1])
        picked = [one_hot_choices(part) for part in np.split(rows, self._ends[:-1], axis=-1)]
        if any(part is None for part in picked):
            raise no_choice(self.key, row)
        choices = np.stack([part for part in picked if part is not None], -1) + self.start
        return choices.astype(self.action_dtype).reshape(*row.shape[:-1], len(self.nvec))

    def decode_all(self, column: Array) -> list[Any]:
        """Return T arrays of the space's dtype."""
        return list(self.decode(column))

    def batched(self, num_envs: int) -> MultiOneHotCodec:
        """Return the codec for the choices of P environments."""
        return MultiOneHotCodec(
            self.key, self.batched_spec(num_envs), self.nvec, self.start, self.action_dtype
        )


def one_hot_choices(column: Array) -> Array | None:
    """Return the positions of the ones in ``(T, n)`` as ``(T,)`` int64; None if a row has no valid choice.

    A policy that marks every maximum can write several ones. Then the first one counts, and all further ones are set to
    0 in place, so that the recorded action is the one taken.
    """
    choices, rows = column.argmax(-1), np.arange(len(column))
    if (column[rows, choices] != 1).any():
        return None
    # A 1 in every row, and as many nonzero numbers as rows: each row has a single 1.
    if np.count_nonzero(column) != len(column):
        if ((column != 0) & (column != 1)).any():
            return None
        column[...] = 0
        column[rows, choices] = 1
    return choices


def no_choice(key: Path, rows: Array) -> PolicyError:
    """Return the error for rows that should be one-hot but aren't; the caller raises it."""
    text = np.array2string(rows, threshold=16)
    return PolicyError(
        f"action {as_key(key)!r}: expected one-hot vectors (a single 1 among zeros), got {text}"
    )


class ListCodec(Codec):
    """A leaf whose values are objects. Only observations may have such leaves."""

    is_list = True

    def decode(self, row: Array) -> Any:
        """Raise `PolicyError`, because actions must be numbers."""
        raise PolicyError(f"action {as_key(self.key)!r}: expected numbers, it is {self.spec!r}")

    def batched(self, num_envs: int) -> Codec:
        """Raise `SpaceError`: gymnasium batches each space without a fixed shape in a different way."""
        raise SpaceError(
            f"{as_key(self.key)!r}: values without a fixed shape can't be split into the rows of a vector environment; "
            "step single environments in a SerialEnv or ParallelEnv"
        )


class ObjectCodec(ListCodec):
    """Unchanged objects: text, and values without any other form.

    Args:
        key: path of the leaf.
        kind: the class of the values; None for any.
        example: an example value for the spec.
    """

    def __init__(self, key: Path, kind: type[Any] | None, example: Any) -> None:
        self.key, self.spec = key, NonTensor(shape=(), example_data=example)
        self.shape, self.dtype, self.kind = (), np.dtype(object), kind

    def encode(self, value: Any) -> Any:
        """Return the value, with NumPy strings converted to Python strings."""
        if self.kind is not None and not isinstance(value, self.kind):
            raise self.fail(value, f"a {self.kind.__name__}")
        return str(value) if self.kind is str else value


class SequenceCodec(ListCodec):
    """Encodes a sequence of any number of values of one space as one tensor ``(n, *leaf)``; None is an empty sequence.

    Only observations have such leaves, so `decode` raises.

    Args:
        key: path of the leaf.
        part: the codec of one value.
    """

    def __init__(self, key: Path, part: Codec) -> None:
        assert isinstance(part.spec, LeafSpec)
        self.key, self.part, self.spec = key, part, part.spec.unsqueeze(0).opened(0)
        self.shape, self.dtype = tuple(self.spec.shape), part.dtype

    def encode(self, value: Any) -> Any:
        """Return the values as a new tensor. `value` is a tuple of them, a stacked array, or None for no values."""
        if value is None:
            value = ()
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise self.fail(value, f"a sequence of values of shape {self.part.shape} {self.dtype}")
        rows = [self.part.encode(item) for item in value]
        array = np.stack(rows) if rows else np.empty((0, *self.part.shape), self.dtype)
        return torch.from_numpy(np.array(array, self.dtype))


class TupleCodec(Codec):
    """A tuple of choices as one vector, encoded like the vector of a MultiDiscrete space.

    Args:
        key: path of the leaf.
        inner: the codec of the vector.
        count: the number of choices.
    """

    def __init__(self, key: Path, inner: Codec, count: int) -> None:
        super().__init__(key, inner.spec)
        self.inner, self.count = inner, count

    def encode(self, value: Any) -> Array:
        """Encode the tuple's elements as one vector."""
        if not isinstance(value, (tuple, list)) or len(value) != self.count:
            raise self.fail(value, f"a tuple of {self.count} values")
        try:
            vector = np.stack([np.asarray(item) for item in value], -1)
        except ValueError as cause:
            raise self.fail(value, f"a tuple of {self.count} choices") from cause
        return self.inner.encode(vector)

    def decode(self, row: Array) -> Any:
        """Return the elements as a tuple."""
        vector = self.inner.decode(row)
        return tuple(vector[..., i] for i in range(self.count))

    def batched(self, num_envs: int) -> TupleCodec:
        """Return the codec for a tuple of batched choices."""
        return TupleCodec(self.key, self.inner.batched(num_envs), self.count)


def tuple_entries(value: Any) -> Any:
    """Return a tuple or list as a dictionary by position; return any other value unchanged."""
    return {str(i): item for i, item in enumerate(value)} if isinstance(value, (tuple, list)) else value


def graph_entries(value: Any) -> Any:
    """Return a graph's nodes, edges and links as a dictionary, ``()`` for None; return any other value unchanged."""
    parts = ("nodes", "edges", "edge_links")
    if isinstance(value, Mapping) or not all(hasattr(value, part) for part in parts):
        return value
    found = {part: getattr(value, part) for part in parts}
    return {part: () if item is None else item for part, item in found.items()}
