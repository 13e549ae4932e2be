"""Data: specs, replay buffers and post-processing."""

from gleanrl.data import specs as _specs
from gleanrl.data.postprocs import MultiStep
from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorStorage,
    Writer,
)
from gleanrl.data.specs import *  # noqa: F403 - every spec, under its own list of names

__all__ = [
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MultiStep",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "Storage",
    "TensorStorage",
    "Writer",
]
__all__ += _specs.__all__
