"""Public path of the helpers for collected batches."""

from __future__ import annotations

from gleanrl.collectors.trajectories import split_trajectories

__all__ = ["split_trajectories"]
