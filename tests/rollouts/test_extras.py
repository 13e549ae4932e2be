"""What an environment of ours says for itself, and what is assumed of others."""

from __future__ import annotations

import pytest
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Categorical, Composite, Unbounded
from gleanrl.envs import GymEnv, SerialEnv, TransformedEnv
from gleanrl.rollouts.extras import actions_vary, extra, primed_keys, seed_env
from gleanrl.rollouts.steppers import TensorDictStepper, make_stepper
from tests.fakes_base import CountingEnv


class Proxy:
    """Passes everything on to another environment, but scales rewards."""

    def __init__(self, env):
        self.env = env
        self.asked = []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.env, name)

    def step(self, tensordict):
        stepped = self.env.step(tensordict)
        stepped["next", "reward"] *= 10
        return stepped


def test_attributes_of_the_class_and_of_the_object_are_found():
    env = CountingEnv()
    assert extra(env, "usage") is env.usage
    assert extra(env, "primed_keys") == ()
    assert extra(env, "make_stepper") == env.make_stepper
    assert extra(env, "no such thing") is None
    assert extra(env, "no such thing", 3) == 3


def test_getattr_is_not_asked():
    proxy = Proxy(CountingEnv())
    assert extra(proxy, "make_stepper") is None
    assert extra(proxy, "usage", 3) == 3
    assert proxy.asked == []


def test_a_wrapper_is_stepped_itself_and_not_what_it_wraps():
    proxy = Proxy(GymEnv("CartPole-v1"))
    assert type(make_stepper(proxy)) is TensorDictStepper
    collector = SyncDataCollector(proxy, frames_per_batch=5, total_frames=5)
    assert torch.equal(collector.next()["next", "reward"], torch.full((5, 1), 10.0))


class Hashing(Proxy):
    """Returns the seed that would come next, as other libraries do."""

    def set_seed(self, seed, static_seed=False):
        self.env.set_seed(seed, static_seed=static_seed)
        return seed * 7919 + 13


@pytest.mark.parametrize(("num_envs", "static", "last"), [(None, False, 5), (3, False, 7), (3, True, 5)])
def test_the_last_seed_of_a_foreign_environment_is_counted(num_envs, static, last):
    env = GymEnv("CartPole-v1", num_envs=num_envs) if num_envs else GymEnv("CartPole-v1")
    assert seed_env(env, 5, static) == last
    assert seed_env(Hashing(env), 5, static) == last
    collector = SyncDataCollector(Hashing(env), frames_per_batch=6, total_frames=6)
    assert collector.set_seed(5, static_seed=static) == last
    assert TransformedEnv(Hashing(env)).set_seed(5, static_seed=static) == last


class Masked(CountingEnv):
    """Allows one action at a time, by the mask of its action spec."""

    def __init__(self):
        super().__init__()
        self.action_spec = Categorical(4)

    def allow(self):
        self.action_spec.update_mask(torch.arange(4) == int(self._clock[0]) % 4)

    def _reset(self, tensordict=None, **kwargs):
        fresh = super()._reset(tensordict, **kwargs)
        self.allow()
        return fresh

    def _step(self, tensordict):
        assert int(tensordict["action"]) == int(self._clock[0]) % 4
        outcome = super()._step(tensordict)
        self.allow()
        return outcome


def test_actions_under_a_mask_are_drawn_step_by_step():
    assert not actions_vary(CountingEnv())
    env = Masked()
    env.reset()
    assert actions_vary(env)
    assert not actions_vary(SerialEnv(1, Masked))
    collector = SyncDataCollector(env, frames_per_batch=20, total_frames=20)
    batch = collector.next()
    assert torch.equal(batch["action"], batch["observation"][:, 2].long() % 4)


def test_primed_keys_are_observations_that_are_read_too():
    assert primed_keys(CountingEnv()) == []
    env = CountingEnv()
    env.observation_spec = Composite(observation=Unbounded((3,)), agent={"hidden": Unbounded((2,))})
    env.state_spec = Composite(agent={"hidden": Unbounded((2,))}, wind=Unbounded((1,)))
    assert primed_keys(env) == []  # it says that it has none
    assert primed_keys(Proxy(env)) == [("agent", "hidden")]
