"""Tensors whose bytes aren't their values yet."""

from __future__ import annotations

import torch


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, negated twice: once in memory, once lazily.

    As the imaginary part of a conjugated tensor is, but in one piece.
    """
    lazy: torch.Tensor = torch._neg_view(-tensor)
    assert lazy.is_neg() and lazy.is_contiguous() and lazy.equal(tensor)
    return lazy
