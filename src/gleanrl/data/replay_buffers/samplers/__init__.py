"""Samplers: which records make a batch."""

from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.random import RandomSampler
from gleanrl.data.replay_buffers.samplers.without_replacement import SamplerWithoutReplacement

__all__ = ["RandomSampler", "Sampler", "SamplerWithoutReplacement"]
