"""Stacks of frames among observations, whose frames a compact storage stores once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path, did_you_mean
from gleanrl.data.trajectories import same_bits
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError

_LOOK_ROWS = 256  # rows of the first write that are compared
_MOST_FRAMES, _LEAST_BYTES = 16, 64  # of a stack and of a frame that a look finds


@dataclass(frozen=True)
class Compact:
    """Settings of a compact storage: ``LazyTensorStorage(n, compact=Compact(stack={"pixels": 4}))``.

    Args:
        stack: the number of frames in each observation that is a stack of frames, the newest one last, by key. The
            frames follow each other along the shortest dimension whose size is a multiple of that number;
            ``{"pixels": (4, -1)}`` names another dimension. None: stacks are found in the first write, or in loaded
            records, if a frame changes in their first 256 rows. An empty dictionary: there are no stacks.

    Raises:
        InvalidArgumentError: a number of frames is less than 2 or more than 32,767.
        InvalidTypeError: `stack` has other types.

    Examples:
        >>> Compact(stack={"pixels": 4})
        Compact(stack={('pixels',): 4})
    """

    stack: Mapping[NestedKey, int | tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.stack is None:
            return
        wanted = 'a dictionary such as {"pixels": 4} or {"pixels": (4, -1)}'
        if not isinstance(self.stack, Mapping):
            raise InvalidTypeError(f"stack: expected {wanted}, got {self.stack!r}")
        for key, value in self.stack.items():
            numbers = value if isinstance(value, tuple) else (value, 0)
            if len(numbers) != 2 or not all(type(number) is int for number in numbers):
                raise InvalidTypeError(f"stack: expected {wanted}, got {value!r} for key {key!r}")
            if not 2 <= numbers[0] < 1 << 15:
                raise InvalidArgumentError(
                    f"stack: expected 2 to 32,767 frames, got {numbers[0]} for key {key!r}"
                )
        object.__setattr__(self, "stack", {as_path(key): value for key, value in self.stack.items()})


class FrameStack(NamedTuple):
    """The frames of an observation."""

    path: Path
    frames: int
    dim: int
    """The dimension of the field along which they follow each other."""

    def frame(self, field: Field) -> Field:
        """Return the field of one frame."""
        shape = list(field.shape)
        shape[self.dim] //= self.frames
        return replace(field, shape=torch.Size(shape))

    def pieces(self, field: Field) -> int:
        """Return the number of pieces of each frame that alternate with the other frames' pieces in memory."""
        return prod(field.shape[: self.dim])


def declared_stacks(
    stack: Mapping[Any, int | tuple[int, int]], fields: Mapping[Path, Field]
) -> list[FrameStack]:
    """Return the stacks that a user names.

    Args:
        stack: see `Compact`.
        fields: the observations that can be stacks, by path.

    Raises:
        SchemaError: there is no such observation, or its shape doesn't fit.
    """
    found = []
    for path, value in stack.items():
        key = as_key(path)
        if path not in fields:
            raise SchemaError(
                f"stack: expected an observation of 16 bytes or more, with the same shape and dtype in 'next', got "
                f"{key!r}"
                f"{did_you_mean(key, map(as_key, fields))}"
            )
        shape = fields[path].shape
        frames, dim = value if isinstance(value, tuple) else (value, None)
        if dim is None:
            dims = [dim for dim, size in enumerate(shape) if size and size % frames == 0]
            dim = min(dims, key=lambda dim: shape[dim], default=None)
        if dim is None or not -len(shape) <= dim < len(shape) or shape[dim] % frames:
            raise SchemaError(
                f"stack: expected {key!r} with a dimension whose size is a multiple of {frames} frames, got the shape "
                f"{tuple(shape)}{'' if dim is None else f' and dimension {dim}'}"
            )
        found.append(FrameStack(path, frames, dim % len(shape)))
    return found


def find_stacks(fields: Mapping[Path, Field], leaves: Mapping[Path, Leaf], streams: int) -> list[FrameStack]:
    """Return the stacks that records show.

    Args:
        fields: the observations that can be stacks, by path.
        leaves: the leaves of consecutive steps, ``[*lead, *field]`` each, by path; may be empty.
        streams: the rows of one step.
    """
    found = []
    for path, field in fields.items() if leaves else ():
        root, outcome = (
            leaves[leaf].reshape(-1, *field.shape)[: _LOOK_ROWS + streams] for leaf in (path, ("next", *path))
        )
        before, after = (root[:-streams], root[streams:]) if root.shape[0] > streams else (root, outcome)
        found += _stack_in(path, before, after)
    return found


def _stack_in(path: Path, before: Any, after: Any) -> list[FrameStack]:
    """Return the stack that observations and the ones a step later show, ``[rows, *field]`` each, in a list."""
    shape = before.shape[1:]
    for dim in sorted(range(len(shape)), key=lambda dim: shape[dim]):
        for frames in range(_MOST_FRAMES, 1, -1):
            size, width = shape[dim], shape[dim] // frames
            if not size or size % frames or before.itemsize * shape.numel() // frames < _LEAST_BYTES:
                continue
            for step in (max(len(after) // 8, 1), 1):  # a few rows refute most dimensions
                older = after[::step].narrow(dim + 1, 0, size - width)
                follows = same_bits(older, before[::step].narrow(dim + 1, width, size - width), 1)
                if 2 * int(follows.sum()) < len(follows):
                    break
            else:
                moves = ~same_bits(older, after.narrow(dim + 1, width, size - width), 1)
                if bool((follows & moves).any()):
                    return [FrameStack(path, frames, dim)]
    return []
