"""Policies without parameters get them before copies are made."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule

from gleanrl.collectors.workers.initialising import initialised
from gleanrl.envs.vector.factories import Factory
from tests.fakes_base import CountingEnv


def test_a_lazy_policy_is_called_once_on_an_environment_that_is_closed_again() -> None:
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(CountingEnv())
        return made[-1]

    policy = TensorDictModule(torch.nn.LazyLinear(2), ["observation"], ["action"])
    assert initialised(policy, Factory(make)) is policy
    assert policy.module.weight.shape == (2, 3) and [env.is_closed for env in made] == [True]
    assert initialised(policy, Factory(make)) is policy and len(made) == 1
    assert initialised(None, Factory(make)) is None and len(made) == 1


def test_an_environment_that_was_given_stays_unused() -> None:
    env = CountingEnv()
    initialised(TensorDictModule(torch.nn.LazyLinear(2), ["observation"], ["action"]), Factory(env))
    assert not env.is_closed and not env.masks
