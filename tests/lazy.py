"""Tensors whose bytes aren't their values, or that have none."""

from __future__ import annotations

import torch


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, negated twice: once in memory, once lazily.

    As the imaginary part of a conjugated tensor is, but in one piece.
    """
    lazy: torch.Tensor = torch._neg_view(-tensor)
    assert lazy.is_neg() and lazy.is_contiguous() and lazy.equal(tensor)
    return lazy


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form whose memory was given back."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found
