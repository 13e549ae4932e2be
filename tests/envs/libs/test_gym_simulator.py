"""The gymnasium simulator inside a wrapper: seeds, frame skip, closing, and the format of its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gleanrl.envs.libs.gym_simulator import Simulator, checked_step
from gleanrl.errors import ClosedError, EnvironmentContractError
from tests.fakes import MutatingEnv, OracleEnv, Script

ACTION = np.zeros(2, np.float32)


def seeds(env: OracleEnv) -> list[int | None]:
    return [seed for seed, _ in env.resets]


class TestSeeds:
    def test_a_seed_is_for_the_next_reset_only(self) -> None:
        env = OracleEnv()
        simulator = Simulator(env)
        simulator.reset()
        simulator.seed(4)
        simulator.seed(5)
        for _ in range(3):
            simulator.reset()
        assert seeds(env) == [None, 5, None, None]

    def test_a_seed_given_to_the_reset_wins(self) -> None:
        env = OracleEnv()
        simulator = Simulator(env)
        simulator.seed(5)
        simulator.reset(seed=7)
        simulator.seed(6)
        simulator.reset(seed=None, options={"a": 1})
        simulator.reset()
        assert seeds(env) == [7, 6, None] and env.resets[1][1] == {"a": 1}


class TestFrameSkip:
    def test_without_frame_skip_step_is_the_environments_method(self) -> None:
        env = OracleEnv()
        assert Simulator(env).stepping() == env.step

    @pytest.mark.parametrize(("length", "expected"), [(5, 3), (3, 3), (2, 2), (1, 1)])
    def test_frame_skip_stops_at_the_end_of_the_episode(self, length: int, expected: int) -> None:
        env = OracleEnv(script=Script(lengths=(length,), ending="truncated"))
        simulator = Simulator(env, 3)
        simulator.reset()
        observation, reward, terminated, truncated, _ = simulator.stepping()(ACTION)
        assert observation[2] == expected == env.steps_taken
        assert reward == sum(env.script.reward(0, 0, step) for step in range(1, expected + 1))
        assert not terminated and truncated == (length <= 3)

    def test_environment_that_changes_its_action_gets_a_copy_each_frame(self) -> None:
        env = MutatingEnv(script=Script(lengths=(9,)))
        simulator = Simulator(env, 3)
        simulator.reset()
        action = np.float32([0.5, -0.5])
        simulator.stepping()(action)
        assert [a.tolist() for a in env.actions] == [[0.5, -0.5]] * 3 and action.tolist() == [0.5, -0.5]

    def test_a_reward_array_that_is_reused_is_added_up_correctly(self) -> None:
        class Reusing(OracleEnv):
            array = np.zeros(1, np.float32)

            def _reward(self) -> Any:
                self.array[0] = self.step_index
                return self.array

        simulator = Simulator(Reusing(script=Script(lengths=(9,))), 3)
        simulator.reset()
        assert simulator.stepping()(ACTION)[1].tolist() == [6]


class TestClosing:
    def test_closing_twice_closes_once(self) -> None:
        env = OracleEnv()
        simulator = Simulator(env)
        simulator.close()
        simulator.close()
        assert env.closed == 1
        with pytest.raises(ClosedError, match="closed"):
            simulator.reset()
        assert env.resets == []


@pytest.mark.parametrize("result", [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6), None, [1, 2, 3, 4, 5]])
def test_step_without_five_values_raises(result: Any) -> None:
    with pytest.raises(EnvironmentContractError, match="terminated, truncated"):
        checked_step(result)


@pytest.mark.parametrize("result", [np.zeros(2), (1, 2, 3), [1, {}], None])
def test_reset_without_two_values_raises(result: Any) -> None:
    class Odd(OracleEnv):
        def reset(self, **kwargs: Any) -> Any:
            return result

    with pytest.raises(EnvironmentContractError, match="observation, info"):
        Simulator(Odd()).reset()
