"""Vector environments are created by name."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from gleanrl.envs import check_env_specs
from gleanrl.envs.libs.gym import FrameSkip, GymEnv, GymWrapper, make_vector
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.envs.libs.vectors import NativeOracle, vector
from tests.fakes import ORACLE_ID, TAXI_ID, OracleEnv, Script


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", TAXI_ID])
@pytest.mark.parametrize("categorical", [False, True])
def test_num_envs_makes_a_vector_environment(name: str, categorical: bool) -> None:
    env = GymEnv(name, num_envs=3, categorical_action_encoding=categorical)
    assert env.batch_size == (3,) and env.env_name == name and env.num_envs == 3
    assert env.single_action_space == gym.make(name).action_space
    check_env_specs(env)
    one = GymEnv(name, categorical_action_encoding=categorical)
    for role in ("observation", "action", "reward", "done"):
        spec, single = getattr(env, f"full_{role}_spec"), getattr(one, f"full_{role}_spec")
        assert {k: spec[k].shape for k in spec.keys(True, True)} == {
            k: (3, *single[k].shape) for k in single.keys(True, True)
        }


def test_autoreset_is_disabled() -> None:
    env = GymEnv("CartPole-v1", num_envs=2)
    assert (
        isinstance(env._env, SyncVectorEnv) and env._env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    )
    assert GymEnv("CartPole-v1", num_envs=1).batch_size == (1,)
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP}
    assert GymEnv("CartPole-v1", num_envs=2, vector_kwargs=kwargs).rollout(
        40, break_when_any_done=False
    ).shape == (
        2,
        40,
    )


def test_async_vectorization_steps_in_processes() -> None:
    env = GymEnv("CartPole-v1", num_envs=2, vectorization_mode="async", max_episode_steps=5)
    assert isinstance(env._env, AsyncVectorEnv)
    env.set_seed(3)
    data = env.rollout(12, break_when_any_done=False)
    assert data["next", "truncated"][..., 0].nonzero()[:, 1].tolist() == [4, 9] * 2
    env.close()
    same = GymEnv("CartPole-v1", num_envs=2, max_episode_steps=5)
    same.set_seed(3)
    assert torch.equal(same.reset()["observation"], data["observation"][:, 0])


def test_registered_vector_entry_point_is_used() -> None:
    env = GymEnv("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point", max_episode_steps=5)
    data = env.rollout(12, break_when_any_done=False)
    assert data["collector", "mask"][0].tolist() == [True] * 5 + [False] + [True] * 5 + [False]
    check_env_specs(env)
    for option in ({"frame_skip": 2}, {"from_pixels": True}):
        with pytest.raises(UnsupportedError, match="from_pixels, frame_skip"):
            GymEnv("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point", **option)


def test_seeds_of_members_are_consecutive_or_static() -> None:
    env = GymEnv("CartPole-v1", num_envs=6)
    assert env.set_seed(1) == 6
    rows = env.reset()["observation"]
    for i, row in enumerate(rows):
        assert np.array_equal(row.numpy(), gym.make("CartPole-v1").reset(seed=1 + i)[0])
    assert env.set_seed(4, static_seed=True) == 4
    rows = env.reset()["observation"]
    assert bool((rows == rows[0]).all()) and not torch.equal(rows, env.reset()["observation"])


def test_frame_skip_applies_to_each_member() -> None:
    env = GymEnv(ORACLE_ID, num_envs=2, frame_skip=3, script=Script(lengths=(5,), ending="terminated"))
    assert env.frame_skip == 3
    data = env.rollout(4, break_when_any_done=False)
    assert data["next", "observation"][0, :, 2].tolist() == [3, 5, 3, 5]
    assert data["next", "terminated"][1, :, 0].tolist() == [False, True, False, True]
    one = FrameSkip(OracleEnv(script=Script(ending="never")), 2)
    one.reset()
    assert one.step(np.zeros(2))[0].tolist() == [0, 0, 2]


@pytest.mark.parametrize("only", [True, False])
def test_pixels_are_rendered_for_each_member(only: bool) -> None:
    env = GymEnv(ORACLE_ID, num_envs=2, from_pixels=True, pixels_only=only, frame_skip=2)
    check_env_specs(env)
    data = env.rollout(3, break_when_any_done=False)
    assert data["pixels"].shape == (2, 3, 6, 8, 3) and ("observation" in data) is not only
    clock = data["next", "pixels"][:, :, 0, 0, 2]
    assert only or torch.equal(clock, data["next", "observation"][..., 2].to(torch.uint8))
    assert clock.max() >= 2


def test_options_that_a_wrapped_vector_environment_cannot_honour_are_refused() -> None:
    for option in ({"frame_skip": 2}, {"from_pixels": True}):
        with pytest.raises(UnsupportedError, match=r"GymEnv\(name, num_envs=...\)"):
            GymWrapper(NativeOracle(), **option)
    with pytest.raises(UnsupportedError, match="batch_size"):
        GymWrapper(NativeOracle(), batch_size=[2])
    assert GymWrapper(NativeOracle(), batch_size=[3]).batch_size == (3,)


def test_call_reaches_every_member() -> None:
    env = GymWrapper(vector())
    assert env.call("hello", "you") == tuple(f"hello you from {i}" for i in range(3))
    assert "batch_size=(3,)" in repr(env)
    env.close()
    assert env._env.closed


@pytest.mark.parametrize("num_envs", [-1, True, 2.0, "2"])
def test_invalid_num_envs_is_refused(num_envs: object) -> None:
    with pytest.raises(InvalidArgumentError, match="num_envs"):
        GymEnv("CartPole-v1", num_envs=num_envs)


def test_invalid_vectorization_mode_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="vectorization_mode"):
        make_vector("CartPole-v1", 2, None, 1, {"vectorization_mode": "threads"})
