"""Collection survives failures in every step of a batch, in resets, in the policy, and between two steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl.collectors.source import Grant
from gleanrl.data import Composite
from gleanrl.errors import EnvironmentContractError, EnvironmentFailure, NonFiniteError, PolicyError
from tests.collectors.helpers import (
    IDS,
    NEVER,
    SCRIPT,
    Calls,
    ResetFails,
    T,
    check_names,
    collect,
    collection,
    raising,
    steps_of,
)
from tests.fakes import Script
from tests.fakes_base import CountingEnv, CrookedEnv


def check(
    env: CountingEnv,
    policy: Any,
    error: type[BaseException],
    reason: str,
    failing: int = 0,
    whole: bool = False,
    **options: Any,
) -> pytest.ExceptionInfo[BaseException]:
    """Collect batches, one of which fails; return the error.

    Args:
        env: counts its steps.
        policy: the policy.
        error: the expected type of the error.
        reason: the discard reason under which the frames are counted.
        failing: frames of the step that failed inside the environment.
        whole: whether the batch fails as a whole, after all its steps.
        **options: of the collection.
    """
    made = collection(env, policy, **options)
    batches: list[TensorDict] = []
    with pytest.raises(error) as caught:
        for _ in range(4):
            batches.append(collect(made))
    whole_frames = steps_of(env) - failing
    lost = whole_frames - sum(b.numel() for b in batches)
    assert made.snapshot().ledger.stepped == whole_frames
    assert dict(made.snapshot().ledger.discards) == ({reason: lost} if lost else {})
    assert not whole or lost == T * made.num_envs
    resets = len(env.masks)
    following = [collect(made), collect(made)]
    assert len(env.masks) > resets
    assert (following[0]["observation"][..., 0, 2] == 0).all(), "the next batch begins with a reset"
    check_names([*batches, *following])
    assert made.snapshot().ledger.delivered == sum(b.numel() for b in [*batches, *following])
    assert made.snapshot().ledger.stepped == steps_of(env) - failing
    return caught


@pytest.mark.parametrize("at", range(1, 2 * T + 1))
@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_raising_step_discards_its_frames(at: int, batch_size: tuple[int, ...]) -> None:
    env = CrookedEnv("raise", at, script=SCRIPT, batch_size=batch_size)
    frames = max(1, env.batch_size.numel())
    caught = check(env, None, EnvironmentFailure, "environment", failing=frames)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("fault", ["missing", "dtype", "shape"])
@pytest.mark.parametrize("at", [1, T - 1, T, T + 1])
def test_step_that_breaks_its_declaration_discards_its_frames(fault: str, at: int) -> None:
    env = CrookedEnv(fault, at, script=SCRIPT, batch_size=(2,))
    check(env, None, EnvironmentContractError, "environment", failing=2)


class Undeclared(CountingEnv):
    """Returns entries that no spec declares: one always, one from steps only."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset(tensordict, **kwargs).set("task", torch.ones(*self.batch_size, 1))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        size = self.batch_size
        return (
            super()
            ._step(tensordict)
            .update({"task": torch.full((*size, 1), 2.0), "late": torch.ones(*size, 1)})
        )


def test_undeclared_entries_are_recorded_if_a_reset_has_them() -> None:
    with pytest.warns(UserWarning, match="no spec declares") as caught:
        made = collection(Undeclared(SCRIPT, (2,)))
        batch = collect(made)
        collect(made)
    assert len(caught) == 2, "one for those of the reset, one for those of steps"
    assert batch["next", "task"].eq(2).all() and batch["task"][:, 0].eq(1).all()
    assert "late" not in batch["next"].keys()


def test_missing_reward_raises() -> None:
    class Rewardless(CountingEnv):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.full_reward_spec = Composite(shape=self.batch_size)

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            return super()._step(tensordict).exclude("reward")

    made = collection(Rewardless(SCRIPT, (2,)))
    assert "reward" not in collect(made)["next"].keys() and math.isnan(made.stats().mean_return)


def test_the_error_names_episode_and_step() -> None:
    script = Script(lengths=(2,))  # 9 steps are 4 episodes and a half
    made = collection(CrookedEnv("raise", 10, script=script))
    collect(made)
    with pytest.raises(
        EnvironmentFailure, match=r"environment 0 \(CrookedEnv\), episode 4, step 1: step raised"
    ):
        collect(made)


@pytest.mark.parametrize("at", range(2, 8))
def test_raising_reset_discards_its_frames(at: int) -> None:
    env = ResetFails(at, script=SCRIPT)
    caught = check(env, None, EnvironmentFailure, "environment")
    assert "reset raised KeyError" in str(caught.value) and isinstance(caught.value, KeyError)


@pytest.mark.parametrize("batch_size", [(1,), (3,)])
@pytest.mark.parametrize("at", [1, T, T + 1, 2 * T])
def test_nan_discards_the_whole_batch(at: int, batch_size: tuple[int, ...]) -> None:
    env = CrookedEnv("nan", at, script=NEVER, batch_size=batch_size)
    caught = check(env, None, NonFiniteError, "nonfinite", whole=True)
    row, step = env.batch_size.numel() - 1, (at - 1) % T
    assert f"environment {row} put out nan in ('next', 'observation') at step {step}" in str(caught.value)


@pytest.mark.parametrize("at", range(1, 2 * T + 1))
def test_raising_policy_discards_its_frames(at: int) -> None:
    check(CountingEnv(SCRIPT, (2,)), Calls(at, raising(ZeroDivisionError())), ZeroDivisionError, "policy")


@pytest.mark.parametrize("at", [1, 3, T, T + 2])
def test_interrupted_policy_discards_its_frames(at: int) -> None:
    policy = Calls(at, raising(KeyboardInterrupt()))
    check(CountingEnv(SCRIPT), policy, KeyboardInterrupt, "interrupted")


@pytest.mark.parametrize("at", [1, T, T + 2])
@pytest.mark.parametrize("other", [lambda a: a.double() + 0.1, lambda a: a[..., :1]])
def test_unfitting_action_discards_its_frames(at: int, other: Any) -> None:
    check(CountingEnv(SCRIPT), Calls(at, other), PolicyError, "policy")


@pytest.mark.parametrize("at", [2, T - 1, T + 3])
def test_overflowing_action_discards_the_whole_batch(at: int) -> None:
    wide = Calls(at, lambda action: action.double() + 0.1)
    policy = lambda td: wide(td).set("action", td["action"].double())  # noqa: E731
    caught = check(CountingEnv(SCRIPT, (2,)), policy, PolicyError, "policy", whole=True)
    assert f"'action' holds 0.1 for environment 0 at step {(at - 1) % T} of the batch" in str(caught.value)


@pytest.mark.parametrize("at", [1, T, T + 2])
def test_nan_action_discards_the_whole_batch(at: int) -> None:
    env = CountingEnv(SCRIPT, (2,))
    caught = check(env, Calls(at, lambda a: a / 0), PolicyError, "policy", whole=True)
    assert f"NaN in 'action' for environment 0 at step {(at - 1) % T}" in str(caught.value)


def test_a_nan_of_an_earlier_row_is_reported_where_a_policy_or_a_step_fails_before_the_end() -> None:
    class Strict(CrookedEnv):
        """Raises at NaN actions."""

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            if bool(tensordict["action"].isnan().any()):
                raise OverflowError("on purpose")
            return super()._step(tensordict)

    def failing(row: TensorDictBase) -> TensorDictBase:
        if bool(row["observation"].isnan().any()):
            raise ZeroDivisionError
        return row.set("action", torch.zeros(2, 2))

    env = CrookedEnv("nan", 2, script=NEVER, batch_size=(2,))
    caught = check(env, failing, NonFiniteError, "nonfinite")
    assert "put out nan in ('next', 'observation') at step 1 of the batch" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    acting = Calls(3, lambda action: action / 0)
    caught = check(Strict("nothing", 100, script=NEVER, batch_size=(2,)), acting, PolicyError, "policy")
    assert "NaN in 'action' for environment 0 at step 2 of the batch" in str(caught.value)
    assert isinstance(caught.value.__cause__, EnvironmentFailure)


def test_check_that_fails_for_another_reason_keeps_the_error_of_the_policy(monkeypatch) -> None:
    def broken(*args: Any) -> None:
        raise AssertionError("check")

    made = collection(CountingEnv(SCRIPT), Calls(3, raising(ZeroDivisionError())))
    monkeypatch.setattr(made.columns, "check", broken)
    with pytest.raises(ZeroDivisionError):
        collect(made)


@pytest.mark.parametrize("at", [1, T, T + 2])
def test_the_interruptor_raises_after_a_whole_step(at: int) -> None:
    calls = itertools.count(1)
    stop = lambda _: next(calls) == at and raising(ZeroDivisionError())()  # noqa: E731
    check(CountingEnv(SCRIPT), None, ZeroDivisionError, "error", stop=stop)


def test_nothing_is_counted_before_the_first_step() -> None:
    policy = TensorDictModule(nn.Linear(3, 2), in_keys=["nowhere"], out_keys=["action"])
    env = CountingEnv(SCRIPT)
    made = collection(env, policy)
    with pytest.raises(PolicyError, match="nowhere"):
        collect(made)
    assert (steps_of(env), made.snapshot().ledger.stepped, dict(made.snapshot().ledger.discards)) == (
        0,
        0,
        {},
    )


@pytest.mark.parametrize("asked", ["lose", "collect", "reset"])
def test_undelivered_batch_is_discarded(asked: str) -> None:
    made = collection(CountingEnv(SCRIPT, (2,)))
    batches = [collect(made)]
    made.collect(Grant(T))
    if asked == "lose":
        made.lose("postproc")
    elif asked == "reset":
        made.reset()
    batches += [collect(made), collect(made)]
    reason = "postproc" if asked == "lose" else "interrupted"
    assert made.snapshot().ledger.discards == {reason: 2 * T}
    assert (batches[1]["observation"][..., 0, 2] == 0).all()
    check_names(batches)


def test_a_failure_overtakes_the_episodes_of_the_lost_batch() -> None:
    made = collection(CrookedEnv("raise", 2 * T, script=Script(lengths=(3,))))
    first = collect(made)
    with pytest.raises(EnvironmentFailure):
        collect(made)
    assert made.snapshot().trajectories.num_ended == 1, "episodes of a batch that nobody saw don't count"
    assert collect(made)[IDS].tolist() == [2, 2, 2, 3, 3]
    assert first[IDS].tolist() == [0, 0, 0, 1, 1]
