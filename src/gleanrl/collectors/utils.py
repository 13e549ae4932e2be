"""Public path of the helpers for collected batches."""

from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.compat import bind

__all__ = ["split_trajectories"]

bind(__name__, globals())
