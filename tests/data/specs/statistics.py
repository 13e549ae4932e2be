"""A chi-square bound, so that tests of draws need no statistics package."""

from __future__ import annotations

import torch


def uniform(counts: torch.Tensor) -> bool:
    """Return whether counts agree with equal chances: chi-square is within five deviations of its mean."""
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = max(len(counts) - 1, 1)
    return bool((statistic - freedom).abs() < 5 * (2 * freedom) ** 0.5)


def frequencies(codes: torch.Tensor, size: int) -> torch.Tensor:
    """Return the number of occurrences of each integer below `size`, as float64."""
    return torch.bincount(codes.flatten().to(torch.int64), minlength=size).to(torch.float64)
