"""The samplers of slices by name: what each is composed of."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.replay_buffers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from gleanrl.data.replay_buffers.samplers.prioritized import Prioritized
from gleanrl.data.replay_buffers.samplers.random import UnitSampler
from gleanrl.data.replay_buffers.samplers.slicing import Slices
from gleanrl.data.replay_buffers.samplers.units import Transitions
from gleanrl.data.replay_buffers.samplers.without_replacement import EpochSampler
from gleanrl.errors import InvalidTypeError, UnsupportedError

MADE = [
    (RandomSampler(), UnitSampler, Transitions),
    (SamplerWithoutReplacement(), EpochSampler, Transitions),
    (PrioritizedSampler(10, 0.6, 0.4), Prioritized, Transitions),
    (SliceSampler(slice_len=2), UnitSampler, Slices),
    (SliceSamplerWithoutReplacement(slice_len=2), EpochSampler, Slices),
    (PrioritizedSliceSampler(10, 0.6, 0.4, slice_len=2), Prioritized, Slices),
]


@pytest.mark.parametrize(("sampler", "draws", "unit"), MADE, ids=lambda part: type(part).__name__)
def test_a_sampler_is_a_way_to_draw_and_a_unit(sampler, draws, unit):
    assert type(sampler).__bases__ == (draws,) and type(sampler.unit) is unit


@pytest.mark.parametrize("make", [SliceSampler, SliceSamplerWithoutReplacement])
def test_the_trajectory_key_has_two_names(make):
    made = make(slice_len=2, traj_key="mine", trajectory_key=("mine",))
    assert made.unit.table.keys.trajectory == ("mine",)
    with pytest.raises(InvalidTypeError, match="traj_key and trajectory_key are one argument"):
        make(slice_len=2, traj_key="mine", trajectory_key="yours")


def test_given_ends_exclude_each_other():
    ends = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="exclude each other"):
        SliceSamplerWithoutReplacement(slice_len=2, ends=ends, trajectories=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="cache_values=True"):
        SliceSampler(slice_len=2, ends=ends)


def test_samplers_are_what_their_names_say():
    once, weighted = (
        SliceSamplerWithoutReplacement(slice_len=2),
        PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2),
    )
    assert isinstance(once, SliceSampler) and isinstance(once, SamplerWithoutReplacement)
    assert isinstance(weighted, SliceSampler) and isinstance(weighted, PrioritizedSampler)
    assert not isinstance(SliceSampler(slice_len=2), (SamplerWithoutReplacement, PrioritizedSampler))
