"""Replay buffers in a Ray actor."""

from gleanrl.data.replay_buffers.ray.buffer import RayReplayBuffer, RemoteTensorDictReplayBuffer

__all__ = ["RayReplayBuffer", "RemoteTensorDictReplayBuffer"]
