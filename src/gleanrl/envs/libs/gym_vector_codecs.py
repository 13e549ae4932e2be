"""Codecs of a vector environment: one leaf holds the values of all P environments, ``(P, *leaf)``.

gymnasium batches the values of a space in its own way (P integers of a Discrete are one array, a Tuple of
Boxes is a tuple of batched arrays, a Dict a dict of them); these codecs are the counterparts of those in
`gleanrl.envs.libs.gym_codecs` for such values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gleanrl.data.specs import TensorSpec
from gleanrl.envs.libs.gym_codecs import (
    Array,
    ArrayCodec,
    CategoricalCodec,
    Codec,
    MultiOneHotCodec,
    OneHotCodec,
    StackCodec,
    as_array,
    describe,
    no_choice,
    one_hot_choices,
)
from gleanrl.envs.libs.gym_spaces import Group, Tree
from gleanrl.errors import EnvironmentContractError, SpaceError
from gleanrl.tree import as_key


def batched(tree: Tree, num_envs: int) -> Tree:
    """Return the codecs of `num_envs` environments whose single one has the codecs of `tree`.

    Raises:
        SpaceError: if a leaf can't be batched.
    """
    if isinstance(tree, Group):
        children = {name: batched(child, num_envs) for name, child in tree.children.items()}
        return Group(tree.key, children)
    return _batched(tree, num_envs)


def _batched(one: Codec, num_envs: int) -> Codec:
    spec = one.spec.expand((num_envs, *one.shape))
    if isinstance(one, ArrayCodec):
        start = None if one.start is None else np.broadcast_to(one.start, spec.shape)
        return ArrayCodec(one.key, spec, start, one.action_dtype)
    if isinstance(one, OneHotCodec):
        return VectorOneHotCodec(one, spec)
    if isinstance(one, CategoricalCodec):
        return VectorCategoricalCodec(one, spec)
    if isinstance(one, MultiOneHotCodec):
        return VectorMultiOneHotCodec(one, spec)
    if isinstance(one, StackCodec):
        return VectorStackCodec(one.key, spec, [_batched(part, num_envs) for part in one.parts])
    raise SpaceError(f"{as_key(one.key)!r}: {type(one).__name__} has no counterpart for vector environments")


class VectorCategoricalCodec(Codec):
    """P integers from a start, as integers from 0.

    Args:
        one: the codec of one environment.
        spec: the spec of all, ``(P, *leaf)``.
    """

    def __init__(self, one: CategoricalCodec, spec: TensorSpec) -> None:
        super().__init__(one.key, spec)
        self.n, self.start, self.action_dtype = one.n, one.start, one.action_dtype

    def encode(self, value: Any) -> Array:
        """Return the choices, counted from 0."""
        return self._choices(value).astype(self.dtype)

    def decode(self, row: Array) -> Array:
        """Return P integers of the space's dtype; numbers outside the space are passed on."""
        return (row + self.start).astype(self.action_dtype)

    def decode_all(self, column: Array) -> list[Any]:
        """Return what `step` takes for each of the T rows of ``(T, P)``."""
        return list(self.decode(column))

    def _choices(self, value: Any) -> Array:
        expected = f"{self.shape[0]} integers from {self.start} to {self.start + self.n - 1}"
        try:
            array, _ = as_array(value)
        except ValueError as cause:
            raise self._fail(value, expected) from cause
        if array.shape != self.shape[:1] or array.dtype.kind not in "iu":
            raise self._fail(value, expected)
        choices = array.astype(np.int64) - self.start
        if choices.size and not 0 <= choices.min() <= choices.max() < self.n:
            raise self._fail(array.tolist(), expected)
        return choices


class VectorOneHotCodec(VectorCategoricalCodec):
    """P integers from a start, as vectors with a single one; arguments as in `VectorCategoricalCodec`."""

    def encode(self, value: Any) -> Array:
        """Return the choices as one-hot vectors, ``(P, n)``."""
        rows = np.zeros(self.shape, self.dtype)
        rows[np.arange(len(rows)), self._choices(value)] = 1
        return rows

    def decode(self, row: Array) -> Array:
        """Return P integers of the space's dtype."""
        choices = one_hot_choices(row)
        if choices is None:
            raise no_choice(self.key, row)
        return (choices + self.start).astype(self.action_dtype, copy=False)

    def decode_all(self, column: Array) -> list[Any]:
        """Return what `step` takes for each of the T rows of ``(T, P, n)``."""
        return list(self.decode(column.reshape(-1, self.n)).reshape(column.shape[:-1]))


class VectorMultiOneHotCodec(Codec):
    """Several choices of each of P environments, as one-hot vectors one behind the other.

    Args:
        one: the codec of one environment.
        spec: the spec of all, ``(P, n)``.
    """

    def __init__(self, one: MultiOneHotCodec, spec: TensorSpec) -> None:
        super().__init__(one.key, spec)
        self.one = one

    def encode(self, value: Any) -> Array:
        """Return the choices as rows of zeros and ones, ``(P, n)``."""
        return stacked(self, value, [self.one] * self.shape[0])

    def decode(self, row: Array) -> Array:
        """Return the integers of the space's dtype, ``(P, choices)``."""
        return np.stack(self.one.decode_all(row))


class VectorStackCodec(Codec):
    """A tuple of batched values of one shape and dtype, stacked behind the environments' dimension.

    Args:
        key: where the leaf stands.
        spec: the stacked spec, ``(P, elements, *leaf)``.
        parts: the batched codec of each element.
    """

    def __init__(self, key: tuple[str, ...], spec: TensorSpec, parts: Sequence[Codec]) -> None:
        super().__init__(key, spec)
        self.parts = tuple(parts)

    def encode(self, value: Any) -> Array:
        """Return the stacked elements."""
        if not isinstance(value, (tuple, list)) or len(value) != len(self.parts):
            raise self._fail(value, f"a tuple of {len(self.parts)} batched values")
        return np.stack([part.encode(item) for part, item in zip(self.parts, value, strict=True)], 1)

    def decode(self, row: Array) -> Any:
        """Return the batched elements as a tuple."""
        return tuple(part.decode(row[:, i, ...]) for i, part in enumerate(self.parts))


def stacked(codec: Codec, value: Any, parts: Sequence[Codec]) -> Array:
    """Return the encoded values of P environments, stacked."""
    if not hasattr(value, "__len__") or len(value) != len(parts):
        raise EnvironmentContractError(
            f"key {as_key(codec.key)!r} expected the values of {len(parts)} environments, got {describe(value)}"
        )
    return np.stack([part.encode(item) for part, item in zip(parts, value, strict=True)])


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
