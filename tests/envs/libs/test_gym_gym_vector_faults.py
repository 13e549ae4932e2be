"""Invalid results of vector environments raise at the failing step, and the frame counts stay exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs.libs.gym import GymWrapper
from gleanrl.errors import EnvironmentContractError, EnvironmentFailure, NonFiniteError, PolicyError
from tests.contract.helpers import check_ledger, check_stream, on_td
from tests.envs.libs.vectors import NativeOracle, vector
from tests.fakes import FakeFailure, RaisingEnv, Script

NEVER = Script(ending="never")
Change = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Faulty(NativeOracle):
    """Returns `change(result)` from its `at`-th step."""

    def __init__(self, change: Change, at: int = 4) -> None:
        super().__init__(script=NEVER)
        self.change, self.at, self.steps = change, at, 0

    def step(self, actions: Any) -> Any:
        """Step, and change the result once."""
        self.steps += 1
        result = super().step(actions)
        return self.change(result) if self.steps == self.at else result


def replaced(position: int, make: Callable[[Any], Any]) -> Change:
    return lambda result: (*result[:position], make(result[position]), *result[position + 1 :])


FAULTS: dict[str, tuple[Change, type[Exception], str]] = {
    "dtype": (
        replaced(0, lambda o: o.astype(np.float64)),
        EnvironmentContractError,
        "'observation' .* float64",
    ),
    "shape": (replaced(0, lambda o: o[:, :2]), EnvironmentContractError, r"'observation' .* \(3, 2\)"),
    "one row": (replaced(0, lambda o: o[:1]), EnvironmentContractError, r"'observation' .* \(1, 3\)"),
    "no array": (replaced(0, lambda o: None), EnvironmentContractError, "'observation'"),
    "one reward": (replaced(1, lambda r: r[:1]), EnvironmentContractError, "'reward'"),
    "scalar reward": (replaced(1, lambda r: 1.0), EnvironmentContractError, "'reward'"),
    "square reward": (replaced(1, lambda r: np.ones((3, 3))), EnvironmentContractError, "'reward'"),
    "text reward": (replaced(1, lambda r: ["a"] * 3), EnvironmentContractError, "'reward'"),
    "one flag": (replaced(2, lambda f: False), EnvironmentContractError, "terminated expected 3 bools"),
    "two flags": (replaced(3, lambda f: f[:2]), EnvironmentContractError, "truncated expected 3 bools"),
    "float flags": (replaced(3, lambda f: f.astype(float)), EnvironmentContractError, "truncated expected 3"),
    "four parts": (lambda result: result[:4], EnvironmentContractError, "got 4 values"),
    "nan": (replaced(0, lambda o: np.where(o == 1, np.nan, o)), NonFiniteError, "environment 1 put out nan"),
    "infinite reward": (replaced(1, lambda r: r * np.inf), NonFiniteError, "'reward'"),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("fault", FAULTS)
def test_step_that_breaks_the_declaration_raises(fault: str) -> None:
    change, error, message = FAULTS[fault]
    made = SyncDataCollector(GymWrapper(Faulty(change)), frames_per_batch=18)
    batches = iter(made)
    with pytest.raises(error, match=message):
        next(batches)
    check_ledger(made)
    stats = made.stats()
    assert stats.delivered == 0 and stats.discarded == (18 if error is NonFiniteError else 9)
    following = next(iter(made))  # begins with a reset
    assert following["observation"][:, 0, 2].tolist() == [0, 0, 0]


def test_rewards_of_other_dtypes_and_types_are_cast() -> None:
    for make in (lambda r: r.astype(np.float64), lambda r: r.astype(np.int64), lambda r: r[:, None], list):
        data = GymWrapper(Faulty(replaced(1, make), at=2)).rollout(3)
        expected = [NEVER.reward(p, 0, 2) for p in range(3)]
        got = data["next", "reward"][:, 1, 0].tolist()
        assert got in (expected, [float(int(r)) for r in expected])


def test_flags_of_zeros_and_ones_are_accepted() -> None:
    data = GymWrapper(Faulty(replaced(2, lambda f: np.array([0, 1, 0])), at=2)).rollout(
        3, break_when_any_done=False
    )
    assert data["next", "terminated"][..., 0].tolist() == [[False] * 3, [False, True, False], [False] * 3]


@pytest.mark.parametrize("where", ["step", "reset"])
def test_exception_of_a_member_is_reported(where: str) -> None:
    env = vector(script=Script(lengths=(3,)), kind=RaisingEnv, at=5 if where == "step" else 2, where=where)
    made = SyncDataCollector(GymWrapper(env), frames_per_batch=30)
    with pytest.raises(FakeFailure, match=f"{where} raised FakeFailure: the fake broke on purpose") as caught:
        next(iter(made))
    assert isinstance(caught.value, EnvironmentFailure)
    check_ledger(made)
    assert made.stats().discarded == (12 if where == "step" else 9)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(3, 3), r"'action'.* expected shape \(3, 2\).*got \(3, 3\)"),
        (torch.full((3, 2), 0.1, dtype=torch.float64), "float32 can't hold"),
        (torch.full((3, 2), torch.nan), "NaN"),
    ],
)
def test_policy_output_of_another_shape_raises(action: torch.Tensor, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        next(iter(SyncDataCollector(GymWrapper(vector()), on_td(lambda td: action), frames_per_batch=9)))


def test_actions_beyond_their_bounds_are_passed_on() -> None:
    env = vector(script=NEVER)
    next(
        iter(
            SyncDataCollector(GymWrapper(env), on_td(lambda td: torch.full((3, 2), 1e9)), frames_per_batch=3)
        )
    )
    assert env.envs[2].actions[0].tolist() == [1e9, 1e9]


def test_missing_and_unexpected_entries_raise() -> None:
    class Losing(Faulty):
        def __init__(self, change: Change) -> None:
            super().__init__(change)
            one = spaces.Dict({"a": self.single_observation_space, "b": self.single_observation_space})
            self.single_observation_space, self.observation_space = one, batch_space(one, 3)

        def _emit(self) -> Any:
            return {"a": super()._emit(), "b": super()._emit()}

    for change, message in (
        (replaced(0, lambda o: {"a": o["a"]}), r"missing \['b'\]"),
        (replaced(0, lambda o: {**o, "c": 1}), r"unexpected \['c'\]"),
    ):
        made = SyncDataCollector(GymWrapper(Losing(change)), frames_per_batch=18)
        with pytest.raises(EnvironmentContractError, match=message):
            next(iter(made))


@pytest.mark.parametrize("length", [1, 2])
def test_episodes_of_a_few_steps_are_collected_exactly(length: int) -> None:
    for env in (vector(script=Script(lengths=(length,))), NativeOracle(script=Script(lengths=(length,)))):
        made = SyncDataCollector(GymWrapper(env), frames_per_batch=12, total_frames=36)
        check_stream(list(made), Script(lengths=(length,)))
        check_ledger(made)
