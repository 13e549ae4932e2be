"""Arguments of users become one value for each worker."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl._process.worker import Timeouts
from gleanrl.collectors.workers.arguments import (
    each,
    enough_of,
    frames_of,
    makers_of,
    policies_of,
    timeouts_of,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, LengthError, UnsupportedError
from tests.collectors.helpers import Net
from tests.fakes_base import CountingEnv


def test_environments_are_a_list_or_one_with_num_workers() -> None:
    assert [maker.source for maker in makers_of([CountingEnv] * 3, None, None)] == [CountingEnv] * 3
    assert [maker.source for maker in makers_of(CountingEnv, None, 2)] == [CountingEnv] * 2
    one = CountingEnv()
    made = [maker.source for maker in makers_of(one, None, 2)]
    assert made[0] is one and made[1] is not one
    assert [maker.kwargs for maker in makers_of(CountingEnv, [{"a": 1}, {}], 2)] == [{"a": 1}, {}]


@pytest.mark.parametrize(
    ("given", "count", "error", "message"),
    [
        (CountingEnv, None, InvalidTypeError, r"\[create_env_fn\] \* num_workers, or give num_workers="),
        ([], None, LengthError, "an entry for each worker"),
        ([CountingEnv] * 2, 3, LengthError, "expected 3 entries"),
        (CountingEnv, 0, InvalidArgumentError, "num_workers"),
    ],
)
def test_ambiguous_number_of_workers_is_refused(given: Any, count: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        makers_of(given, None, count)


def test_frames_of_a_batch_may_be_given_by_worker() -> None:
    assert frames_of(30, 2, True) == 30
    assert frames_of([15, 15], 2, True) == 30 and frames_of((15, 15), 2, False) == 15
    with pytest.raises(UnsupportedError, match=r"frames_per_batch: .* got \[10, 20\]; pass one number"):
        frames_of([10, 20], 2, True)
    with pytest.raises(LengthError, match="frames_per_batch: expected 2 entries"):
        frames_of([10], 2, True)
    with pytest.raises(InvalidArgumentError, match="frames_per_batch"):
        frames_of([10, 0], 2, True)


def test_arguments_are_single_or_by_worker() -> None:
    assert each("device", "cpu", 2) == ["cpu", "cpu"] and each("device", ("cpu", None), 2) == ["cpu", None]
    with pytest.raises(LengthError, match="device: expected 2 entries, one for each worker, got 1"):
        each("device", ["cpu"], 2)


def test_policies_are_pickled_once() -> None:
    first, second = policies_of(Net(), None, [False] * 2)
    assert first is second and not first.is_factory
    one, two, three = policies_of(None, [Net, lambda: Net(0.25), Net], [False] * 3)
    assert one is three and one.is_factory and two is not one
    placed, free = policies_of(Net(), None, [True, False])
    assert placed is not free and placed.load().state_dict().keys() == free.load().state_dict().keys()
    with pytest.raises(InvalidTypeError, match="the policy was given already"):
        policies_of(Net(), Net, [False] * 2)
    with pytest.raises(InvalidTypeError, match="policy_factory: expected a callable"):
        policies_of(None, [Net, 3], [False] * 2)


class Agent(Net):
    """Acts by a method with another name, as agents of CleanRL do."""

    def act(self, observation: Any) -> Any:
        return self(observation)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_method_that_hides_the_weights_of_its_module_is_reported(wrapped: bool) -> None:
    agent = Agent()
    policy = TensorDictSequential(TensorDictModule(agent.act, ["x"], ["action"])) if wrapped else agent.act
    with pytest.warns(
        UserWarning, match="present weights of Agent, because the method act .*to forward and pass"
    ):
        policies_of(policy, None, [False])


def test_methods_of_frozen_or_shown_modules_are_accepted() -> None:
    frozen, agent = Agent().requires_grad_(False), Agent()
    shown = nn.ModuleList([TensorDictModule(agent.act, ["x"], ["action"]), agent])
    for policy in (frozen.act, shown, TensorDictModule(agent, ["x"], ["action"])):
        policies_of(policy, None, [False])


def test_preemptive_threshold_and_timeouts_are_checked() -> None:
    assert [enough_of(given, 4) for given in (None, 0, 0.5, 7)] == [None, 1, 2, 4]
    with pytest.raises(InvalidArgumentError, match="preemptive_threshold"):
        enough_of(float("nan"), 4)
    assert timeouts_of(None) == Timeouts()
    with pytest.raises(InvalidTypeError, match="timeouts"):
        timeouts_of(3)
