"""The public names of the replay buffers at their second import path."""

from gleanrl.data.replay_buffers.buffer import ReplayBuffer
from gleanrl.data.replay_buffers.ensemble import ReplayBufferEnsemble
from gleanrl.data.replay_buffers.presets import (
    PrioritizedReplayBuffer,
    RemoteTensorDictReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.utils import InPlaceSampler, stack_tensors

__all__ = [
    "InPlaceSampler",
    "PrioritizedReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "stack_tensors",
]
