"""`SerialEnv` steps its members one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.envs import GymWrapper, SerialEnv
from gleanrl.errors import ClosedError, InvalidArgumentError
from tests.envs.vector.makers import oracle
from tests.fakes import FakeFailure, OracleEnv, RaisingEnv
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


def test_failing_construction_closes_the_other_members():
    made = []

    def build():
        if len(made) == 2:
            raise FakeFailure("no")
        made.append(OracleEnv())
        return GymWrapper(made[-1])

    env = SerialEnv(3, build)
    with pytest.raises(FakeFailure):
        env.start()
    assert not env.is_started and [stream.closed for stream in made] == [1, 1]


def test_a_callable_that_returns_one_environment_gives_each_a_copy_of_it():
    env = oracle(3)
    for batch in (
        SerialEnv(2, lambda: env),
        SerialEnv(2, [lambda: env, lambda: env]),
        SerialEnv(1, lambda: env),
    ):
        data = batch.rollout(3)
        assert (data["observation"][..., 0] == 3).all() and batch.stream == [3] * len(batch.members)
        assert len({id(member) for member in (env, *batch.members)}) == len(batch.members) + 1
        batch.close()
        batch.rollout(2)  # the members are made again
        batch.close()
    assert not env.is_closed and not env.usage.started and env.rollout(3).shape == (3,)
    with pytest.raises(InvalidArgumentError, match="create_env_fn: the GymWrapper was started already"):
        SerialEnv(2, lambda: env)
    env.close()
    with pytest.raises(ClosedError, match="create_env_fn: the GymWrapper was closed"):
        SerialEnv(2, lambda: env)


def test_copies_keep_the_state_at_construction():
    env, other = oracle(3), oracle(3)
    batch = SerialEnv(2, lambda: env)
    env.rollout(3)
    assert batch.rollout(2)["observation"].shape == (2, 2, 3) and batch.episode == [0, 0]
    batch.close()
    batch = SerialEnv(2, lambda stream=3: {3: other, 5: oracle(5)}[stream])
    batch.update_kwargs({"stream": 5})
    assert batch.stream == [5, 5]
    batch.close()


def test_gradients_flow_through_members():
    class Walk(CountingEnv):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("reward", tensordict["action"].sum(-1, keepdim=True))

    env = SerialEnv(2, Walk)
    action = torch.zeros(2, 2, requires_grad=True)
    env.step(env.reset().set("action", action))["next", "reward"].sum().backward()
    assert torch.equal(action.grad, torch.ones(2, 2))


def test_serial_env_starts_no_processes():
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


def test_modules_of_members_are_not_registered():
    class Modular(CountingEnv):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

    env = SerialEnv(2, Modular)
    env.start()
    assert list(env.parameters()) == []
    assert sorted(env.state_dict()) == ["worker0", "worker1"]


def test_members_on_another_device_use_tensordicts():
    env = SerialEnv(2, lambda: CountingEnv(device="cpu"), device="meta")
    assert isinstance(env.make_stepper(), TensorDictStepper)
    assert not isinstance(SerialEnv(2, CountingEnv).make_stepper(), TensorDictStepper)
