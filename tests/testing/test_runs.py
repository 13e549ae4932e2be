"""Runs use the public protocol and record the right values."""

from __future__ import annotations

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from gleanrl.envs import GymWrapper
from gleanrl.errors import ConformanceError
from gleanrl.testing.runs import Runs, Subject, as_text, leaf_specs, rows, same, with_action
from tests.envs.libs.vectors import NativeOracle, vector
from tests.fakes import Script
from tests.fakes_marl import SurvivorEnv
from tests.testing.broken import StartsDone, Walk

TWO = Script(lengths=(2, 3))


def test_run_records_the_results_of_step_and_reset() -> None:
    subject = Subject(GymWrapper(vector(AutoresetMode.SAME_STEP, script=TWO)), 6)
    trace = subject.run(0, subject.actions(0))
    assert trace.first["observation",].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    clocks = [step.outcome["observation",][:, 2].tolist() for step in trace.steps]
    assert clocks == [[1, 1, 1], [2, 2, 2], [1, 3, 1], [2, 1, 2], [3, 2, 3], [1, 1, 1]]
    assert [step.done.tolist() for step in trace.steps[:3]] == [
        [False] * 3,
        [True, False, True],
        [False, True, False],
    ]
    assert all(torch.equal(step.done, step.restarted) for step in trace.steps)
    assert trace.steps[1].following["observation",][:, 2].tolist() == [0, 2, 0]
    assert trace.num_episodes == sum(int(step.done.sum()) for step in trace.steps) == 6


def test_all_rows_are_reset_without_partial_resets() -> None:
    subject = Subject(GymWrapper(NativeOracle(script=TWO)), 4)
    trace = subject.run(0, subject.actions(0))
    assert trace.steps[1].done.tolist() == [True, False, True] and trace.steps[1].restarted.all()
    assert trace.steps[2].outcome["observation",][:, 2].tolist() == [1, 1, 1]


def test_actions_leave_torchs_random_state_alone() -> None:
    subject = Subject(Walk(), 5)
    state = torch.get_rng_state()
    one, two, other = subject.actions(1), subject.actions(1), subject.actions(2)
    assert torch.equal(torch.get_rng_state(), state) and len(one) == 5
    assert torch.equal(one[3]["action",], two[3]["action",]) and not torch.equal(
        one[3]["action",], other[3]["action",]
    )


def test_the_outermost_flags_count() -> None:
    subject = Subject(SurvivorEnv("all"), 6)
    trace = subject.run(0, subject.actions(0))
    assert [bool(step.done) for step in trace.steps] == [False, False, False, True, False, False]


def test_factories_make_a_fresh_one_for_each_run() -> None:
    subject = Subject(Walk, 3)
    first = subject.env
    assert subject.env_for_run() is not first and first.is_closed
    last = subject.env
    subject.close()
    subject.close()
    assert last.is_closed


def test_a_run_that_breaks_off() -> None:
    subject = Subject(StartsDone(), 3)
    with pytest.raises(ConformanceError, match="'contract': StartsDone"):
        subject.run(0, subject.actions(0))


def test_runs_are_made_once() -> None:
    runs = Runs(Subject(Walk(), 8), 0)
    assert runs.first is runs.first and runs.again is not runs.first and runs.env is runs.subject.env
    assert set(runs.declared[1]) - set(runs.declared[0]) == {("reward",)}
    assert [place for place, _, _ in runs.origins()][:3] == ["reset", "step 0", "step 1"]
    assert dict(leaf_specs(runs.env.full_action_spec)).keys() == {("action",)}


def test_helpers_compare_select_show_and_copy() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert same(nan, nan.clone()) and not same(nan, nan.double()) and not same(nan, nan[:1])
    assert not same(nan, torch.tensor([1.0, torch.nan]))
    assert rows(torch.arange(6).reshape(3, 2), torch.tensor([True, False, True])).tolist() == [[0, 1], [4, 5]]
    assert as_text(torch.arange(3)) == "[0, 1, 2]" and len(as_text(torch.arange(1000))) == 120
    root = TensorDict({"agents": TensorDict({"x": torch.zeros(2)}, [2])}, [])
    action = {("agents", "action"): torch.ones(2)}
    given = with_action(root, action)
    given["agents", "action"].zero_()
    assert ("agents", "action") not in root.keys(True) and action["agents", "action"].all()
