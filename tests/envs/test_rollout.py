"""`env.rollout` against a loop over `step_and_maybe_reset`, in chunks of every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl.envs import GymWrapper
from gleanrl.envs import rollout as module
from gleanrl.errors import EnvironmentFailure, InvalidArgumentError, MissingArgumentError, UnsupportedError
from tests.fakes import OracleEnv, RaisingEnv, Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 5, 2))


def by_hand(env: Any, steps: int, stop: bool) -> TensorDict:
    root, rows = env.reset(), []
    for _ in range(steps):
        stepped, root = env.step_and_maybe_reset(root.set("action", torch.ones(*env.batch_size, 2)))
        rows.append(stepped.clone())
        if stop and stepped["next", "done"].any():
            break
    return torch.stack(rows, -1)


def ones(td: TensorDict) -> TensorDict:
    return td.set("action", torch.ones(*td.batch_size, 2))


@pytest.mark.parametrize("chunk", [1, 2, 3, 1024])
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("size", [(), (3,)])
def test_against_a_loop(monkeypatch: Any, size: tuple[int, ...], stop: bool, chunk: int) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    got = CountingEnv(SCRIPT, size).rollout(8, ones, break_when_any_done=stop)
    expected = by_hand(CountingEnv(SCRIPT, size), 8, stop)
    assert got.batch_size == expected.batch_size and got.names[-1] == "time"
    for key in expected.keys(True, True):
        assert torch.equal(got[key], expected[key]), key
    assert all(leaf.is_contiguous() for leaf in got.values(True, True))


@pytest.mark.parametrize("make", [lambda: CountingEnv(SCRIPT), lambda: GymWrapper(OracleEnv(script=SCRIPT))])
def test_it_stops_without_resetting(make: Any) -> None:
    env = make()
    first, second = env.rollout(20), env.rollout(20)
    assert (first.shape[0], second.shape[0]) == (3, 5), "no episode is skipped between two rollouts"
    assert first["next", "done"].squeeze(-1).tolist() == [False, False, True]


def test_a_policy_is_called_once_a_step() -> None:
    seen: list[float] = []

    def policy(td: TensorDict) -> TensorDict:
        seen.append(float(td["observation"][-1]))
        return ones(td).set("extra", td["observation"] * 2)

    data = CountingEnv(Script(lengths=(50,))).rollout(6, policy)
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and torch.equal(data["extra"], data["observation"] * 2)


def test_callback_sees_each_whole_step() -> None:
    env, steps = CountingEnv(SCRIPT), []
    data = env.rollout(3, ones, callback=lambda e, td: steps.append((e, td.clone())))
    assert len(steps) == 3 and all(e is env for e, _ in steps)
    for t, (_, step) in enumerate(steps):
        assert all(torch.equal(step[key], data[key][t]) for key in data.keys(True, True))


def test_from_a_root_of_ones_own() -> None:
    env = CountingEnv(Script(lengths=(50,)))
    root = env.step(ones(env.reset()))["next"].exclude("reward")
    data = env.rollout(4, ones, auto_reset=False, tensordict=root)
    assert data["observation"][:, -1].tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(MissingArgumentError, match="tensordict"):
        env.rollout(4, auto_reset=False)


def test_the_results_form() -> None:
    env = CountingEnv(Script(lengths=(50,)))
    lazy = env.rollout(3, return_contiguous=False)
    assert isinstance(lazy, LazyStackedTensorDict) and lazy.batch_size == (3,)
    marked = env.rollout(3, set_truncated=True)
    assert marked["next", "truncated"].squeeze(-1).tolist() == [False, False, True]
    assert torch.equal(marked["next", "done"], marked["next", "truncated"])
    assert not marked["next", "terminated"].any()
    out = marked.clone().zero_()
    assert env.rollout(3, out=out) is out and out["next", "observation"][-1, -1] == 3
    with pytest.raises(UnsupportedError, match="truncated"):
        CountingEnv(SCRIPT, flags=("done",)).rollout(2, set_truncated=True)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_bad_max_steps(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_steps"):
        CountingEnv(SCRIPT).rollout(steps)


def test_a_failure_says_where() -> None:
    env = GymWrapper(RaisingEnv(script=Script(lengths=(50,)), at=2))
    with pytest.raises(EnvironmentFailure, match="environment 0"):
        env.rollout(5)
