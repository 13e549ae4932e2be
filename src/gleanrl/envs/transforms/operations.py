"""Arithmetic on each value of an entry: what torch does of it, and the core in the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

CONVERSIONS = {torch.float32: "float32", torch.float64: "float64"}
"""The operations that convert, by the dtype that they convert to."""


Tensors = Mapping[str, torch.Tensor | None]
"""The buffers of a transform."""


class Operation(NamedTuple):
    """One operation on a value, whose result is rounded to the dtype that comes out.

    Attributes:
        name: ``"add"``, ``"subtract"``, ``"multiply"``, ``"divide"``, or one of `CONVERSIONS`.
        tensors: where the numbers are looked up, at every row; None for conversions.
        key: their name there; the tensor has the dtype of the values, and broadcasts with them.
    """

    name: str
    tensors: Tensors | None = None
    key: str | None = None

    @property
    def numbers(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        return None if self.tensors is None or self.key is None else self.tensors[self.key]


def affine(tensors: Tensors, standardizes: bool, dtype: torch.dtype) -> Sequence[Operation] | None:
    """Return the operations of `scaled`, with ``"loc"`` and ``"scale"``, on values of a dtype.

    None where the numbers are of another one, or aren't known.
    """
    loc, scale = tensors["loc"], tensors["scale"]
    if loc is None or scale is None or not loc.dtype == scale.dtype == dtype:
        return None
    if standardizes:
        return Operation("subtract", tensors, "loc"), Operation("divide", tensors, "scale")
    return Operation("multiply", tensors, "scale"), Operation("add", tensors, "loc")


def scaled(value: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor, standardizes: bool) -> torch.Tensor:
    """Return ``(value - loc) / scale`` where it `standardizes`, else ``value * scale + loc``."""
    # No addcmul: torch fuses its product and sum or not by how many values there are.
    return (value - loc) / scale if standardizes else value * scale + loc
