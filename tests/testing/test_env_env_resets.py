"""Rules about partial resets and odd actions skip environments without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.data import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded
from gleanrl.testing.env import odd_action, odd_actions, other_rows, partial_reset
from gleanrl.testing.report import Skip
from gleanrl.testing.runs import Runs, Subject
from tests.fakes_marl import SurvivorEnv
from tests.testing.broken import Walk


@pytest.mark.parametrize(
    "spec",
    [
        Bounded(-1.0, 1.0, (3,)),
        Bounded(0, 4, (2,), dtype=torch.int64),
        OneHot(3, dtype=torch.int64),
        OneHot(3, shape=(2, 3), dtype=torch.int64),
        Categorical(3),
        Categorical(3, shape=(3,)),
        MultiCategorical([2, 3]),
        MultiOneHot([2, 3], dtype=torch.int64),
        Binary(3, dtype=torch.int8),
    ],
    ids=str,
)
def test_odd_actions_lie_outside_and_have_the_specs_form(spec: Any) -> None:
    action = odd_action(spec)
    assert action is not None and action.shape == spec.shape and action.dtype == spec.dtype
    assert not spec.is_in(action)


def test_unbounded_actions_are_never_odd() -> None:
    assert odd_action(Unbounded((2,))) is None
    env = Walk()
    env.action_spec = Unbounded((3, 1))
    with pytest.raises(Skip, match="no action lies outside"):
        odd_actions(Runs(Subject(env, 5), 0))


@pytest.mark.parametrize("rule", [partial_reset, other_rows])
def test_single_environments_have_no_rows(rule: Any) -> None:
    for size in ((), (1,)):
        with pytest.raises(Skip, match="isn't a batch of several"):
            rule(Runs(Subject(Walk(size), 5), 0))


@pytest.mark.parametrize("rule", [partial_reset, other_rows])
def test_episodes_of_one_step_leave_no_room(rule: Any) -> None:
    class Short(Walk):
        def _step(self, tensordict: Any) -> Any:
            out = super()._step(tensordict)
            return out.set("terminated", out["terminated"] | True).set("done", out["done"] | True)

    with pytest.raises(Skip, match="first step"):
        rule(Runs(Subject(Short(), 5), 0))


@pytest.mark.parametrize("rule", [partial_reset, other_rows])
@pytest.mark.parametrize("size", [(2,), (2, 2)])
def test_groups_of_agents_get_masks_of_their_shape(rule: Any, size: tuple[int, ...]) -> None:
    for ends in ("all", "any", None):
        rule(Runs(Subject(lambda ends=ends: SurvivorEnv(ends, batch_size=size), 10), 0))
