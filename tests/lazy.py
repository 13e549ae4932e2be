"""Tensors whose bytes differ from their values, and tensors without memory."""

from __future__ import annotations

import torch


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, negated twice: once in memory, once lazily.

    The imaginary part of a conjugated tensor has such a form; this tensor is contiguous as well.
    """
    lazy: torch.Tensor = torch._neg_view(-tensor)
    assert lazy.is_neg() and lazy.is_contiguous() and lazy.equal(tensor)
    return lazy


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype whose memory is freed."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found
