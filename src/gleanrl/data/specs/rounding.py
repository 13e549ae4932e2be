"""Moving a number to the nearest one that an integer dtype and its bounds allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gleanrl.errors import InvalidArgumentError

# torch can't compare these; it can compare what they hold as int64
_UNORDERED = (torch.uint16, torch.uint32)


def integer_limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer or boolean dtype.

    Raises:
        InvalidArgumentError: if the dtype isn't one that integer specs can have.
    """
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.uint64:
        raise InvalidArgumentError(f"dtype: expected an integer dtype other than uint64, got {dtype}")
    limits = torch.iinfo(dtype)
    return int(limits.min), int(limits.max)


def require_real(dtype: torch.dtype) -> None:
    """Check that a dtype is one of real numbers that specs can have: floating-point, integer or boolean.

    Raises:
        InvalidArgumentError: if it isn't.
    """
    if not dtype.is_floating_point:
        integer_limits(dtype)


def ordered(value: Tensor) -> Tensor:
    """Return integers in a dtype that can be compared."""
    return value.to(torch.int64) if value.dtype in _UNORDERED else value


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in another real dtype if that keeps every number; else, and what is no tensor, as it is."""
    if not isinstance(value, Tensor) or value.dtype == dtype or value.dtype.is_complex:
        return value
    there, here = value.to(dtype), ordered(value)
    # There and back finds all but integers that wrapped around; these change their sign.
    kept = (ordered(there.to(value.dtype)) == here) & ((ordered(there) < 0) == (here < 0))
    return there if bool(kept.all()) else value


def nearest_integer(value: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the integer of `dtype` between `low` and `high` (both included) that is nearest to each number.

    Args:
        value: any real dtype, without NaN; halves go to the even neighbour.
        low: int64, broadcasts with `value`.
        high: int64, broadcasts with `value`.
        dtype: of the result; it holds `low` and `high`.
    """
    if not value.dtype.is_floating_point:
        return torch.minimum(torch.maximum(value.to(torch.int64), low), high).to(dtype)
    value = value.to(torch.float64)
    # Only what lies strictly between the bounds is converted for use: beyond int64 the conversion is
    # undefined
    inner = torch.minimum(torch.maximum(value.round().to(torch.int64), low), high)
    return torch.where(value <= low, low, torch.where(value >= high, high, inner)).to(dtype)
