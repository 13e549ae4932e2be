"""Priorities as users give them: numbers, one or several for a record."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from gleanrl.errors import GleanError, IndexRangeError, InvalidArgumentError, InvalidTypeError, SchemaError
from gleanrl.native import Priorities
from gleanrl.schema import has_memory

_DIRECT = {
    torch.float32: (torch.float32,),
    torch.float64: (torch.float32, torch.float64),
    torch.int64: (torch.int64,),
}
_REDUCTIONS = ("max", "min", "mean", "median", "sum")


def number(name: str, value: Any) -> float:
    """Return `value` if it is a finite number of 0 or more."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise InvalidArgumentError(f"{name}: expected a finite number of 0 or more, got {value!r}")
    return found


def reduce_priority(values: torch.Tensor, count: int, reduction: str) -> torch.Tensor:
    """Return one priority for each of `count` items out of ``(count, ...)`` values."""
    if values.shape[:1] != (count,):
        raise SchemaError(f"priority: expected {count} items, got {tuple(values.shape)}")
    flat = values.flatten(1) if values.ndim > 1 else values[:, None]
    if flat.shape[1] == 1 or not count:
        return flat.reshape(-1)
    if reduction in ("max", "min"):
        return getattr(flat, f"a{reduction}")(1)
    return flat.median(1).values if reduction == "median" else getattr(flat.double(), reduction)(1)


def check_reduction(reduction: str) -> str:
    """Return `reduction` if it is one that `reduce_priority` knows."""
    if reduction not in _REDUCTIONS:
        raise InvalidArgumentError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
    return reduction


def per_slot(name: str, values: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` as ``(count,)`` of `dtype` on the CPU."""
    if isinstance(values, torch.Tensor) and not has_memory(values):
        raise InvalidTypeError(f"{name}: expected numbers, got a tensor without memory")
    if isinstance(values, torch.Tensor) and values.shape == (count,) and values.dtype in _DIRECT[dtype]:
        # What a training loop brings.
        found = values.detach() if values.requires_grad else values
        found = found if found.is_cpu else found.cpu()
        if found.dtype != dtype:
            found = found.to(dtype)  # not free for what fits
        return found.resolve_neg().contiguous()
    try:
        # By way of NumPy: torch takes Python's numbers for single precision.
        tensor = torch.as_tensor(values if isinstance(values, torch.Tensor) else np.asarray(values)).detach()
    except (TypeError, ValueError, RuntimeError) as cause:
        raise InvalidTypeError(f"{name}: expected numbers, got {values!r}") from cause
    if (
        tensor.dtype == torch.bool
        or tensor.dtype.is_complex
        or (dtype == torch.int64 and tensor.dtype.is_floating_point)
    ):
        raise InvalidTypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    tensor = tensor.resolve_neg().to("cpu", dtype)
    if tensor.numel() == 1 and count != 1 and tensor.ndim == 0:
        return tensor.expand(count).contiguous()
    if tensor.numel() != count or tensor.shape[:1] not in ((count,), ()):
        raise SchemaError(
            f"{name}: expected one number or {count}, one for each index, got shape {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1).contiguous()


def check_priorities(values: torch.Tensor, alpha: float, eps: float, dtype: torch.dtype) -> None:
    """Raise `InvalidArgumentError` unless a row could have each of the priorities ``(n,)`` under this rule."""
    count = values.shape[0]
    priorities = per_slot("priority", values, count, torch.float64)
    rows = torch.zeros(max(count, 1), dtype=torch.int64, device="cpu")
    table = Priorities(1, dtype == torch.float32)
    try:
        table.set_rule(alpha, eps)
        table.update(rows.data_ptr(), priorities.data_ptr(), count, 1, rows.data_ptr(), 0)
    except ValueError as error:
        raise as_ours(error) from error


def as_ours(error: ValueError | IndexError) -> GleanError:
    """Return the library's error for one of the core."""
    if isinstance(error, IndexError):
        return IndexRangeError(f"index: {error}")
    return InvalidArgumentError(str(error))
