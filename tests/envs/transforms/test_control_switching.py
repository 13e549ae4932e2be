"""`ConditionalSkip` skips steps, and `ConditionalPolicySwitch` lets a second policy act."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import SerialEnv
from gleanrl.envs.transforms import (
    Compose,
    ConditionalPolicySwitch,
    ConditionalSkip,
    StepCounter,
    TransformedEnv,
)
from gleanrl.errors import UnsupportedError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

ENDLESS = Script(ending="never")


def clock(data):
    return data["observation"][..., 2]


def odd(tensordict):
    return clock(tensordict) % 2 == 1


def reply(tensordict):
    return tensordict.set("action", torch.full((*tensordict.batch_size, 2), -1.0))


def test_skipped_steps_skip_transforms_of_the_same_environment():
    def make():
        inner = TransformedEnv(CountingEnv(ENDLESS), StepCounter(step_count_key="inner"))
        skip = ConditionalSkip(lambda td: td["step_count"] % 2 == 1)
        middle = Compose(StepCounter(step_count_key="middle"), skip)
        return TransformedEnv(
            TransformedEnv(inner, middle, auto_unwrap=False), StepCounter(), auto_unwrap=False
        )

    env = make()
    for data in (env.rollout(6), next(iter(SyncDataCollector(make(), frames_per_batch=6)))):
        assert data["step_count"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
        for steps in (data["inner"].flatten(), data["middle"].flatten(), clock(data)):
            assert steps.tolist() == [0, 1, 1, 2, 2, 3]
        assert (data["next", "reward"] > 0).flatten().tolist() == [True, False] * 3
    assert len(env.actions) == 3


def test_some_members_of_a_batch_are_skipped():
    base = SerialEnv(2, lambda: CountingEnv(ENDLESS))
    env = TransformedEnv(base, ConditionalSkip(lambda td: torch.tensor([True, False])))
    data = env.rollout(4)
    assert clock(data["next"]).tolist() == [[0.0] * 4, [1.0, 2.0, 3.0, 4.0]]
    assert not data["next", "reward"][0].any() and data["next", "reward"][1].all()


def test_second_policy_takes_every_second_step():
    def make():
        switch = ConditionalPolicySwitch(reply, odd)
        chain = [StepCounter(step_count_key="all"), switch, StepCounter(step_count_key="own")]
        return TransformedEnv(CountingEnv(ENDLESS), Compose(*chain))

    env = make()
    for data in (env.rollout(4), next(iter(SyncDataCollector(make(), frames_per_batch=4)))):
        assert clock(data).tolist() == [0.0, 2.0, 4.0, 6.0] and clock(data["next"]).tolist() == [
            2.0,
            4.0,
            6.0,
            8.0,
        ]
        assert data["all"].flatten().tolist() == [0, 2, 4, 6] and data["own"].flatten().tolist() == [
            0,
            1,
            2,
            3,
        ]
    assert all((action == -1).all() for action in env.base_env.actions[1::2])


def test_second_policy_does_not_act_after_the_end():
    env = TransformedEnv(CountingEnv(Script(lengths=(3,))), ConditionalPolicySwitch(reply, odd))
    data = env.rollout(4, break_when_any_done=False)
    assert clock(data["next"]).tolist() == [2.0, 3.0] * 2
    assert data["next", "done"].flatten().tolist() == [False, True] * 2


@pytest.mark.parametrize("which", [0, 1])
def test_second_policy_may_act_first_in_some_environments(which):
    base = SerialEnv(2, lambda: CountingEnv(Script(lengths=(4,))))
    begins = ConditionalPolicySwitch(reply, lambda td: (clock(td) == 0) & (torch.arange(2) == which))
    data = TransformedEnv(base, begins).rollout(6, break_when_any_done=False)
    expected = [[0.0, 1.0, 2.0, 3.0, 0.0, 1.0]] * 2
    expected[which] = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    assert clock(data).tolist() == expected
    single = TransformedEnv(CountingEnv(ENDLESS), ConditionalPolicySwitch(reply, lambda td: clock(td) == 0))
    assert clock(single.reset()).item() == 1


@pytest.mark.parametrize("made", [ConditionalSkip(odd), ConditionalPolicySwitch(reply, odd)])
def test_use_without_an_environment_is_refused(made):
    with pytest.raises(UnsupportedError, match="buffer"):
        made(TensorDict())
