"""A chi-square bound, so that the tests of draws need no statistics package."""

from __future__ import annotations

import torch


def uniform(counts: torch.Tensor) -> bool:
    """Return whether counts fit equal chances: chi-square within five deviations of its mean."""
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = max(len(counts) - 1, 1)
    return bool((statistic - freedom).abs() < 5 * (2 * freedom) ** 0.5)


def frequencies(codes: torch.Tensor, size: int) -> torch.Tensor:
    """Return how often each integer below `size` occurs, as float64."""
    return torch.bincount(codes.flatten().to(torch.int64), minlength=size).to(torch.float64)
