"""`check_env` accepts right environments, and each rule detects a violation."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode

from gleanrl.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv
from gleanrl.envs.transforms import Compose, ObservationNorm, RewardSum, StepCounter, TransformedEnv
from gleanrl.errors import ConformanceError, InvalidArgumentError, InvalidTypeError
from gleanrl.testing import check_env
from gleanrl.testing.env import RULES
from tests.envs.libs.vectors import NativeOracle, vector
from tests.fakes import TAXI_ID, DictEnv, FrameEnv, InfoEnv, NestedDictEnv, OracleEnv, ReusingEnv, TupleEnv
from tests.fakes_base import CountingEnv, TeamEnv, TwoActionEnv, TwoKeyEnv
from tests.fakes_marl import SurvivorEnv
from tests.testing.broken import BROKEN, SeedingWalk, Walk

ONLY_BATCHED = {"partial reset", "other rows"}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("batch_size", [(3,), ()])
def test_each_rule_detects_its_violation(broken: type[Walk], batch_size: tuple[int, ...]) -> None:
    rule = broken.__doc__
    assert rule in RULES
    if rule in ONLY_BATCHED and not batch_size:
        assert rule in check_env(broken(batch_size), num_steps=60).skipped
        return
    with pytest.raises(AssertionError, match=f"rule '{rule}'") as caught:
        check_env(broken(batch_size), num_steps=60)
    error = caught.value
    assert isinstance(error, ConformanceError) and error.rule == rule
    assert error.where and error.expected and error.got
    for text in (error.where, error.expected, error.got):
        assert text in str(error)
    if rule != "contract" and batch_size:
        check_without(broken(batch_size), rule)


def check_without(env: EnvBase, rule: str) -> None:
    try:
        assert rule in check_env(env, skip=[rule], num_steps=40).skipped
    except ConformanceError as another:
        assert another.rule != rule


def test_every_rule_has_a_violation() -> None:
    assert {kind.__doc__ for kind in BROKEN} == set(RULES)


@pytest.mark.parametrize("batch_size", [(3,), (1,), (), (2, 2)])
def test_right_environment_passes(batch_size: tuple[int, ...]) -> None:
    report = check_env(Walk(batch_size))
    assert set(report.passed) == set(RULES) - (ONLY_BATCHED if batch_size in ((), (1,)) else set())
    assert report.num_episodes > 5 and report.num_steps == 100


NAMES = ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1", "FrozenLake-v1", TAXI_ID]


@pytest.mark.parametrize(
    ("name", "categorical"), [*((name, False) for name in NAMES), ("FrozenLake-v1", True), (TAXI_ID, True)]
)
@pytest.mark.parametrize("num_envs", [0, 3])
def test_gymnasium_environments_pass(name: str, num_envs: int, categorical: bool) -> None:
    short = {"max_episode_steps": 12}
    env = GymEnv(name, num_envs=num_envs, categorical_action_encoding=categorical, **short)
    report = check_env(env, num_steps=40)
    assert set(report.skipped) == (set() if num_envs else ONLY_BATCHED)
    env.close()


def test_plain_gymnasium_environments_are_wrapped() -> None:
    assert check_env(gym.make("CartPole-v1")).name == "GymWrapper"
    report = check_env(gym.make_vec("CartPole-v1", num_envs=3))
    assert set(report.skipped) == {"partial reset", "other rows", "rollout"} and "reset" in str(report)
    assert check_env(lambda: gym.make("CartPole-v1")).num_episodes > 2


FAKES: dict[str, Any] = {
    **{
        f"{kind.__name__}{size}": lambda kind=kind, size=size: kind(batch_size=size)
        for kind in (CountingEnv, TwoKeyEnv, TwoActionEnv, TeamEnv, SurvivorEnv)
        for size in ((), (3,))
    },
    "flags of agents": lambda: TeamEnv(batch_size=(2,), nested_flags=True),
    "agents alone": lambda: SurvivorEnv(None),
    "first death": lambda: SurvivorEnv("any", batch_size=(2,)),
    **{
        kind.__name__: lambda kind=kind: kind()
        for kind in (OracleEnv, ReusingEnv, DictEnv, NestedDictEnv, TupleEnv, FrameEnv)
    },
    "info": lambda: GymWrapper(InfoEnv()).auto_register_info_dict(),
    **{mode.name: lambda mode=mode: vector(mode) for mode in AutoresetMode},
    "in place": lambda: vector(kind=ReusingEnv, copy=False),
    "dict vector": lambda: vector(kind=DictEnv),
    "native": NativeOracle,
    "serial": lambda: SerialEnv(3, CountingEnv),
    "serial of gymnasium's": lambda: SerialEnv(2, lambda: GymWrapper(OracleEnv())),
    "serial of batches": lambda: SerialEnv(2, lambda: CountingEnv(batch_size=(2,))),
}


@pytest.mark.parametrize("name", FAKES)
def test_library_environments_and_fakes_pass(name: str) -> None:
    """The fakes count their resets, so each run gets a fresh one. They draw no random numbers."""
    report = check_env(FAKES[name], num_steps=40, skip=["seed"])
    assert set(report.skipped) - {"seed"} <= {*ONLY_BATCHED, "rollout"}
    assert report.num_episodes >= 3


def test_serial_environments_with_randomness_pass() -> None:
    report = check_env(SerialEnv(3, lambda: GymEnv("CartPole-v1")))
    assert set(report.passed) == set(RULES)


@pytest.mark.slow
def test_environments_in_processes_pass() -> None:
    env = ParallelEnv(2, lambda: GymEnv("CartPole-v1", num_envs=2))
    assert set(check_env(env, num_steps=60).passed) == set(RULES)
    env.close()


def test_transformed_environments_pass() -> None:
    transform = Compose(StepCounter(15), RewardSum(), ObservationNorm(0.1, 2.0))
    env = TransformedEnv(GymEnv("CartPole-v1", num_envs=3), transform)
    assert set(check_env(env, num_steps=60).passed) == set(RULES)


def test_torchs_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    check_env(Walk())
    assert torch.equal(torch.get_rng_state(), state)
    for env in (SeedingWalk(), SeedingWalk):
        check_env(env)
        assert torch.equal(torch.get_rng_state(), state)


def test_check_env_closes_only_environments_that_it_made() -> None:
    made: list[Walk] = []

    def make() -> Walk:
        made.append(Walk())
        return made[-1]

    check_env(make)
    assert len(made) > 3 and all(env.is_closed for env in made)
    env = Walk()
    check_env(env)
    assert not env.is_closed


def test_unchecked_rules_give_a_reason() -> None:
    report = check_env(GymEnv("Pendulum-v1"), num_steps=10)
    assert "num_steps" in report.skipped["last observation"] and "batch" in report.skipped["other rows"]
    assert check_env(Walk(), skip=["seed"]).skipped == {"seed": "left out by the caller"}


@pytest.mark.parametrize(
    "options", [{"skip": ["sed"]}, {"skip": ["contract"]}, {"num_steps": 1}, {"num_steps": True}]
)
def test_invalid_arguments_raise(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        check_env(Walk(), **options)


@pytest.mark.parametrize("env", [3, "CartPole-v1", lambda: 3])
def test_objects_that_are_no_environments(env: Any) -> None:
    with pytest.raises(InvalidTypeError, match="env:"):
        check_env(env)


def test_check_env_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(Walk((2,)))
