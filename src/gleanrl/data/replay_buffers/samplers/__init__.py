"""Samplers: which records make a batch."""

from gleanrl.compat import bind
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.consuming import ConsumingSampler
from gleanrl.data.replay_buffers.samplers.ensemble import SamplerEnsemble
from gleanrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from gleanrl.data.replay_buffers.samplers.slices import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from gleanrl.data.replay_buffers.samplers.staleness import StalenessAwareSampler
from gleanrl.data.replay_buffers.samplers.transitions import RandomSampler
from gleanrl.data.replay_buffers.samplers.without_replacement import SamplerWithoutReplacement

__all__ = [
    "ConsumingSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
]

bind(__name__, globals())
