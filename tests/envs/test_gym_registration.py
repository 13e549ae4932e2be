"""gleanrl environments are registered under a gymnasium id and wrapped again."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as check_gym_env

from gleanrl.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from gleanrl.envs import GymEnv, StepCounter
from gleanrl.envs.gym_registration import GymAdapter, _leaf_space
from gleanrl.errors import UnsupportedError
from gleanrl.testing import check_env
from tests.fakes import Script
from tests.fakes_base import CountingEnv, TwoActionEnv, TwoKeyEnv
from tests.fakes_marl import SurvivorEnv
from tests.testing.broken import Walk

LONG = Script(lengths=(9,))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Any:
    chosen = f"gleanrl-tests/Registered{abs(hash(request.node.name))}-v0"
    yield chosen
    gym.registry.pop(chosen, None)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_registered_environment_passes_gymnasiums_checker(name: str) -> None:
    Walk.register_gym(name, to_numpy=True, batch_size=())
    env = gym.make(name)
    check_gym_env(env.unwrapped, skip_render_check=True)
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (2,)) and env.action_space == spaces.Box(
        -1, 1, (1,)
    )


def test_registered_and_rewrapped_environment_is_unchanged(name: str) -> None:
    Walk.register_gym(name, to_numpy=True, entry_point=lambda: Walk(()), max_episode_steps=50)
    back, own = GymEnv(name), Walk(())
    for env in (back, own):
        env.set_seed(3)
    torch.manual_seed(0)
    first = back.rollout(30, break_when_any_done=False)
    torch.manual_seed(0)
    second = own.rollout(30, break_when_any_done=False)
    for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done"), "action"):
        assert torch.equal(first[key], second[key]), key
    assert set(check_env(GymEnv(name, num_envs=3)).skipped) == set()


def test_registration_passes_keywords_info_keys_and_limits(name: str) -> None:
    TwoKeyEnv.register_gym(
        name, info_keys=["place"], max_episode_steps=4, backend="gymnasium", script=Script(lengths=(2,))
    )
    env = gym.make(name, script=LONG)
    obs, info = env.reset()
    assert set(info) == {"place"} and isinstance(obs, torch.Tensor)
    ends = [env.step(env.action_space.sample())[3] for _ in range(4)]
    assert ends == [False, False, False, True]


def test_a_transform_around_each(name: str) -> None:
    counter = StepCounter(max_steps=3)
    CountingEnv.register_gym(name, transform=counter, to_numpy=True, kwargs={"script": LONG})
    first, second = gym.make(name), gym.make(name)
    for env in (first, second):
        obs, _ = env.reset()
        assert obs["step_count"] == 0
        assert [env.step(env.action_space.sample())[3] for _ in range(3)] == [False, False, True]
    assert counter.parent is None


def test_several_entries_are_dicts() -> None:
    env = GymAdapter(TwoActionEnv(LONG))
    assert isinstance(env.action_space, spaces.Dict)
    env.reset()
    obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
    assert isinstance(reward, float) and terminated is False and truncated is False
    assert (
        isinstance(GymAdapter(CountingEnv(LONG), to_numpy=False).reset()[0], torch.Tensor) and obs is not None
    )
    assert GymAdapter(TwoKeyEnv(LONG)).observation_space.contains(GymAdapter(TwoKeyEnv(LONG)).reset()[0])


@pytest.mark.parametrize(
    ("spec", "space"),
    [
        (OneHot(3, dtype=torch.int64), spaces.Discrete(3)),
        (Categorical(3), spaces.Discrete(3)),
        (Categorical(3, shape=(2,)), spaces.MultiDiscrete([3, 3])),
        (MultiCategorical([2, 3]), spaces.MultiDiscrete([2, 3])),
        (MultiOneHot([2, 3], dtype=torch.int64), spaces.MultiDiscrete([2, 3])),
        (Binary(3, dtype=torch.int8), spaces.MultiBinary([3])),
        (Bounded(-1.0, 2.0, (2,)), spaces.Box(-1, 2, (2,))),
        (Bounded(0, 255, (2,), dtype=torch.uint8), spaces.Box(0, 255, (2,), np.uint8)),
        (Unbounded((2,), dtype=torch.int64), spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64)),
    ],
    ids=str,
)
def test_specs_convert_to_gymnasium_spaces(spec: Any, space: spaces.Space[Any]) -> None:
    found = _leaf_space("x", spec)
    assert found == space
    value = spec.to_numpy(spec.rand())
    assert found.contains(value if value.shape else np.asarray(value)[()])
    assert bool(spec.is_in(spec.encode(found.sample())))


def test_unsupported_environments_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="without batch dimensions"):
        GymAdapter(Walk((3,)))
    with pytest.raises(UnsupportedError, match="one reward"):
        GymAdapter(SurvivorEnv())
    with pytest.raises(UnsupportedError, match="without a gymnasium space"):
        _leaf_space("x", NonTensor(()))
    with pytest.raises(ValueError, match="info_keys"):
        GymAdapter(Walk(()), ["speed"])
    with pytest.raises(UnsupportedError, match="backend"):
        Walk.register_gym(name, backend="gym")
    Walk.register_gym(name)
    with pytest.raises(ValueError, match="registered already"):
        Walk.register_gym(name)
