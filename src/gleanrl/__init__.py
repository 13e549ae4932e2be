"""gleanrl: data collection and replay storage for reinforcement learning in PyTorch."""

from gleanrl import compat

__version__ = "0.1.0"

compat.install()
