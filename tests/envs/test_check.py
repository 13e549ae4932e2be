"""`check_env_specs` accepts correct environments and names the errors of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.data import Bounded, Composite
from gleanrl.envs import GymEnv, check_env_specs
from gleanrl.errors import SpecError
from tests.fakes import Script
from tests.fakes_base import CountingEnv, CrookedEnv, TeamEnv

LONG = Script(lengths=(50,))


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: CountingEnv(LONG),
        lambda: CountingEnv(LONG, (3,)),
        lambda: CountingEnv(Script(lengths=(1,))),
        lambda: TeamEnv(LONG),
        lambda: GymEnv("CartPole-v1"),
        lambda: GymEnv("Pendulum-v1"),
    ],
    ids=["single", "batch", "short episodes", "team", "CartPole", "Pendulum"],
)
def test_correct_environments_pass(make: Any, contiguous: bool) -> None:
    check_env_specs(make(), return_contiguous=contiguous)


@pytest.mark.parametrize("fault", ["missing", "extra", "dtype", "shape"])
def test_a_step_that_breaks_its_specs_is_named(fault: str) -> None:
    key = "surprise" if fault == "extra" else "observation"
    with pytest.raises(AssertionError, match=key) as caught:
        check_env_specs(CrookedEnv(fault, at=2, script=LONG))
    assert isinstance(caught.value, SpecError)


def test_values_outside_their_spec_are_named() -> None:
    env = CountingEnv(LONG)
    env.observation_spec = Composite(observation=Bounded(-0.5, 0.5, (3,)))
    with pytest.raises(SpecError, match="observation"):
        check_env_specs(env)


def test_check_seeds_and_restores_torchs_random_state() -> None:
    env = CountingEnv(LONG)
    torch.manual_seed(3)
    check_env_specs(env, seed=11)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1)) and env.seeds == [11]


class DoubleEnv(CountingEnv):
    """Declares float32 observations and returns float64."""

    def _package(self, flags: dict[str, torch.Tensor]) -> Any:
        out = super()._package(flags)
        return out.set("observation", out["observation"].double())


def test_observations_of_another_dtype_than_the_declared_one_are_named() -> None:
    with pytest.raises(SpecError, match=r"observation.*float32.*float64"):
        check_env_specs(DoubleEnv(LONG))
    with pytest.warns(UserWarning, match="is cast"):
        check_env_specs(DoubleEnv(LONG), check_dtype=False)
