"""Picking steps out of one entry of a batch."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from gleanrl.objects import Objects

__all__ = ["take_rows"]

# torch gathers no unsigned integers but uint8; the bits are the same.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@overload
def take_rows(leaf: Tensor, dims: int, index: Tensor, *, pad: bool = False) -> Tensor: ...
@overload
def take_rows(leaf: Objects, dims: int, index: Tensor, *, pad: bool = False) -> Objects: ...
def take_rows(leaf: Tensor | Objects, dims: int, index: Tensor, *, pad: bool = False) -> Tensor | Objects:
    """Copy the steps at `index` out of a batch entry.

    Args:
        leaf: ``[*B, T, *feature]``, any dtype and strides; or objects of that shape, of which a blank one is a step of
            zeros.
        dims: number of batch dimensions, T included.
        index: ``[n]`` int64, positions in the flattened batch, on any device; each below the number N of
            steps, or with `pad` at most N.
        pad: whether N stands for a step of zeros.

    Returns:
        ``[n, *feature]`` contiguous, on the device of `leaf`, sharing no memory with it.

    Examples:
        >>> take_rows(torch.tensor([[5, 6], [7, 8]]), 2, torch.tensor([3, 0, 4]), pad=True)
        tensor([8, 5, 0])
    """
    if isinstance(leaf, Objects):
        return leaf.reshape(leaf.shape[:dims].numel(), *leaf.shape[dims:]).take(index, pad)
    flat = leaf.reshape(leaf.shape[:dims].numel(), *leaf.shape[dims:])
    signed = _SIGNED.get(leaf.dtype)
    if signed is not None:
        flat = flat.view(signed)
    if pad:
        # Reading a row of zeros behind the data is faster than filling rows of the result.
        flat = torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))])
    rows = flat.index_select(0, index.to(leaf.device))
    return rows if signed is None else rows.view(leaf.dtype)
