"""Buffers that live in an actor of Ray."""

from gleanrl.data.replay_buffers.ray.buffer import RayReplayBuffer, RemoteTensorDictReplayBuffer

__all__ = ["RayReplayBuffer", "RemoteTensorDictReplayBuffer"]
