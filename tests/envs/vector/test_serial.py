"""SerialEnv."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gleanrl.envs import GymWrapper, SerialEnv
from gleanrl.errors import InvalidArgumentError
from gleanrl.rollouts.steppers import TensorDictStepper
from tests.envs.vector.makers import oracle
from tests.fakes import FakeFailure, RaisingEnv
from tests.fakes_base import CountingEnv


def test_members_are_made_once_and_closed_once():
    env = SerialEnv(2, oracle)
    assert not env.is_started and env.members == ()
    env.reset()
    members = env.members
    env.reset()
    assert env.members == members and env.is_started
    env.close()
    env.close()
    assert [member.closed for member in members] == [True, True] or all(m.is_closed for m in members)


def test_if_one_cannot_be_made_the_others_are_closed():
    made = []

    def build():
        if len(made) == 2:
            raise FakeFailure("no")
        made.append(oracle())
        return made[-1]

    env = SerialEnv(3, build)
    with pytest.raises(FakeFailure):
        env.start()
    assert not env.is_started and all(member.is_closed for member in made)


def test_gradients_pass():
    class Walk(CountingEnv):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("reward", tensordict["action"].sum(-1, keepdim=True))

    env = SerialEnv(2, Walk)
    action = torch.zeros(2, 2, requires_grad=True)
    env.step(env.reset().set("action", action))["next", "reward"].sum().backward()
    assert torch.equal(action.grad, torch.ones(2, 2))


def test_no_processes():
    with pytest.raises(InvalidArgumentError, match="num_sub_threads"):
        SerialEnv(1, oracle, num_sub_threads=2)
    with pytest.raises(InvalidArgumentError, match="mp_start_method"):
        SerialEnv(1, oracle, mp_start_method="thread")


def test_a_fault_of_one_member_keeps_its_type():
    env = SerialEnv(2, [oracle, lambda: GymWrapper(RaisingEnv(1))])
    td = env.rand_action(env.reset())
    with pytest.raises(
        FakeFailure, match=r"environment 1 \(SerialEnv\): step raised FakeFailure: .* \(action \["
    ):
        env.step(td)


def test_modules_inside_members_are_not_its_own():
    class Modular(CountingEnv):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

    env = SerialEnv(2, Modular)
    env.start()
    assert list(env.parameters()) == []
    assert sorted(env.state_dict()) == ["worker0", "worker1"]


def test_members_elsewhere_step_through_tensordicts():
    env = SerialEnv(2, lambda: CountingEnv(device="cpu"), device="meta")
    assert isinstance(env.make_stepper(), TensorDictStepper)
    assert not isinstance(SerialEnv(2, CountingEnv).make_stepper(), TensorDictStepper)
