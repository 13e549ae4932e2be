"""The public names of the replay buffers at their second import path."""

from gleanrl.data.replay_buffers.buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
