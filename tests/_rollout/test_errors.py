"""A step error names its place from any process, and users get it as a readable message."""

from __future__ import annotations

import pickle

import pytest

from gleanrl._process.remote_errors import RemoteTraceback
from gleanrl._rollout.errors import BATCH, StepFault, explain
from gleanrl.errors import EnvironmentContractError, EnvironmentFailure, GleanError, PolicyError
from tests.fakes import Script
from tests.fakes_base import CountingEnv


def test_fault_keeps_its_place_after_pickling() -> None:
    cause = ValueError("no")
    fault = StepFault(3, 1, "reset", cause)
    assert fault.made(2) == [4, 4] and StepFault(3, 1, "step", cause).made(2) == [3, 3]
    assert StepFault(3, 1, "step", cause, [4, 3]).made(2) == [4, 3]
    assert (fault.t, fault.env, fault.during, fault.cause) == (3, 1, "reset", cause)
    moved = pickle.loads(pickle.dumps(fault)).counted_from(4)
    assert (moved.t, moved.env, moved.during, str(moved.cause)) == (3, 5, "reset", "no")
    assert isinstance(moved.cause, ValueError) and isinstance(moved.cause.__cause__, RemoteTraceback)
    assert StepFault(3, -1, "step", cause).counted_from(4).env == -1


class TestExplain:
    env = CountingEnv(Script(lengths=(50,)))

    @pytest.mark.parametrize(
        ("index", "where", "place"),
        [
            (0, {}, "environment 0 (CountingEnv)"),
            (2, {"episode": 4, "step": 7}, "environment 2 (CountingEnv), episode 4, step 7"),
            (BATCH, {"step": 0}, "CountingEnv, step 0"),
        ],
    )
    def test_error_names_the_place_and_keeps_the_type(
        self, index: int, where: dict[str, int], place: str
    ) -> None:
        error = explain(StepFault(3, index, "step", ValueError("bad")), self.env, **where)
        assert str(error) == f"{place}: step raised ValueError: bad"
        assert isinstance(error, EnvironmentFailure) and isinstance(error, ValueError)

    @pytest.mark.parametrize("kind", [EnvironmentContractError, PolicyError, EnvironmentFailure])
    def test_gleanrl_errors_keep_their_class(self, kind: type[GleanError]) -> None:
        cause = kind("what came")
        error = explain(StepFault(3, 1, "step", cause), self.env)
        assert type(error) is kind and str(error) == "environment 1 (CountingEnv): what came"
        assert error.__cause__ is cause
