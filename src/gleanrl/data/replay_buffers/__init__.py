"""Replay buffers and their parts."""

from gleanrl.data.replay_buffers.buffer import ReplayBuffer
from gleanrl.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from gleanrl.data.replay_buffers.storages import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from gleanrl.data.replay_buffers.writers import RoundRobinWriter, Writer

__all__ = [
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "Storage",
    "TensorStorage",
    "Writer",
]
