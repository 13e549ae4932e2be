"""gleanrl: data collection and replay storage for reinforcement learning in PyTorch."""

__version__ = "0.1.0"
