"""Codecs of choices: Discrete and MultiDiscrete spaces, as integers from 0 or as one-hot vectors.

The single environment's codecs of one choice work on Python numbers, several times as fast as NumPy on one of them;
those of P environments on arrays. `MultiOneHotCodec` is the same for both.
"""

from __future__ import annotations

import math
import operator
from functools import cached_property
from typing import Any

import numpy as np

from gleanrl.data.specs import TensorSpec
from gleanrl.envs.libs.gym_codecs import Array, Codec, as_array
from gleanrl.errors import PolicyError
from gleanrl.native import positions_of_ones
from gleanrl.tree import Path, as_key


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

    @property
    def decodes_to_itself(self) -> bool:
        """Whether an integer decodes to itself."""
        return not self.shape and self.start == 0 and self.action_dtype == self.dtype

    def encode(self, value: Any) -> Array:
        """Return the choice, counted from 0."""
        return np.asarray(self._choice(value), self.dtype)

    def decode(self, row: Array) -> Any:
        """Return a scalar of the space's dtype; numbers outside the space are passed on."""
        return self.action_dtype.type(int(row) + self.start)

    def decode_all(self, column: Array) -> list[Any]:
        """Return T scalars of the space's dtype."""
        return list((column + self.start).astype(self.action_dtype))

    def batched(self, num_envs: int) -> BatchedCategoricalCodec:
        """Return the codec of P integers."""
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
    """One of n integers from `start`, as a vector with a single one; arguments as in `CategoricalCodec`."""

    @cached_property
    def _choices(self) -> list[Any]:
        # NumPy scalars: gymnasium checks them faster than Python integers, and its spaces sample them.
        return list(np.arange(self.start, self.start + self.n).astype(self.action_dtype))

    def batched(self, num_envs: int) -> BatchedOneHotCodec:
        """Return the codec of P one-hot vectors."""
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
        except ValueError:  # the one value that isn't 0 isn't 1 either
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
    """P integers from a start, as integers from 0.

    Args:
        one: the codec of one environment.
        spec: the spec of all, ``(P, *leaf)``.
    """

    def __init__(self, one: CategoricalCodec | BatchedCategoricalCodec, spec: TensorSpec) -> None:
        super().__init__(one.key, spec)
        self.n: int = one.n
        self.start: int = one.start
        self.action_dtype: np.dtype[Any] = one.action_dtype
        self._batch = self.shape[: spec.batch_ndim]

    def encode(self, value: Any) -> Array:
        """Return the choices, counted from 0."""
        return self._choices(value).astype(self.dtype)

    def decode(self, row: Array) -> Array:
        """Return integers of the space's dtype; numbers outside the space are passed on."""
        return (row + self.start).astype(self.action_dtype)

    def decode_all(self, column: Array) -> list[Any]:
        """Return what `step` takes for each of the T rows of ``(T, P)``."""
        return list(self.decode(column))

    def batched(self, num_envs: int) -> BatchedCategoricalCodec:
        """Return the codec of so many such batches."""
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
    """P integers from a start, as vectors with a single one; arguments as in `BatchedCategoricalCodec`."""

    def encode(self, value: Any) -> Array:
        """Return the choices as one-hot vectors, ``(P, n)``."""
        rows = np.zeros(self.shape, self.dtype)
        choices = self._choices(value).reshape(-1)
        rows.reshape(-1, self.n)[np.arange(len(choices)), choices] = 1
        return rows

    def decode(self, row: Array) -> Array:
        """Return integers of the space's dtype, the shape of `row` without its last dimension."""
        rows = row.reshape(-1, self.n)
        known = positions_of_ones(np.ascontiguousarray(rows))
        choices = one_hot_choices(rows) if known is None else np.array(known, np.int64)
        if choices is None:
            raise no_choice(self.key, row)
        return (choices.reshape(row.shape[:-1]) + self.start).astype(self.action_dtype, copy=False)


class MultiOneHotCodec(Codec):
    """Several choices, each as a one-hot vector, one behind the other; of one environment or of P.

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
        self._batch = self.shape[:-1]

    def encode(self, value: Any) -> Array:
        """Return the choices as one row of zeros and ones, or as P of them."""
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
        """Return the codec of the choices of P environments."""
        return MultiOneHotCodec(
            self.key, self.batched_spec(num_envs), self.nvec, self.start, self.action_dtype
        )


def one_hot_choices(column: Array) -> Array | None:
    """Return the positions of the ones in ``(T, n)``, ``(T,)`` int64; None if any row isn't one-hot.

    Of several ones, which policies put out that mark every maximum, the first counts, and alone stays in the row: what
    is recorded is what is done.
    """
    choices, rows = column.argmax(-1), np.arange(len(column))
    if (column[rows, choices] != 1).any():
        return None
    # A 1 in every row and as many numbers that aren't 0 as rows: a single 1 in each.
    if np.count_nonzero(column) != len(column):
        if ((column != 0) & (column != 1)).any():
            return None
        column[...] = 0
        column[rows, choices] = 1
    return choices


def no_choice(key: Path, rows: Array) -> PolicyError:
    """Return the error for rows that should be one-hot and aren't."""
    shown = np.array2string(rows, threshold=16)
    return PolicyError(
        f"action {as_key(key)!r}: expected one-hot vectors (a single 1 among zeros), got {shown}"
    )
