"""Arithmetic on each value of an entry: what torch does of it, and the core in the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

CONVERSIONS = {torch.float32: "float32", torch.float64: "float64"}
"""The operations that convert, by the dtype that they convert to."""


class Operation(NamedTuple):
    """One operation on a value, whose result is rounded to the dtype that comes out.

    Attributes:
        name: ``"add"``, ``"subtract"``, ``"multiply"``, ``"divide"``, or one of `CONVERSIONS`.
        operand: the tensor that holds the numbers, in the dtype of the values, with which it broadcasts: it is read
            again at every row. None for conversions.
    """

    name: str
    operand: torch.Tensor | None = None


def affine(
    loc: torch.Tensor | None, scale: torch.Tensor | None, standardizes: bool, dtype: torch.dtype
) -> Sequence[Operation] | None:
    """Return the operations of `scaled` on values of a dtype; None for numbers of another one, or none."""
    if loc is None or scale is None or not loc.dtype == scale.dtype == dtype:
        return None
    if standardizes:
        return Operation("subtract", loc), Operation("divide", scale)
    return Operation("multiply", scale), Operation("add", loc)


def scaled(value: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor, standardizes: bool) -> torch.Tensor:
    """Return ``(value - loc) / scale`` where it `standardizes`, else ``value * scale + loc``."""
    # No addcmul: torch fuses its product and sum or not by how many values there are.
    return (value - loc) / scale if standardizes else value * scale + loc
