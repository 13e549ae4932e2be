"""The state of simulators is saved, and simulators with a complete state can resume in mid-episode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from gleanrl.envs import GymEnv, GymWrapper, ParallelEnv, PendulumEnv, SerialEnv, TransformedEnv
from gleanrl.envs.simulator_state import adopt_memory, check_memory, remember
from gleanrl.envs.transforms import StepCounter, Transform
from gleanrl.errors import SchemaError, UnsupportedError
from tests.fakes import Script
from tests.fakes_base import CountingEnv


class Drifting(gymnasium.Env[Any, Any]):
    """Observes the value in `held`, and increments it."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.held: Any = 0

    def _observed(self) -> Any:
        self.held += 1
        return np.array([float(self.held)])

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observed(), 0.0, False, False, {}


class Iterating(Drifting):
    """Keeps its value in an iterator, which can't be read."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1000))

    def _observed(self) -> Any:
        return np.array([float(next(self.numbers))])


class Telling(Iterating):
    """Provides its own state."""

    def get_state(self) -> int:
        return 1000 - self.numbers.__length_hint__()

    def set_state(self, state: int) -> None:
        self.numbers = iter(range(1000))
        for _ in range(state):
            next(self.numbers)


COUNT = [0]


class Elsewhere(Drifting):
    """Keeps its value in a global variable."""

    def _observed(self) -> Any:
        COUNT[0] += 1
        return np.array([float(COUNT[0])])


class Counting(Transform):
    """A user's transform with an undeclared state."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"])
        self.seen = 0

    def _call(self, tensordict: Any) -> Any:
        self.seen += 1
        return tensordict.set("observation", tensordict.get("observation") * 0 + self.seen)


def vector(mode: AutoresetMode) -> GymWrapper:
    return GymWrapper(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=mode))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("CartPole-v1"),
        lambda: GymEnv("FrozenLake-v1"),
        lambda: GymEnv("CartPole-v1", num_envs=2),
        *(lambda mode=mode: vector(mode) for mode in AutoresetMode),
        lambda: PendulumEnv(),
        lambda: GymWrapper(Drifting()),
        lambda: GymWrapper(Telling()),
        lambda: CountingEnv(Script(), (2,)),
        lambda: SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=3))),
        lambda: TransformedEnv(GymEnv("CartPole-v1"), Counting()),
    ],
)
def test_restored_simulator_continues_like_the_saved_one(make: Any) -> None:
    torch.manual_seed(0)
    one, other = make(), make()
    one.set_seed(3)
    other.set_seed(4)
    root = one.rollout(5, break_when_any_done=False, return_contiguous=False)
    other.rollout(2)
    root = one.step_mdp(root[..., -1])
    state = remember(one)
    check_memory(other, state)
    adopt_memory(other, state)
    for _ in range(12):
        action = one.rand_action(root.clone())
        (first, root), (second, _) = (
            one.step_and_maybe_reset(action.clone()),
            other.step_and_maybe_reset(action),
        )
        assert (first["next"] == second["next"]).all() or first["next", "observation"].isnan().any()


def test_saving_does_not_change_the_environment() -> None:
    one, other = GymEnv("CartPole-v1"), GymEnv("CartPole-v1")
    for env in (one, other):
        env.set_seed(3)
    torch.manual_seed(0)
    remember(one)
    first = one.rollout(20)
    torch.manual_seed(0)
    assert (first == other.rollout(20)).all()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: GymWrapper(Iterating()), r"GymWrapper\._simulator\.env\.numbers: a builtins.range_iterator"),
        (lambda: GymWrapper(Elsewhere()), "aren't its whole state; define get_state"),
        (lambda: ParallelEnv(2, lambda: GymEnv("CartPole-v1")), "ParallelEnv are in other processes"),
        (object, "another library's"),
    ],
)
def test_unsupported_simulators_are_refused_with_the_reason(make: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        remember(make())


def test_closed_environment_is_refused() -> None:
    env = GymEnv("CartPole-v1")
    env.close()
    with pytest.raises(UnsupportedError, match="it was closed"):
        remember(env)


@pytest.mark.parametrize(
    "other",
    [
        lambda: GymEnv("Pendulum-v1"),
        lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
        lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()),
    ],
)
def test_the_state_of_another_environment_is_refused(other: Any) -> None:
    one, env = GymEnv("CartPole-v1"), other()
    one.reset()
    env.reset()
    with pytest.raises(SchemaError):
        check_memory(env, remember(one))
    with pytest.raises(SchemaError):
        check_memory(one, remember(env))


def test_environment_before_its_first_reset_is_refused() -> None:
    env = GymEnv("CartPole-v1")
    with pytest.raises(UnsupportedError, match="behaves differently"):
        remember(env)
    env.reset()
    assert remember(env)


@pytest.mark.parametrize("asked", [(True, False), (False, True)])
def test_programs_may_ask_for_spec_text_or_sample_before_a_load(asked: tuple[bool, bool]) -> None:
    """Gymnasium makes the spec, the texts of spaces and their random generators at the first use."""
    source, target = (gymnasium.make("CartPole-v1") for _ in asked)
    for simulator, is_asked in zip((source, target), asked, strict=True):
        space = simulator.observation_space
        assert not is_asked or (simulator.spec and repr(space) and space.sample() is not None)
    env, other = GymWrapper(source), GymWrapper(target)
    env.rollout(3)
    other.reset()
    adopt_memory(other, remember(env))
    assert (target.unwrapped.state == source.unwrapped.state).all()
