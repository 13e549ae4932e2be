"""What is done to collected batches before they are handed out."""

from gleanrl.compat import bind
from gleanrl.data.postprocs.postprocs import DensifyReward, MultiStep

__all__ = ["DensifyReward", "MultiStep"]

bind(__name__, globals())
