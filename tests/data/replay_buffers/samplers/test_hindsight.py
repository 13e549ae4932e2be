"""Hindsight samplers behave as other samplers, and read goals at the draw."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, RandomSampler
from gleanrl.data.replay_buffers.samplers.episode_index import BoundaryKeys, EpisodeTable
from gleanrl.data.replay_buffers.samplers.hindsight import (
    CHOSEN,
    GOAL,
    Hindsight,
    HindsightRule,
    HindsightStrategy,
    with_hindsight,
    without_hindsight,
)
from gleanrl.data.replay_buffers.samplers.transitions import Transitions
from gleanrl.testing import check_sampler

RULE = HindsightRule(HindsightStrategy.FINAL, 0.5, ("t",))


def seeing(rule=RULE):
    return with_hindsight(RandomSampler(seed=0), rule, EpisodeTable(BoundaryKeys()))


def test_hindsight_samplers_follow_the_sampler_protocol():
    assert "state" in check_sampler(seeing).passed


def test_goals_are_read_at_the_draw():
    storage, sampler = LazyTensorStorage(10), seeing()
    done = (torch.arange(10) % 5 == 4)[:, None]
    storage.set(range(10), TensorDict({"t": torch.arange(10), "next": {"done": done}}, [10]))
    draw = sampler.draw(storage, 8)
    storage.set(range(10), TensorDict({"t": torch.arange(90, 100), "next": {"done": done}}, [10]))
    last = draw.slots // 5 * 5 + 4
    assert torch.equal(draw.extras[GOAL], torch.where(draw.extras[CHOSEN], last, draw.slots))
    assert draw.extras[CHOSEN].sum() == 4


def test_a_sampler_sees_goals_once_or_not_at_all():
    sampler = with_hindsight(seeing(), RULE, EpisodeTable(BoundaryKeys()))
    assert isinstance(sampler.unit, Hindsight) and isinstance(sampler.unit.unit, Transitions)
    assert isinstance(without_hindsight(sampler).unit, Transitions)


@pytest.mark.parametrize("strategy", HindsightStrategy)
def test_strategies_go_by_their_names(strategy):
    assert HindsightStrategy(strategy.value) is strategy and strategy == strategy.value
