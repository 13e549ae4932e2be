"""Data: specs, replay buffers and post-processing."""

from gleanrl.compat import bind
from gleanrl.data import replay_buffers as _replay_buffers
from gleanrl.data import specs as _specs
from gleanrl.data.datasets import from_arrays, from_hdf5, from_lerobot, from_minari, from_parquet
from gleanrl.data.postprocs import DensifyReward, MultiStep
from gleanrl.data.replay_buffers import *  # noqa: F403 - every part, under its own list of names
from gleanrl.data.specs import *  # noqa: F403 - every spec, under its own list of names

__all__ = ["DensifyReward", "MultiStep"]
__all__ += ["from_arrays", "from_hdf5", "from_lerobot", "from_minari", "from_parquet"]
__all__ += _replay_buffers.__all__
__all__ += _specs.__all__

bind(__name__, globals())
