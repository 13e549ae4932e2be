"""`GymEnv` and `GymWrapper` apply their constructor arguments."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import pytest
import torch

import gleanrl.envs
from gleanrl.collectors import SyncDataCollector
from gleanrl.data.specs import Categorical, OneHot
from gleanrl.envs import SerialEnv, StepCounter, TransformedEnv, check_env_specs
from gleanrl.envs.libs.gym import GymEnv, GymWrapper, gym_backend
from gleanrl.errors import ClosedError, InvalidTypeError, MissingLibraryError, UnsupportedError
from tests.fakes import ORACLE_ID, OracleEnv, Script

LONG = Script(lengths=(50,))


def test_classes_are_exported_by_gleanrl_envs() -> None:
    assert gleanrl.envs.GymEnv is GymEnv and gleanrl.envs.GymWrapper is GymWrapper
    assert gym_backend() is gym


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("CartPole-v1"),
        lambda: GymEnv("FrozenLake-v1"),
        lambda: GymEnv("FrozenLake-v1", categorical_action_encoding=True),
        lambda: GymEnv("Acrobot-v1", device="cpu"),
        lambda: GymEnv("MountainCarContinuous-v0", frame_skip=4),
        lambda: GymEnv(ORACLE_ID, from_pixels=True, pixels_only=False),
    ],
)
def test_real_environments_keep_their_specs(make: Any) -> None:
    check_env_specs(make())


def test_categorical_is_the_wrappers_second_argument() -> None:
    assert isinstance(GymWrapper(gym.make("CartPole-v1"), True).action_spec, Categorical)
    assert isinstance(GymWrapper(gym.make("CartPole-v1")).action_spec, OneHot)


def test_the_checker_is_off_unless_asked_for() -> None:
    assert "PassiveEnvChecker" not in str(GymEnv("CartPole-v1"))
    assert "PassiveEnvChecker" in str(GymEnv("CartPole-v1", disable_env_checker=False))


def test_keywords_are_passed_to_gymnasium_make() -> None:
    env = GymEnv("FrozenLake-v1", is_slippery=False, max_episode_steps=3)
    assert len(env.rollout(20, policy=lambda td: td.set("action", torch.tensor([1, 0, 0, 0])))) == 3
    assert env.env_name == "FrozenLake-v1"


def test_wrapping_a_gleanrl_environment_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="GymWrapper"):
        GymWrapper(GymWrapper(OracleEnv()))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (OracleEnv(), r"got OracleEnv; wrap it: GymWrapper\(env\)"),
        (OracleEnv, r"got \w+; "),
        (lambda: OracleEnv(), r"got function; call it and wrap its result: GymWrapper\(make\(\)\)"),
        (GymWrapper(OracleEnv()), "got GymWrapper; pass that object without GymEnv"),
    ],
    ids=["environment", "class", "function", "wrapper"],
)
def test_object_in_place_of_a_name_raises_an_error_that_names_gymwrapper(name: Any, write: str) -> None:
    with pytest.raises(InvalidTypeError, match="env_name: expected the name of an environment, " + write):
        GymEnv(name)


@pytest.mark.parametrize("several", [{}, {"num_envs": 2}])
def test_unregistered_name_raises_an_error_that_names_the_registering_package(
    several: dict[str, int],
) -> None:
    with pytest.raises(
        gym.error.NameNotFound, match=r"Nowhere.*imported first, in each worker.*'package:Name-v0'"
    ):
        GymEnv("Nowhere-v0", **several)
    with pytest.raises(gym.error.NamespaceNotFound, match="'package:Name-v0'"):
        GymEnv("Nowhere/Name-v0", **several)
    with pytest.raises(gym.error.NameNotFound, match="Did you mean: `CartPole`\\?$"):
        GymEnv("Cartpole-v1", **several)


@pytest.mark.parametrize("several", [{}, {"num_envs": 2}])
def test_atari_without_its_package_raises_an_error_that_names_the_extra(
    several: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: spec for name, spec in gym.registry.items() if spec.namespace != "ALE"}
    monkeypatch.setattr("gymnasium.envs.registration.registry", known)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(gym.error.NamespaceNotFound, match=r"write 'ale_py:ALE/Pong-v5'.*gleanrl\[atari\]"):
        GymEnv("ALE/Pong-v5", **several)
    with pytest.raises(MissingLibraryError, match=r"pip install 'gleanrl\[atari\]'"):
        GymEnv("ale_py:ALE/Pong-v5", **several)


class Agents:
    """An environment with PettingZoo's interface."""

    possible_agents = ("anna", "bert")

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(-1, 1, (2,))

    action_space = observation_space

    def reset(self, seed: int | None = None, options: Any = None) -> None: ...

    def step(self, actions: Any) -> None: ...


class Vec:
    """An environment with the interface of a VecEnv of Stable-Baselines3."""

    num_envs = 2
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    step_async = step = reset = Agents.step


@pytest.mark.parametrize(
    ("env", "write"),
    [
        (
            Agents(),
            "(got|made) Agents, an environment of several agents.*PettingZooEnv, or an EnvBase with a group",
        ),
        (Vec(), "(got|made) Vec, a VecEnv of Stable-Baselines3.*SerialEnv or ParallelEnv"),
    ],
    ids=["agents", "vec"],
)
def test_other_interface_raises_an_error_that_names_a_supported_one(env: Any, write: str) -> None:
    takes = [GymWrapper, GymEnv, lambda env: SyncDataCollector(env, frames_per_batch=2)]
    takes += [
        lambda env: SyncDataCollector(lambda: env, frames_per_batch=2),
        lambda env: SerialEnv(2, lambda: env),
    ]
    for take in takes:
        with pytest.raises(InvalidTypeError, match=write):
            take(env)


def test_seeds_return_the_last_seed_used() -> None:
    env = GymEnv("CartPole-v1")
    assert env.set_seed(7) == 7
    first = env.reset()["observation"]
    second = env.reset()["observation"]
    assert not torch.equal(first, second)
    bare = gym.make("CartPole-v1")
    assert torch.equal(first, torch.from_numpy(bare.reset(seed=7)[0]))
    assert torch.equal(second, torch.from_numpy(bare.reset()[0]))


def test_a_seed_is_not_used_again_by_the_resets_inside_a_rollout() -> None:
    inner = OracleEnv(script=Script(lengths=(2,), ending="terminated"))
    env = GymWrapper(inner)
    env.set_seed(3)
    env.rollout(6, break_when_any_done=False)
    assert [seed for seed, _ in inner.resets] == [3, None, None, None]


class TestLibraryNames:
    """Attributes that programs read to learn about the library of an environment or its class."""

    def test_library_and_pixel_attributes_are_reported(self) -> None:
        env = GymEnv(ORACLE_ID, from_pixels=True, pixels_only=False)
        assert env.lib is gym and (env.from_pixels, env.pixels_only) == (True, False)
        assert env.get_library_name() == "gymnasium" == env.get_library_name(OracleEnv(script=LONG))
        assert not GymWrapper(OracleEnv(script=LONG)).from_pixels

    def test_available_envs_lists_the_registered_ids(self) -> None:
        assert ORACLE_ID in GymEnv.available_envs and "CartPole-v1" in GymEnv("CartPole-v1").available_envs
        assert GymEnv.available_envs == sorted(GymEnv.available_envs)


class TestAfterClose:
    """A reset after `close` creates the environment again, so that a program can evaluate in it after collecting."""

    @pytest.mark.parametrize("num_envs", [0, 2])
    @pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TransformedEnv(env, StepCounter())])
    def test_a_reset_opens_it_again(self, num_envs, wrap):
        env = wrap(GymEnv("CartPole-v1", num_envs=num_envs))
        expected = env.set_seed(3), env.rollout(5, break_when_any_done=False)
        env.close()
        env.close()
        assert env.is_closed
        with pytest.raises(ClosedError):
            env.step(env.rand_action())
        env.reset()
        assert not env.is_closed
        env.set_seed(3)
        again = env.rollout(5, break_when_any_done=False)
        assert torch.equal(again["observation"][..., 0, :], expected[1]["observation"][..., 0, :])
        env.close()
        assert env.is_closed

    def test_environment_can_be_reset_after_its_collector_has_ended(self):
        env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
        collector = SyncDataCollector(env, None, frames_per_batch=5, total_frames=10)
        assert sum(batch.numel() for batch in collector) == 10
        collector.shutdown()
        assert env.is_closed and env.rollout(3).shape == (3,)
        env.close()

    def test_pixels_are_rendered_again_after_a_reset(self):
        env = GymEnv("CartPole-v1", from_pixels=True)
        env.close()
        assert env.reset()["pixels"].shape == env.observation_spec["pixels"].shape
        env.close()


def test_policy_argument_is_refused_with_the_alternative():
    with pytest.raises(UnsupportedError, match="policy isn't served: pass it to the collector"):
        GymEnv("CartPole-v1", policy=lambda tensordict: tensordict)
