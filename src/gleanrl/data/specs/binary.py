"""Tensors of independent zeros and ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gleanrl.data.specs.base import DeviceLike, require_listable
from gleanrl.data.specs.categorical import Categorical, checked_count
from gleanrl.data.specs.encodings import ending_with
from gleanrl.data.specs.geometry import as_size
from gleanrl.data.specs.rounding import require_real
from gleanrl.errors import InvalidArgumentError


class Binary(Categorical):
    """Elements that are 0 or 1, each independent of the others: choices among two.

    Args:
        n: the size of the last dimension; None: taken from `shape`.
        shape: of one value; None: `(n,)`.
        device: where values are drawn; None: torch's default device.
        dtype: any real dtype.

    Raises:
        InvalidArgumentError: if neither `n` nor `shape` is given, or they disagree.
    """

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
        super().__init__(2, size, device, dtype)

    def cardinality(self) -> int:
        """Return the number of values that the last dimension can have."""
        return 2 ** (self.shape[-1] if self.shape else 1)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """Return what the last dimension can be, `(count, *shape)`; see `TensorSpec.enumerate`."""
        each = self.space.all(use_mask, self.device)
        if not self.shape:
            return each.to(self.dtype)
        if not self.shape[-1]:  # one value, without elements
            return torch.zeros((1, *self.shape), dtype=self.dtype, device=self.device)
        require_listable(len(each) ** self.shape[-1], self.numel())
        rows = torch.cartesian_prod(*[each] * self.shape[-1]).reshape(-1, self.shape[-1]).to(self.dtype)
        lead = self.shape[:-1]
        return rows.reshape(-1, *(1 for _ in lead), self.shape[-1]).expand(-1, *lead, -1).clone()

    def _check_dtype(self, dtype: torch.dtype) -> None:
        require_real(dtype)

    def _nearest(self, value: Tensor) -> Tensor:
        return self.space.nearest((value.to(torch.float64) > 0.5).to(torch.int64)).to(self.dtype)

    def _describe(self) -> str:
        return "" if self.mask is None else "masked"
