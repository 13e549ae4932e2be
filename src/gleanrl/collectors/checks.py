"""Whole-column checks of a batch: NaN and infinity in observations and rewards, NaN in actions."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gleanrl.errors import NonFiniteError, PolicyError
from gleanrl.native import first_nonfinite_f32, first_nonfinite_f64
from gleanrl.tree import Path, as_key

_SCANS = {torch.float32: first_nonfinite_f32, torch.float64: first_nonfinite_f64}


def first_nonfinite(column: torch.Tensor) -> int:
    """Return the flat position of the first NaN or infinity in `column`, or -1.

    One pass and no temporary for contiguous float32 and float64 on the CPU.
    """
    if not column.dtype.is_floating_point:
        return -1
    scan = _SCANS.get(column.dtype)
    if scan is not None and column.device.type == "cpu" and column.is_contiguous():
        return scan(column.data_ptr(), column.numel())
    bad = ~torch.isfinite(column).reshape(-1)
    return int(bad.int().argmax()) if bool(bad.any()) else -1


def check_finite(columns: Iterable[tuple[Path, torch.Tensor]], num_steps: int, env_name: str) -> None:
    """Raise at the first NaN or infinity.

    Args:
        columns: paths and columns ``[*batch, T, *leaf]``, environments flattened to ``(P, T, *leaf)``.
        num_steps: T.
        env_name: what the message calls the environment.

    Raises:
        NonFiniteError: naming the key, the environment and the step of the batch.
    """
    for path, column in columns:
        position = first_nonfinite(column)
        if position < 0:
            continue
        row = position // max(1, math.prod(column.shape[2:]))
        env, t = divmod(row, num_steps)
        value = column.reshape(-1)[position].item()
        raise NonFiniteError(
            f"{env_name}: environment {env} put out {value} in {as_key(path)!r} at step {t} of the batch; "
            "pass nonfinite='mark' or 'pass' to the collector to go on with such data"
        )


def check_actions(columns: Iterable[tuple[Path, torch.Tensor]], num_steps: int) -> None:
    """Raise if an action is NaN; infinite and out-of-range actions are the environment's business.

    Raises:
        PolicyError: naming the key, the environment and the step of the batch.
    """
    for path, column in columns:
        if first_nonfinite(column) < 0:
            continue
        bad = torch.isnan(column).reshape(-1)
        if not bool(bad.any()):
            continue
        row = int(bad.int().argmax()) // max(1, math.prod(column.shape[2:]))
        env, t = divmod(row, num_steps)
        raise PolicyError(f"policy: NaN in {as_key(path)!r} for environment {env} at step {t} of the batch")


def nonfinite_rows(columns: Iterable[tuple[Path, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Return ``(P, T)`` bool: whether any of `columns` holds a NaN or an infinity in that row.

    Args:
        columns: as in `check_finite`.
        like: a ``(P, T)`` tensor on the device where the result belongs.
    """
    rows = torch.zeros_like(like, dtype=torch.bool)
    for _, column in columns:
        if column.dtype.is_floating_point:
            rows |= ~torch.isfinite(column).reshape(*rows.shape, -1).all(-1)
    return rows
