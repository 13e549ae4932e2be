"""Stacks of leaf specs that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gleanrl.data.specs.base import TensorSpec
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.data.specs.stack import Stack
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, UnsupportedError


class Stacked(Stack):
    """Leaf specs of one dtype that differ in domain or in their last dimensions, stacked along a dimension.

    Where the members' shapes differ, `shape` has -1. Such a stack describes no single tensor: it can be
    indexed and unbound, but not drawn from.

    Args:
        specs: the members; not composites.
        dim: the dimension of the stack.

    Raises:
        InvalidTypeError: if a member is a composite.
        InvalidArgumentError: if the members differ in dtype, device or number of dimensions, or can't be
            stacked along `dim`.
    """

    def __init__(self, *specs: TensorSpec, dim: int = 0) -> None:
        if not specs or not all(isinstance(s, TensorSpec) and not isinstance(s, SpecMapping) for s in specs):
            raise InvalidTypeError(f"Stacked: expected leaf specs, got {specs!r}")
        if len({spec.dtype for spec in specs}) > 1:
            raise InvalidArgumentError(f"Stacked: expected one dtype, got {[spec.dtype for spec in specs]}")
        self.dtype = specs[0].dtype
        self._hold(specs, dim)

    def encode(self, value: Any) -> Any:
        """Return what an environment gave as a new value; each position is encoded by its own spec.

        Args:
            value: an array, a tensor or a nested list with `len(specs)` entries along `stack_dim`, without
                further leading dimensions.

        Raises:
            SchemaError: if there aren't as many entries as members.
        """
        array = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        if array.ndim <= self.stack_dim or array.shape[self.stack_dim] != len(self.specs):
            raise SchemaError(
                f"encode: expected {len(self.specs)} entries along dimension {self.stack_dim} for {self!r}, "
                f"got shape {tuple(array.shape)}"
            )
        parts = array.unbind(self.stack_dim)
        encoded = [spec.encode(part) for spec, part in zip(self.specs, parts, strict=True)]
        return self._merged(encoded, self.stack_dim)

    def type_check(self, value: Any, key: Any = None) -> None:
        """Check the dtype of a value and nothing else.

        Raises:
            InvalidTypeError: if the dtype isn't the spec's; the message names `key`.
        """
        self.specs[0].type_check(value, key)

    def _merged(self, parts: Sequence[Any], axis: int) -> Any:
        if -1 in self.shape:
            raise UnsupportedError(
                f"{self!r} has members of different shapes, which no tensor can hold; "
                f"use the specs of its unbind({self.stack_dim})"
            )
        return torch.stack(list(parts), axis)

    def _merged_numpy(self, parts: list[Any], axis: int) -> Any:
        return np.stack(parts, axis)

    def _size(self, value: Any) -> tuple[int, ...] | None:
        return tuple(value.shape) if hasattr(value, "unbind") else None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first dimension."""
        return iter(self.unbind(0))

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return self.shape[0]
