"""The TensorDict stepper derives columns and dtypes from specs, and reports wrong declarations."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from gleanrl._arrays.schema import Field
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.tensordict_stepper import TensorDictStepper, UndeclaredKeyWarning
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Composite, NonTensor, Unbounded
from gleanrl.errors import EnvironmentContractError
from tests._rollout.test_tensordict_stepper_steppers import Foreign, run
from tests.fakes import Script
from tests.fakes_base import (
    CountingEnv,
    TwoActionEnv,
)

SCRIPT = Script(seed=5, high=4)
LONG = Script(lengths=(50,))
T = 7


class TestSchema:
    def test_schema_has_root_and_next_columns(self) -> None:
        schema = TensorDictStepper(TwoActionEnv(LONG, (3,))).schema()
        flag = Field(torch.Size([1]), torch.bool)
        root = {("observation",): Field(torch.Size([3]), torch.float32)}
        root |= {(key,): flag for key in ("done", "terminated", "truncated")}
        after = {("next", *path): field for path, field in root.items()}
        after["next", "reward"] = Field(torch.Size([1]), torch.float32)
        assert schema.items() == {**root, **after}

    def test_a_state_that_only_reset_returns_stays_a_root_column(self) -> None:
        class Extra(CountingEnv):
            def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
                out = super()._reset(tensordict, **kwargs)
                return out.update({"task": torch.full((2,), 3.0), "_private": torch.ones(1)})

        with pytest.warns(UndeclaredKeyWarning, match=r"Extra: reset returned \['task'\]"):
            batch = run(env := Extra(LONG), TensorDictStepper(env))
        assert (batch["task"] == 3).all() and (batch["next", "task"] == 3).all(), (
            "it goes on to the next root"
        )
        env = Extra(LONG)
        env.state_spec = Composite(task=Unbounded((2,)))
        stepper = TensorDictStepper(env)
        assert ("task",) in stepper.schema() and ("next", "task") not in stepper.schema()
        assert ("_private",) not in stepper.schema()
        assert (run(env, stepper)["task"] == 3).all()

    def test_declared_private_key_has_a_column(self) -> None:
        class Noisy(CountingEnv):
            def _declare(self) -> None:
                super()._declare()
                self.observation_spec = self.observation_spec.set("_noise", Unbounded((1,)))

            def _package(self, flags: Any) -> TensorDictBase:
                out = super()._package(flags)
                return out.update({"_noise": out["observation"][..., 2:].clone(), "_other": torch.ones(1)})

        def policy(td: TensorDictBase) -> TensorDictBase:
            return td.set("action", td["_noise"].expand(2) / 8)

        batch = Noisy(LONG).rollout(T, policy)
        assert torch.equal(batch["_noise"], batch["observation"][:, 2:])
        assert torch.equal(batch["next", "_noise"], batch["next", "observation"][:, 2:])
        assert torch.equal(batch["action"], batch["_noise"].expand(T, 2) / 8) and "_other" not in batch
        collected = next(iter(SyncDataCollector(Noisy(LONG), policy, frames_per_batch=T, total_frames=T)))
        assert torch.equal(collected["action"], batch["action"])
        assert set(collected.exclude("collector").keys(True, True)) == {
            key for key in batch.keys(True, True) if "_noise" not in key
        }

    def changed(self, change: Any) -> TensorDictStepper:
        class Changed(CountingEnv):
            def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
                return change(super()._reset(tensordict, **kwargs))

        return TensorDictStepper(Changed(LONG))

    def test_missing_key_raises(self) -> None:
        with pytest.raises(EnvironmentContractError, match=r"Changed returned no \['observation'\].*'done'"):
            self.changed(lambda out: out.exclude("observation")).schema()

    def test_another_shape_raises(self) -> None:
        with pytest.raises(
            EnvironmentContractError, match=r"'observation'.*\(3,\) float32, got \(2,\) float32"
        ):
            self.changed(lambda out: out.set("observation", torch.zeros(2))).schema()

    def test_a_string_is_a_list(self) -> None:
        class Talking(CountingEnv):
            def _declare(self) -> None:
                super()._declare()
                self.observation_spec = Composite(text=NonTensor(shape=()), observation=Unbounded(shape=(3,)))

            def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
                return super()._package(flags).set("text", NonTensorData("hello"))

        env = Talking(LONG)
        schema = TensorDictStepper(env).schema()
        assert schema["text",] == schema["next", "text"] == Field(torch.Size([]), None)
        assert run(env, TensorDictStepper(env))["next", "text"] == ["hello"] * T

    def test_a_dynamic_shape_is_a_list(self) -> None:
        class Specs(dict[str, Any]):
            def keys(self, *args: bool) -> Any:
                return super().keys()

        env = Foreign(CountingEnv(LONG))
        env.full_observation_spec = Specs(
            observation=SimpleNamespace(shape=torch.Size([-1]), dtype=torch.float32)
        )
        schema = TensorDictStepper(env).schema()
        assert schema.lists == (("observation",), ("next", "observation"))
        assert schema["observation",] == Field(torch.Size([-1]), torch.float32)


class Double(CountingEnv):
    """Declares float32 and returns float64; returns float32 from its `at`-th step."""

    at = 0

    def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
        out = super()._package(flags)
        if self.at and len(self.actions) >= self.at:
            return out
        return out.set("observation", out["observation"].double())


class TestDtypes:
    def test_the_first_reset_fixes_the_dtype_with_one_warning(self) -> None:
        env = Double(SCRIPT)
        stepper = TensorDictStepper(env)
        with pytest.warns(
            UserWarning, match="'observation' is declared as torch.float32 but comes as torch.float64"
        ):
            stepper.schema()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batch = run(env, stepper)
            assert stepper.root()["observation",].dtype == torch.float32, "as the policy will see it"
        assert batch["observation"].dtype == batch["next", "observation"].dtype == torch.float32

    def test_later_dtype_change_raises(self) -> None:
        env = Double(LONG)
        env.__dict__["at"] = 3
        with pytest.warns(UserWarning), pytest.raises(StepFault) as caught:
            run(env, TensorDictStepper(env))
        assert caught.value.t == 2 and "expected dtype torch.float64, got torch.float32" in str(
            caught.value.cause
        )
