"""The vector simulator handles autoreset modes, seeds and partial resets."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from gleanrl.envs.libs.gym import GymWrapper
from gleanrl.envs.libs.gym_vector_simulator import VectorSimulator, merge_info, merged, with_rows
from gleanrl.errors import ClosedError, EnvironmentContractError, UnsupportedError
from tests.envs.libs.vectors import MODES, NativeOracle, record_statistics, vector
from tests.fakes import DictEnv, InfoEnv, OracleEnv, ReusingEnv, Script

TWO = Script(lengths=(2,))
MIXED = Script(lengths=(2, 4))
ACT = np.zeros((3, 2), np.float32)
FLAG = np.bool_


def rows(mask: list[int]) -> Any:
    return np.array(mask, FLAG)


@pytest.mark.parametrize("mode", MODES)
class TestModes:
    def test_a_step_returns_the_last_observation_and_a_reset_the_first(self, mode: AutoresetMode) -> None:
        simulator = VectorSimulator(vector(mode, script=MIXED, copy=False))
        simulator.reset()
        simulator.step(ACT)
        obs, _, terminated, truncated, _ = simulator.step(ACT)
        ended = terminated | truncated
        assert ended.tolist() == [True, False, True] and obs.tolist() == [[0, 0, 2], [1, 0, 2], [2, 0, 2]]
        fresh, _ = simulator.reset(ended)
        assert fresh[ended].tolist() == [[0, 1, 0], [2, 1, 0]]
        obs, _, _, _, _ = simulator.step(ACT)
        assert obs.tolist() == [[0, 1, 1], [1, 0, 3], [2, 1, 1]] and simulator.skipped is None

    def test_ended_rows_can_be_reset_separately(self, mode: AutoresetMode) -> None:
        simulator = VectorSimulator(vector(mode, script=MIXED, copy=False))
        simulator.reset()
        simulator.step(ACT)
        simulator.step(ACT)
        assert simulator.reset(rows([1, 1, 0]))[0][:2].tolist() == [[0, 1, 0], [1, 1, 0]]
        assert simulator.reset(rows([0, 0, 1]))[0][2].tolist() == [2, 1, 0]
        assert simulator.step(ACT)[0].tolist() == [[0, 1, 1], [1, 1, 1], [2, 1, 1]]

    def test_full_reset_restarts_all_episodes(self, mode: AutoresetMode) -> None:
        simulator = VectorSimulator(vector(mode, script=TWO))
        simulator.reset()
        simulator.step(ACT)
        simulator.step(ACT)
        assert simulator.reset()[0][:, 2].tolist() == [0, 0, 0]
        assert simulator.step(ACT)[0][:, 2].tolist() == [1, 1, 1] and simulator.skipped is None

    def test_pending_seed_is_used_by_the_next_reset_of_its_row(self, mode: AutoresetMode) -> None:
        env = vector(mode)
        simulator = VectorSimulator(env)
        simulator.reset()
        simulator.seed(10)
        simulator.reset(rows([0, 1, 0]))
        simulator.reset()
        simulator.reset()
        seeds = [[seed for seed, _ in one.resets] for one in env.envs]
        assert seeds == [[None, 10, None], [None, 11, None, None], [None, 12, None]]
        simulator.seed(4, static=True)
        simulator.reset()
        assert [one.resets[-1][0] for one in env.envs] == [4, 4, 4]
        simulator.seed(4)
        simulator.reset(seed=9)
        assert [one.resets[-1][0] for one in env.envs] == [9, 10, 11]

    def test_options_reach_the_environments(self, mode: AutoresetMode) -> None:
        env = vector(mode)
        wrapped = GymWrapper(env)
        root = wrapped.reset(options={"low": 0.1})
        assert env.envs[2].resets[-1][1] == {"low": 0.1}
        wrapped.reset(root.set("_reset", root["done"].logical_not()), options={"low": 0.2})
        assert env.envs[2].resets[-1][1] == {"low": 0.2}

    def test_statistics_wrapper_works_in_every_mode(self, mode: AutoresetMode) -> None:
        env = record_statistics(vector(mode, script=MIXED))
        simulator = VectorSimulator(env)
        simulator.reset()
        simulator.step(ACT)
        _, _, terminated, truncated, info = simulator.step(ACT)
        assert info["episode"]["l"][terminated | truncated].tolist() == [2, 2]


class TestNextStep:
    def test_reset_rows_are_reported_as_skipped(self) -> None:
        simulator = VectorSimulator(NativeOracle(script=MIXED))
        simulator.reset()
        simulator.step(ACT)
        simulator.step(ACT)
        assert simulator.skipped is None and simulator.pending.tolist() == [True, False, True]
        obs, _, terminated, _, _ = simulator.step(ACT)
        assert simulator.skipped.tolist() == [True, False, True] and obs[0].tolist() == [0, 1, 0]
        assert not terminated[[0, 2]].any() and simulator.pending is None

    def test_reset_rows_have_no_flags(self) -> None:
        class Sticky(NativeOracle):
            def step(self, actions: Any) -> Any:
                resetting = self.ended
                obs, reward, terminated, truncated, info = super().step(actions)
                return obs, reward, terminated | resetting, truncated, info

        simulator = VectorSimulator(Sticky(script=TWO))
        simulator.reset()
        simulator.step(ACT)
        assert simulator.step(ACT)[2].all()
        assert not simulator.step(ACT)[2].any() and simulator.skipped.all() and simulator.pending.all()

    def test_partial_reset_is_refused(self) -> None:
        simulator = VectorSimulator(NativeOracle())
        simulator.reset(rows([1, 1, 1]))
        with pytest.raises(UnsupportedError, match="resets its environments by itself"):
            simulator.reset(rows([1, 0, 0]))

    def test_one_seed_is_passed_to_the_whole_vector_environment(self) -> None:
        env = NativeOracle()
        simulator = VectorSimulator(env)
        simulator.seed(3)
        simulator.reset()
        simulator.reset()
        assert env.seeds == [3, None]
        with pytest.raises(UnsupportedError, match="static_seed"):
            GymWrapper(env).set_seed(3, static_seed=True)

    def test_reset_forgotten_by_async_workers_is_noticed(self) -> None:
        env = vector(AutoresetMode.NEXT_STEP, 2, TWO, asynchronous=True, shared_memory=False)
        simulator = VectorSimulator(env)
        simulator.reset()
        simulator.step(ACT[:2])
        simulator.step(ACT[:2])
        simulator.reset()
        simulator.step(ACT[:2])
        assert simulator.skipped is not None and simulator.skipped.all()
        simulator.close()


class TestSameStep:
    def test_lost_last_observation_warns_once(self) -> None:
        simulator = VectorSimulator(vector(AutoresetMode.SAME_STEP, script=TWO, kind=ReusingEnv))
        simulator.reset()
        simulator.step(ACT)
        with pytest.warns(
            UserWarning, match="overwrite the array that they returned, their last observation is lost"
        ):
            simulator.step(ACT)
        simulator.reset(rows([1, 1, 1]))
        simulator.step(ACT)
        simulator.step(ACT)

    def test_final_info_is_returned_for_ended_rows(self) -> None:
        simulator = VectorSimulator(vector(AutoresetMode.SAME_STEP, script=TWO, kind=InfoEnv))
        simulator.reset()
        simulator.step(ACT)
        info = simulator.step(ACT)[4]
        assert info["count"].tolist() == [2, 2, 2] and "final_info" not in info
        assert simulator.reset(rows([1, 1, 1]))[1]["count"].tolist() == [0, 0, 0]

    def test_missing_final_obs_raises(self) -> None:
        class Dropping(gym.vector.VectorWrapper):
            def step(self, actions: Any) -> Any:
                *result, info = self.env.step(actions)
                info.pop("final_obs", None)
                return *result, info

        simulator = VectorSimulator(Dropping(vector(AutoresetMode.SAME_STEP, script=TWO)))
        simulator.reset()
        simulator.step(ACT)
        with pytest.raises(EnvironmentContractError, match="final_obs"):
            simulator.step(ACT)


def test_final_dict_observations_are_complete() -> None:
    simulator = VectorSimulator(vector(AutoresetMode.SAME_STEP, script=TWO, kind=DictEnv))
    simulator.reset()
    simulator.step(ACT)
    obs = simulator.step(ACT)[0]
    assert obs["state"][:, 2].tolist() == [2, 2, 2] and obs["goal"][0, 0, 0] == np.float32(2 / 1024)


@pytest.mark.parametrize("mode", [None, "nonsense"])
def test_missing_autoreset_mode_raises(mode: Any) -> None:
    env = NativeOracle()
    env.metadata = {} if mode is None else {"autoreset_mode": mode}
    with pytest.raises(EnvironmentContractError, match="autoreset_mode"):
        VectorSimulator(env)
    env.metadata = {"autoreset_mode": "NextStep"}
    assert VectorSimulator(env).mode is AutoresetMode.NEXT_STEP


def test_closing_twice_closes_the_members_once() -> None:
    env = vector()
    simulator = VectorSimulator(env)
    simulator.close()
    simulator.close()
    assert [one.closed for one in env.envs] == [1, 1, 1]
    with pytest.raises(ClosedError):
        simulator.reset()


def test_merged_rows_are_copies() -> None:
    batch = {"a": np.zeros((3, 2)), "b": (np.zeros(3, int),)}
    made = with_rows(batch, {1: {"a": np.ones(2), "b": (5,)}})
    assert made["a"][:, 0].tolist() == [0, 1, 0] and made["b"][0].tolist() == [0, 5, 0]
    assert not batch["a"].any()
    both = merged(batch, made, rows([1, 1, 0]))
    assert both["a"][:, 0].tolist() == [0, 1, 0] and both["b"][0].tolist() == [0, 5, 0]
    for bad in (np.ones(3), np.ones((1, 2))):
        with pytest.raises(EnvironmentContractError, match="final_obs of environment 1"):
            with_rows(np.zeros((3, 2), np.float32), {1: bad})
    with pytest.raises(EnvironmentContractError, match="int64"):
        with_rows(np.zeros((3, 1), np.int64), {0: np.ones(1)})


def test_infos_of_rows_are_merged() -> None:
    old = {"a": np.array([1, 2]), "only_old": np.array([1.0, 2.0]), "deep": {"x": np.array([1, 1])}, "n": 3}
    new = {
        "a": np.array([7, 8]),
        "only_new": np.array([5, 6]),
        "deep": {"x": np.array([2, 2])},
        "final_obs": 0,
    }
    out = merge_info(old, new, rows([0, 1]))
    assert {k: v.tolist() for k, v in out.items() if isinstance(v, np.ndarray)} == {
        "a": [1, 8],
        "only_old": [1.0, 0.0],
        "only_new": [0, 6],
    }
    assert out["deep"]["x"].tolist() == [1, 2] and out["n"] == 3 and "final_obs" not in out


def test_partial_resets_need_a_known_vector_environment() -> None:
    assert VectorSimulator(vector(kind=OracleEnv)).partial and not VectorSimulator(NativeOracle()).partial
