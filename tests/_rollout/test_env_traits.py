"""gleanrl environments declare their traits, and defaults apply to all other environments."""

from __future__ import annotations

import pytest
import torch

from gleanrl._rollout.env_traits import EnvTraits, extra, is_closed, seed_env
from gleanrl._rollout.tensordict_stepper import TensorDictStepper, make_stepper
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Categorical, Composite, Unbounded
from gleanrl.envs import GymEnv, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import ActionDiscretizer
from tests.fakes import Script
from tests.fakes_base import CountingEnv


class Proxy:
    """Delegates to another environment, but scales rewards."""

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


def test_custom_getattr_is_not_called():
    proxy = Proxy(CountingEnv())
    assert extra(proxy, "make_stepper") is None
    assert extra(proxy, "usage", 3) == 3
    assert proxy.asked == []


def test_wrapper_is_stepped_instead_of_its_inner_environment():
    proxy = Proxy(GymEnv("CartPole-v1"))
    assert type(make_stepper(proxy)) is TensorDictStepper
    collector = SyncDataCollector(proxy, frames_per_batch=5, total_frames=5)
    assert torch.equal(collector.next()["next", "reward"], torch.full((5, 1), 10.0))


class Hashing(Proxy):
    """Returns a next seed, as environments of other libraries do."""

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
    assert not EnvTraits.of(CountingEnv()).actions_vary
    env = Masked()
    env.reset()
    assert EnvTraits.of(env).actions_vary
    assert not EnvTraits.of(SerialEnv(1, Masked)).actions_vary
    collector = SyncDataCollector(env, frames_per_batch=20, total_frames=20)
    batch = collector.next()
    assert torch.equal(batch["action"], batch["observation"][:, 2].long() % 4)


def test_primed_keys_are_observations_that_are_also_states():
    assert EnvTraits.of(CountingEnv()).primed_keys == ()
    env = CountingEnv()
    env.observation_spec = Composite(observation=Unbounded((3,)), agent={"hidden": Unbounded((2,))})
    env.state_spec = Composite(agent={"hidden": Unbounded((2,))}, wind=Unbounded((1,)))
    assert EnvTraits.of(env).primed_keys == ()  # it declares that it has none
    assert EnvTraits.of(Proxy(env)).primed_keys == (("agent", "hidden"),)


class Choosy(CountingEnv):
    """Draws its own random actions, whose value is the step number."""

    def rand_action(self, tensordict=None):
        action = torch.full((*self.batch_size, 2), float(self._clock.reshape(-1)[0]) / 100)
        return (tensordict if tensordict is not None else self._blank()).set("action", action)


@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize("around", [lambda env: env, TransformedEnv])
@pytest.mark.parametrize("how", ["rollout", "policy", "collector", "first frames"])
def test_overridden_rand_action_is_called_at_each_step(how, around, size):
    env = around(Choosy(Script(lengths=(50,)), size))
    steps, frames = 6, 6 * env.numel()
    if how == "rollout":
        data = env.rollout(steps)
    elif how == "policy":
        data = env.rollout(steps, env.rand_step)
    elif how == "collector":
        data = SyncDataCollector(env, frames_per_batch=frames, total_frames=frames).next()
    else:
        data = SyncDataCollector(
            env,
            lambda td: td.set("action", torch.ones(*size, 2)).set("more", torch.ones(*size, 1)),
            frames_per_batch=frames,
            total_frames=frames,
            init_random_frames=frames,
        ).next()
        assert not data["more"].any()
    expected = torch.arange(steps).unsqueeze(-1).expand(*size, steps, 2) / 100
    torch.testing.assert_close(data["action"], expected)


def test_random_actions_that_a_transform_changes_are_drawn_from_its_spec():
    env = TransformedEnv(Choosy(), ActionDiscretizer(3))
    assert not env.traits.own_actions
    assert env.rollout(3)["action"].shape[:1] == (3,)


@pytest.mark.parametrize("make", [CountingEnv, lambda: TransformedEnv(CountingEnv())])
def test_is_closed_reports_closed_environments(make):
    env = make()
    assert not is_closed(env)
    env.close()
    assert is_closed(env)
    assert not is_closed(object())
