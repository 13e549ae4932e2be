"""The stepper casts or refuses rewards and dtypes, and reports every environment error."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from gleanrl._arrays.block import Block
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.envs.libs.gym import GymWrapper
from gleanrl.envs.libs.gym_stepper import GymStepper
from gleanrl.errors import ClosedError, EnvironmentContractError
from tests.envs.libs.stepping import full_schema, run, same, stepper_of
from tests.fakes import DictEnv, DriftingEnv, MisdeclaredEnv, OracleEnv, RaisingEnv, Script

SCRIPT = Script(seed=3, low=1, high=5)
NEVER = Script(ending="never")


class TestRewards:
    @pytest.mark.parametrize(
        "value", [1, 0.1, True, np.float64(0.1), np.float16(0.1), np.array(0.1), np.array([0.1])]
    )
    def test_rewards_are_cast_to_float32(self, value: Any) -> None:
        class Paying(OracleEnv):
            def _reward(self) -> Any:
                return value

        env = GymWrapper(Paying(script=NEVER))
        (data,) = run(stepper_of(env), env, [2])
        assert data["next", "reward"].tolist() == [[float(np.float32(float(np.asarray(value).item())))]] * 2

    @pytest.mark.parametrize("value", [np.zeros(2), [1.0, 2.0], None, "one"])
    def test_rewards_other_than_numbers_raise(self, value: Any) -> None:
        class Paying(OracleEnv):
            def _reward(self) -> Any:
                return value

        env = GymWrapper(Paying(script=NEVER))
        with pytest.raises(StepFault) as caught:
            run(stepper_of(env), env, [2])
        assert isinstance(caught.value.cause, EnvironmentContractError) and "reward" in str(
            caught.value.cause
        )

    def test_vector_rewards_are_stored_by_both_paths(self) -> None:
        class Paying(OracleEnv):
            reward_space = spaces.Box(-5, 5, (2,), np.float64)

            def _reward(self) -> Any:
                return np.array([self.step_index, -1.0])

        results = []
        for make_stepper in (stepper_of, TensorDictStepper):
            env = GymWrapper(Paying(script=NEVER))
            assert env.reward_spec.shape == (2,) and env.reward_spec.dtype == torch.float64
            results.append(run(make_stepper(env), env, [3]))
        same(*results)
        assert results[0][0]["next", "reward"].tolist() == [[1, -1], [2, -1], [3, -1]]


def faulty(env: OracleEnv, size: int = 8) -> tuple[StepFault, GymWrapper, GymStepper]:
    wrapped = GymWrapper(env)
    stepper = stepper_of(wrapped)
    with pytest.raises(StepFault) as caught:
        run(stepper, wrapped, [size])
    assert caught.value.env == 0 and caught.value.__cause__ is caught.value.cause
    return caught.value, wrapped, stepper


class TestFaults:
    @pytest.mark.parametrize(
        ("where", "at", "t", "during"),
        [("step", 4, 3, "step"), ("reset", 2, 2, "reset"), ("reset", 3, 5, "reset")],
    )
    def test_exception_of_the_environment_names_its_row(
        self, where: str, at: int, t: int, during: str
    ) -> None:
        inner = RaisingEnv(at, where, script=Script(lengths=(3,), ending="terminated"))
        fault, env, stepper = faulty(inner)
        assert (fault.t, fault.during, fault.cause) == (t, during, inner.error)
        (data,) = run(stepper, env, [4])
        assert data["observation"][:, 2].tolist() == [0, 1, 2, 0], "the next block must begin with a reset"

    def test_the_row_before_a_failed_reset_is_whole(self) -> None:
        env = GymWrapper(RaisingEnv(2, "reset", script=Script(lengths=(2,), ending="terminated")))
        stepper = stepper_of(env)
        block = Block(full_schema(stepper, env), (), 4)
        block.column(("action",)).zero_()
        stepper.bind(block, True)
        stepper.step(0)
        with pytest.raises(StepFault):
            stepper.step(1)
        row = block.batch(2)[1]
        assert row["next", "observation"].tolist() == [0, 0, 2] and row["next", "terminated"].item()
        assert row["next", "reward"].item() == env.script.reward(0, 0, 2)

    def test_failing_first_reset_can_be_repeated(self) -> None:
        stepper = stepper_of(GymWrapper(RaisingEnv(1, "reset")))
        with pytest.raises(StepFault) as caught:
            stepper.schema()
        assert (caught.value.t, caught.value.during) == (0, "reset")
        stepper.reset()

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            ("dtype", ("float32", "float64")),
            ("integer", ("float32", "int64")),
            ("longer", ("(3,)", "(4,)")),
            ("shorter", ("(3,)", "(1,)")),
            ("scalar", ("(3,)", "()")),
        ],
    )
    def test_observation_that_changes_its_form_raises(self, change: str, parts: tuple[str, ...]) -> None:
        fault, _, _ = faulty(DriftingEnv(5, change, script=NEVER))
        assert isinstance(fault.cause, EnvironmentContractError) and fault.t == 4
        assert all(part in str(fault.cause) for part in ("observation", *parts)), str(fault.cause)

    def test_dict_observation_without_a_key_raises(self) -> None:
        fault, _, _ = faulty(DictEnv("observation", drop_at=3, script=NEVER))
        assert isinstance(fault.cause, EnvironmentContractError) and "goal" in str(fault.cause)

    @pytest.mark.parametrize("result", [(np.zeros(3, np.float32), 1.0, True, {}), None, 3])
    def test_step_with_four_values_raises(self, result: Any) -> None:
        class Old(OracleEnv):
            def step(self, action: Any) -> Any:
                return result

        fault, _, _ = faulty(Old(script=NEVER))
        assert isinstance(fault.cause, EnvironmentContractError)

    def test_keyboard_interrupts_pass_and_the_next_block_begins_with_a_reset(self) -> None:
        env = GymWrapper(RaisingEnv(3, error=KeyboardInterrupt(), script=NEVER))
        stepper = stepper_of(env)
        with pytest.raises(KeyboardInterrupt):
            run(stepper, env, [5])
        (data,) = run(stepper, env, [2])
        assert data["observation"].tolist() == [[0, 1, 0], [0, 1, 1]]

    def test_closed_environment_refuses_run_and_reset(self) -> None:
        env = GymWrapper(OracleEnv(script=NEVER))
        stepper = stepper_of(env)
        run(stepper, env, [2])
        env.close()
        with pytest.raises(ClosedError):
            run(stepper, env, [2])
        with pytest.raises(ClosedError):
            stepper.reset()


class TestDtypes:
    def test_a_misdeclared_dtype_warns_once_for_all_steppers(self) -> None:
        env = GymWrapper(MisdeclaredEnv(script=SCRIPT))
        with pytest.warns(UserWarning, match="float64"):
            stepper = stepper_of(env)
            stepper.schema()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (data,) = run(stepper, env, [9])
            run(stepper_of(env), env, [3])
            env.reset()
        assert data["next", "observation"].dtype == torch.float32
        assert (data["next", "observation"][:, 2] > 0).all()

    def test_list_observations_are_accepted(self) -> None:
        class Listing(OracleEnv):
            def _emit(self) -> Any:
                return [self.stream, self.episode, self.step_index]

        env = GymWrapper(Listing(script=SCRIPT))
        other = GymWrapper(OracleEnv(script=SCRIPT))
        same(run(stepper_of(env), env, [9, 4]), run(stepper_of(other), other, [9, 4]))

    def test_array_subclasses_are_accepted(self) -> None:
        class Masked(OracleEnv):
            def _emit(self) -> Any:
                return np.ma.masked_array(super()._emit())

        env = GymWrapper(Masked(script=SCRIPT))
        (data,) = run(stepper_of(env), env, [4])
        assert data["observation"][0].tolist() == [0, 0, 0]
