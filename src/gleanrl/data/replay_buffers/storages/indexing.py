"""Conversion of a user's index into slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import is_tensor_collection, is_tensorclass

from gleanrl._arrays.tensordicts import did_you_mean
from gleanrl.errors import IndexRangeError, InvalidTypeError, MissingKeyError

Basic: TypeAlias = int | slice

_NO_INTEGERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)


def basic_index(index: Any, shape: torch.Size) -> tuple[Basic, ...] | None:
    """Return `index` as a tuple of ints and slices; None if a part is neither an int, a slice nor ``...``.

    Negative ints stay negative. The tuple may have fewer parts than `shape` has dimensions.

    Raises:
        IndexRangeError: an int is outside ``[-size, size)``, a slice has the step 0, the index has two ``...``, or more
            parts than `shape` has dimensions.
        InvalidTypeError: a slice has other values than integers.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not all(_is_basic(part) for part in parts):
        return None
    if parts.count(Ellipsis) > 1:
        raise IndexRangeError(f"index {index!r} has two '...'; write slice(None) for single dimensions")
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (len(shape) - len(parts) + 1), *parts[at + 1 :])
    if len(parts) > len(shape):
        raise IndexRangeError(
            f"index {index!r} has {len(parts)} parts; the storage has {len(shape)} batch dimensions"
        )
    return tuple(
        _checked_slice(part, size, index) if isinstance(part, slice) else _in_range(int(part), size, index)
        for part, size in zip(parts, shape, strict=False)
    )


def slots_at(index: Any, shape: torch.Size, time: int = 0) -> tuple[torch.Tensor, torch.Size]:
    """Return the slots that `index` selects from the visible part, and the selection's shape.

    Args:
        index: an int, slice, list, range, array or tensor over the first dimension; a boolean mask over the leading
            dimensions; a tuple of these with one part for each dimension. With several batch dimensions an integer
            tensor ``(n, ndim)`` holds coordinates, as `extend` returns them.
        shape: the visible part, ``[steps, *batch]``. Slots number it row by row.
        time: the time dimension in the user's order of dimensions. Coordinates always have time first.

    Returns:
        The slots, ``(n,)`` int64, contiguous, on the CPU; and the shape of the selection, with n elements.

    Raises:
        IndexRangeError: the index is outside the visible part.
        InvalidTypeError: the value isn't an index.
    """
    basic = basic_index(index, swapped(shape, time))
    if basic is not None and all(isinstance(part, slice) for part in basic) and len(basic) == 1 == len(shape):
        picked = torch.arange(*basic[0].indices(shape[0]), device="cpu")  # type: ignore[union-attr]
        return picked, picked.shape
    are_coordinates = isinstance(index, tuple) and _are_coordinates(index, len(shape))
    if basic is None:
        parts = index if isinstance(index, tuple) else (index,)
        converted = tuple(_convert(part) for part in parts)
        only = converted[0]
        if len(converted) == 1 and isinstance(only, torch.Tensor) and only.dtype == torch.int64:
            if len(shape) == 1:
                return _checked(only, shape[0]).reshape(-1).contiguous(), only.shape
            if only.ndim == 2 and only.shape[-1] == len(shape):
                converted, are_coordinates = only.unbind(-1), True
        basic = converted
    # Indexing a grid of slot numbers gives torch's own rules of indexing. Coordinates have time first in any case.
    grid = torch.arange(shape.numel(), device="cpu").view(shape)
    if time and not are_coordinates:
        grid = grid.transpose(0, time)
    try:
        picked = grid[basic]
    except (IndexError, TypeError, ValueError) as cause:  # ValueError: a slice has a negative step
        raise IndexRangeError(
            f"index {index!r} doesn't fit the {tuple(shape)} records stored: {cause}"
        ) from cause
    return picked.reshape(-1).contiguous(), picked.shape


def slots_of_update(index: Any, shape: tuple[int, ...], check: bool = True) -> torch.Tensor:
    """Return the slots for an index that `extend` or `sample` returned, with -1 for rows to skip.

    Args:
        index: an int or ``(n,)`` integers; with ``ndim > 1`` coordinates ``(n, ndim)``, or a tuple of `ndim` integer
            tensors. -1 (in any coordinate) skips a row.
        shape: the visible part, ``[steps, *batch]``.
        check: whether to check the range of plain slots here; False if the native core checks it later.

    Returns:
        ``(n,)`` int64, contiguous, on the CPU. If checked, each value is in ``[-1, number of slots)``.

    Raises:
        IndexRangeError: a number is outside the visible part, or negative but not -1.
        InvalidTypeError: the value isn't an index.
    """
    ndim = len(shape)
    if isinstance(index, tuple) and len(index) == ndim:
        parts = [_integers(part).reshape(-1) for part in index]
        if len({part.shape[0] for part in parts}) > 1:
            raise IndexRangeError(f"index: the {ndim} coordinates have different lengths")
        return _flat(torch.stack(parts, -1), shape)
    positions = _integers(index)
    if ndim > 1:
        if not positions.ndim or positions.shape[-1] != ndim:
            raise IndexRangeError(
                f"index: expected (n, {ndim}) coordinates or a tuple of {ndim} tensors, got {tuple(positions.shape)}"
            )
        return _flat(positions.reshape(-1, ndim), shape)
    if positions.ndim != 1 or not positions.is_contiguous():
        if positions.ndim > 2 or (positions.ndim == 2 and positions.shape[-1] != 1):
            raise IndexRangeError(f"index: expected (n,) slots, got {tuple(positions.shape)}")
        positions = positions.reshape(-1).contiguous()
    return _updatable(positions, math.prod(shape)) if check else positions


def steps_at(cursor: Any, capacity: int) -> torch.Tensor:
    """Return the time steps that `cursor` names (a range, slice, list, array or tensor), ``(n,)`` int64 with n >= 1.

    The steps needn't be stored yet. A slice without an end extends to `capacity`, and its negative bounds count from
    there. Negative steps in the other forms are returned unchanged.

    Raises:
        IndexRangeError: the cursor names no time step, or is a slice with the step 0.
        InvalidTypeError: the cursor holds other values than integers.
    """
    if isinstance(cursor, slice):
        cursor = range(*_checked_slice(cursor, capacity, cursor).indices(capacity))
    if isinstance(cursor, range):
        steps = torch.arange(cursor.start, cursor.stop, cursor.step, device="cpu")
    else:
        steps = _integers(cursor).reshape(-1)
    if not steps.shape[0]:
        raise IndexRangeError(f"cursor {cursor!r} names no time step")
    return steps


def ranges_of(slots: torch.Tensor) -> list[tuple[int, int]]:
    """Return slots as ``(start, count)`` ranges of adjacent slots, in rising order and each slot once."""
    if not slots.shape[0]:
        return []
    ordered = slots.sort().values
    heads = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), ordered.diff() > 1]).nonzero()[:, 0]
    starts = ordered[heads].tolist()
    stops = [*ordered[heads[1:] - 1].tolist(), int(ordered[-1])]
    return [(start, stop + 1 - start) for start, stop in zip(starts, stops, strict=True)]


def members_at(index: Any, size: int) -> list[int] | int:
    """Return the members of an ensemble that `index` selects: one number for an int, a list otherwise.

    Args:
        index: an int, a slice, a list or tensor of ints, a boolean mask, or ``...`` for all.
        size: the number of members.

    Raises:
        IndexRangeError: a member doesn't exist, or no member is selected.
        InvalidTypeError: the value isn't an index.
    """
    try:
        found, shape = slots_at(index, torch.Size([size]))
    except IndexRangeError as cause:
        raise IndexRangeError(f"index {index!r} doesn't fit the {size} members of the ensemble") from cause
    if not found.numel():
        raise IndexRangeError(f"index {index!r} selects none of the {size} members of the ensemble")
    return found.tolist() if shape else int(found)


def is_key(index: Any) -> bool:
    """Return whether `index` names a column: a string or a (nested) tuple of strings."""
    if isinstance(index, str):
        return True
    return isinstance(index, tuple) and bool(index) and all(is_key(part) for part in index)


def column_of(records: Any, key: Any) -> Any:
    """Return the column of all records at `key`.

    Raises:
        MissingKeyError: there is no such column.
    """
    try:
        # Indexing a tensorclass accepts positions only, so it is converted first.
        return records.to_tensordict(retain_none=False)[key] if is_tensorclass(records) else records[key]
    except KeyError as cause:
        stored = records.keys(True, True) if is_tensor_collection(records) else records
        keys = [one for one in stored if is_key(one)]
        raise MissingKeyError(f"{key!r} isn't stored; there are {keys}{did_you_mean(key, keys)}") from cause


def is_position(index: Any) -> bool:
    """Return whether `index` is one integer, alone or as the only part of a tuple."""
    return _is_number(index[0] if isinstance(index, tuple) and len(index) == 1 else index)


def position(index: Any) -> int:
    """Return the integer of an index for which `is_position` is true."""
    return int(index[0] if isinstance(index, tuple) else index)


def swapped(shape: torch.Size, time: int) -> torch.Size:
    """Return a shape with dimension 0 and the dimension `time` exchanged."""
    if not time:
        return shape
    sizes = list(shape)
    sizes[0], sizes[time] = sizes[time], sizes[0]
    return torch.Size(sizes)


def _are_coordinates(parts: tuple[Any, ...], ndim: int) -> bool:
    """Return whether an index has the form that samples carry: one integer tensor for each dimension, time first."""
    return len(parts) == ndim and all(
        isinstance(part, torch.Tensor) and part.ndim == 1 and part.dtype == torch.int64 for part in parts
    )


def _integers(index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor) and index.dtype == torch.int64 and index.is_cpu:
        return index
    index = _convert(int(index) if _is_number(index) else index)
    tensor = None if isinstance(index, slice) or index is Ellipsis else torch.as_tensor(index, device="cpu")
    if tensor is None or tensor.dtype == torch.bool:
        raise InvalidTypeError(f"index: expected the integers that extend or sample returned, got {index!r}")
    return tensor.to(torch.int64)


def _is_number(index: Any) -> bool:
    """Return whether `index` is one integer of Python, NumPy or torch."""
    if isinstance(index, torch.Tensor):
        return not index.ndim and index.dtype not in _NO_INTEGERS and not index.dtype.is_floating_point
    if isinstance(index, np.ndarray):
        return not index.ndim and index.dtype.kind in "iu"
    return isinstance(index, (int, np.integer)) and not isinstance(index, bool)


def _flat(coordinates: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the slots of ``(n, ndim)`` coordinates."""
    skipped = (coordinates == -1).any(-1)
    flat = torch.zeros(coordinates.shape[0], dtype=torch.int64, device="cpu")
    for position, size in enumerate(shape):
        column = coordinates[:, position]
        _updatable(torch.where(skipped, -1, column).contiguous(), size)
        flat = flat * size + column
    return torch.where(skipped, -1, flat)


def _updatable(slots: torch.Tensor, size: int) -> torch.Tensor:
    """Return `slots`; raise `IndexRangeError` unless all are in ``[-1, size)``."""
    if slots.shape[0]:
        low, high = (int(bound) for bound in slots.aminmax())
        if low < -1 or high >= size:
            raise IndexRangeError(f"index {low if low < -1 else high} is outside the {size} records stored")
    return slots


def _is_basic(part: Any) -> bool:
    return part is Ellipsis or isinstance(part, slice) or _is_number(part)


def _checked_slice(part: slice, size: int, index: Any) -> slice:
    """Return a slice unchanged; raise `IndexRangeError` for the step 0, `InvalidTypeError` unless it has integers."""
    try:
        part.indices(size)
    except ValueError as cause:
        raise IndexRangeError(f"index {index!r} has the step 0; write a step of 1 or more") from cause
    except TypeError as cause:
        raise InvalidTypeError(f"index {index!r}: expected integers or None in a slice") from cause
    return part


def _in_range(position: int, size: int, index: Any) -> int:
    if not -size <= position < size:
        raise IndexRangeError(f"index {index!r} is outside the {size} records stored")
    return position


def _convert(part: Any) -> Any:
    """Return one part of an index as a tensor (int64 or bool), slice or int."""
    if _is_basic(part):
        return part
    if isinstance(part, (Sequence, np.ndarray)) and not isinstance(part, str):
        positions = np.asarray(part) if len(part) else np.empty(0, np.int64)
        part = torch.as_tensor(positions, device="cpu") if positions.dtype.kind in "iub" else positions
    if isinstance(part, torch.Tensor) and (part.dtype == torch.bool or not part.dtype.is_floating_point):
        part = part.detach().cpu()
        return part if part.dtype == torch.bool else part.to(torch.int64)
    raise InvalidTypeError(
        "an index is an int, a slice, a list of ints, an integer or boolean tensor, or a tuple of these; "
        f"got {part!r}"
    )


def _checked(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Return `positions` with negative ones counted from the end; raise `IndexRangeError` if one is out of range."""
    if not positions.numel():
        return positions
    low, high = int(positions.min()), int(positions.max())
    if low < -size or high >= size:
        raise IndexRangeError(f"index {low if low < -size else high} is outside the {size} records stored")
    return torch.where(positions < 0, positions + size, positions) if low < 0 else positions
