"""Lazy policies get their parameters before they are copied."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule

from gleanrl.collectors.workers.source import initialised
from gleanrl.envs.vector.factories import Factory
from tests.fakes_base import CountingEnv


def test_a_lazy_policy_is_called_once_on_an_environment_that_is_closed_again() -> None:
    closed: list[bool] = []

    class Closing(CountingEnv):
        def close(self, *args: Any, **kwargs: Any) -> None:
            closed.append(True)
            super().close(*args, **kwargs)

    made: list[bool] = []

    def make() -> CountingEnv:
        made.append(True)
        return Closing()

    policy = TensorDictModule(torch.nn.LazyLinear(2), ["observation"], ["action"])
    assert initialised(policy, Factory(make)) is policy
    assert policy.module.weight.shape == (2, 3) and made == closed == [True]
    assert initialised(policy, Factory(make)) is policy and len(made) == 1
    assert initialised(None, Factory(make)) is None and len(made) == 1


def test_an_environment_that_was_given_or_is_held_stays_unused() -> None:
    env = CountingEnv()
    for factory in (Factory(env), Factory(lambda: env)):
        initialised(TensorDictModule(torch.nn.LazyLinear(2), ["observation"], ["action"]), factory)
        assert not env.is_closed and not env.masks
