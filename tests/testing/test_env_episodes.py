"""Rules about episodes and seeds accept unusual but right environments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.errors import ConformanceError
from gleanrl.testing.env_episodes import last_observation, rollout, seed
from gleanrl.testing.report import Skip
from gleanrl.testing.runs import Runs, Subject
from tests.testing.broken import OtherPath, SelfResetting, Walk


class Constant(Walk):
    """Observes a constant."""

    def packed(self) -> Any:
        out = super().packed()
        return out.set("observation", out["observation"] * 0)


class OneBeginning(Walk):
    """Begins every episode at the same place, and draws no random numbers."""

    def draw(self) -> torch.Tensor:
        return torch.full((self.rows, 1), 0.7)

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        super()._reset(tensordict, **kwargs)
        self.place[self.clock == 0] = 0
        return self.packed()


class OneBeginningResetting(OneBeginning):
    """As `OneBeginning`, but resets itself."""

    _step = SelfResetting._step


def runs(env: Any, num_steps: int = 60, first_seed: int = 0) -> Runs:
    return Runs(Subject(env, num_steps), first_seed)


@pytest.mark.parametrize("kind", [Walk, Constant, OneBeginning])
@pytest.mark.parametrize("first_seed", range(5))
def test_right_environment_passes_with_any_seed(kind: type[Walk], first_seed: int) -> None:
    last_observation(runs(kind(), first_seed=first_seed))


@pytest.mark.parametrize("first_seed", range(10))
def test_resets_in_a_step_are_found_with_any_seed(first_seed: int) -> None:
    with pytest.raises(ConformanceError, match="resets by itself"):
        last_observation(runs(SelfResetting(), first_seed=first_seed))


def test_too_few_ends_skip_the_rule() -> None:
    with pytest.raises(Skip, match="fewer than 3"):
        last_observation(runs(Walk(()), 5))


def test_environment_without_randomness_skips_the_seed_rule() -> None:
    with pytest.raises(Skip, match="no randomness"):
        seed(runs(OneBeginning()))


def test_wrong_result_of_set_seed_raises() -> None:
    class Strange(Walk):
        def set_seed(self, seed: int, static_seed: bool = False) -> Any:
            super().set_seed(seed)
            return seed

    with pytest.raises(ConformanceError, match="expected 2, the last seed that was used, got 0"):
        seed(runs(Strange()))


def test_rollouts_compare_values_and_name_the_place() -> None:
    rollout(runs(Walk(), 20))
    with pytest.raises(ConformanceError, match=r"\('next', 'reward'\) at step 0 of a rollout"):
        rollout(runs(OtherPath(), 20))
