"""Tensors whose bytes aren't their values yet."""

from __future__ import annotations

import torch


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, negated twice: once in memory, once lazily."""
    lazy: torch.Tensor = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg() and lazy.equal(tensor)
    return lazy
