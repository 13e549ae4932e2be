"""Tensors of independent zeros and ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gleanrl.data.specs.base import DeviceLike
from gleanrl.data.specs.categorical import checked_count
from gleanrl.data.specs.encodings import ending_with, require_ones
from gleanrl.data.specs.geometry import as_size
from gleanrl.data.specs.leaf import LeafSpec
from gleanrl.data.specs.spaces import Space
from gleanrl.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class BinarySpace(Space):
    """Zero and one.

    Attributes:
        n: 2, the number of values of one element.
    """

    n: int = 2


class Binary(LeafSpec):
    """Elements that are 0 or 1, each independent of the others.

    Args:
        n: the size of the last dimension; None: taken from `shape`.
        shape: of one value; None: `(n,)`.
        device: where values are drawn; None: torch's default device.
        dtype: any real dtype.

    Raises:
        InvalidArgumentError: if neither `n` nor `shape` is given, or they disagree.
    """

    space: BinarySpace

    def __init__(
        self,
        n: int | None = None,
        shape: Sequence[int] | int | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if n is not None:
            size = ending_with("Binary", checked_count("n", n), shape)
        elif shape is not None:
            size = as_size((shape,))
        else:
            raise InvalidArgumentError("Binary: expected n or shape, got neither")
        super().__init__(size, BinarySpace(), device, dtype)

    @property
    def n(self) -> int:
        """The size of the last dimension; 1 for a spec without dimensions."""
        return self.shape[-1] if self.shape else 1

    def cardinality(self) -> int:
        """Return the number of values in the domain."""
        return 2 ** self.numel()

    def _check_dtype(self, dtype: torch.dtype) -> None:
        require_ones(dtype)

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return torch.randint(2, shape, dtype=self.dtype, device=self.device, generator=generator)

    def _outside(self, value: Tensor) -> Tensor | None:
        return None if value.dtype == torch.bool else (value != 0) & (value != 1)

    def _nearest(self, value: Tensor) -> Tensor:
        return (value.to(torch.float64) > 0.5).to(self.dtype)
