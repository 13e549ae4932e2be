"""The limit of an episode's steps, for environments that are counted side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_Array = np.ndarray[Any, Any]


class StepLimit:
    """Counts the steps of each environment's episode and tells which ones have reached the limit.

    A single gymnasium environment isn't counted in this way: its stepper knows the row of the limit beforehand.

    Args:
        batch_size: of the environments.
        max_steps: the limit; None for no limit, and then nothing is counted.

    Attributes:
        counts: the steps that each episode has taken, int64 ``[*batch]``.
    """

    def __init__(self, batch_size: Sequence[int], max_steps: int | None) -> None:
        self._max_steps = max_steps
        self.counts: _Array = np.zeros(tuple(batch_size), np.int64)

    def step(self, skipped: _Array | None = None) -> _Array | None:
        """Count a step; return where an episode has reached its limit, ``[*batch]`` bool, None if nowhere.

        Args:
            skipped: where the step was no step but a reset, ``[*batch]`` bool.
        """
        if self._max_steps is None:
            return None
        self.counts += 1
        if skipped is not None:
            self.counts[skipped] = 0
        over = np.asarray(self.counts >= self._max_steps)
        return over if np.count_nonzero(over) else None

    def restart(self, mask: _Array | None) -> None:
        """Begin new episodes where `mask` (bool, ``[*batch]``) is True; everywhere for None."""
        if mask is None:
            self.counts[...] = 0
        else:
            self.counts[mask] = 0
