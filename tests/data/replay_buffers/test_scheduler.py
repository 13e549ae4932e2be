"""Schedules change the parameters of samplers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer
from gleanrl.data.replay_buffers.scheduler import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError


def sampler(beta: float = 0.6) -> PrioritizedSampler:
    return PrioritizedSampler(10, alpha=0.8, beta=beta)


def values(make: Callable[[Any], ParameterScheduler], steps: int = 5) -> list[float]:
    subject = sampler()
    schedule, found = make(subject), []
    for _ in range(steps):
        schedule.step()
        found.append(subject.beta)
    return found


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda s: LinearScheduler(s, "beta", 1.0, 4), [0.7, 0.8, 0.9, 1.0, 1.0]),
        (lambda s: LinearScheduler(s, param_name="beta", final_value=0.0, num_steps=3), [0.4, 0.2, 0, 0, 0]),
        (lambda s: StepScheduler(s, "beta", gamma=0.5, n_steps=2), [0.6, 0.3, 0.3, 0.15, 0.15]),
        (
            lambda s: StepScheduler(s, "beta", gamma=0.1, mode="additive", max_value=0.75),
            [0.7, 0.75, 0.75, 0.75, 0.75],
        ),
        (lambda s: StepScheduler(s, "beta", min_value=0.5), [0.54, 0.5, 0.5, 0.5, 0.5]),
        (lambda s: LambdaScheduler(s, "beta", lambda n: 1 + n, max_value=3), [1.2, 1.8, 2.4, 3, 3]),
    ],
)
def test_schedules_set_the_expected_values(make, expected):
    assert values(make) == pytest.approx(expected)


def test_schedules_of_a_buffer_change_its_sampler():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(), batch_size=4)
    buffer.extend(torch.arange(4))
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    schedule = SchedulerList([LinearScheduler(buffer, "beta", 1.0, 2)])
    schedule.append(LinearScheduler(buffer, "alpha", 0.0, 2))
    schedule.step()
    assert (buffer.sampler.beta, buffer.sampler.alpha) == pytest.approx((0.8, 0.4))
    buffer.set_sampler(sampler())
    schedule.step()
    assert (buffer.sampler.beta, buffer.sampler.alpha) == (1.0, 0.0), "the sampler that it has then"


def test_restored_schedule_continues():
    subject = sampler()
    schedule = LinearScheduler(subject, "beta", 1.0, 4)
    schedule.step()
    state, saved = schedule.state_dict(), subject.state_dict()
    other = sampler(0.1)
    other.load_state_dict(saved)
    restored = LinearScheduler(other, "beta", 1.0, 4)
    restored.load_state_dict(state)
    for _ in range(4):
        schedule.step()
        restored.step()
        assert subject.beta == other.beta
    with pytest.raises(SchemaError, match="steps"):
        restored.load_state_dict({"steps": -1, "initial": 0.0})


def test_a_list_of_schedules_has_one_state():
    def schedules():
        subject = sampler()
        both = [LinearScheduler(subject, "beta", 1.0, 4), StepScheduler(subject, "alpha", 0.5)]
        return subject, SchedulerList(both)

    subject, schedule = schedules()
    schedule.step()
    other, restored = schedules()
    other.load_state_dict(subject.state_dict())
    restored.load_state_dict(schedule.state_dict())
    for _ in range(4):
        schedule.step()
        restored.step()
        assert (subject.beta, subject.alpha) == (other.beta, other.alpha)
    state = schedule.state_dict()
    with pytest.raises(SchemaError, match="a list of 2 states"):
        restored.load_state_dict({"schedulers": state["schedulers"][:1]})
    broken = [{"steps": 9, "initial": 0.5}, {"steps": -1, "initial": 0.5}]
    before = restored.state_dict()
    with pytest.raises(SchemaError, match="steps"):
        restored.load_state_dict({"schedulers": broken})
    assert restored.state_dict() == before, "nothing changed"


def test_invalid_options_are_refused():
    with pytest.raises(InvalidArgumentError, match="no attribute 'beta'"):
        LinearScheduler(RandomSampler(), "beta", 1.0, 4)
    with pytest.raises(InvalidTypeError, match="expected a ReplayBuffer or a Sampler"):
        LinearScheduler(object(), "beta", 1.0, 4)
    with pytest.raises(InvalidArgumentError, match="mode"):
        StepScheduler(sampler(), "beta", mode="other")
    for make in (
        lambda: LinearScheduler(sampler(), "beta", 1, 0),
        lambda: StepScheduler(sampler(), "beta", n_steps=0),
    ):
        with pytest.raises(InvalidArgumentError, match="steps: expected 1 or more"):
            make()
    with pytest.raises(InvalidTypeError, match="schedulers"):
        SchedulerList([3])
