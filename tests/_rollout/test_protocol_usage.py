"""The lease tracks the last user of an environment, alone and under steppers of both kinds."""

from __future__ import annotations

from typing import Any

import pytest

from gleanrl._rollout.protocol import Lease, Usage
from gleanrl._rollout.tensordict_stepper import make_stepper
from gleanrl.envs import GymWrapper, check_env_specs
from tests.fakes import OracleEnv
from tests.fakes_base import CountingEnv


def test_last_user_holds_the_lease() -> None:
    usage = Usage()
    first, second = Lease(usage), Lease(usage)
    assert not first.held and not usage.started
    first.take()
    assert first.held and not second.held and usage.started
    usage.direct()
    assert not first.held
    second.take()
    second.give_up()
    assert not second.held


@pytest.mark.parametrize("make", [CountingEnv, lambda: GymWrapper(OracleEnv())], ids=["base", "gym"])
@pytest.mark.parametrize(
    "disturb",
    [
        lambda env: env.reset(),
        lambda env: env.rand_step(env.reset()),
        lambda env: env.rollout(2),
        check_env_specs,
        lambda env: make_stepper(env).reset(),
    ],
    ids=["reset", "step", "rollout", "check", "stepper"],
)
def test_stepper_notices_other_users(make: Any, disturb: Any) -> None:
    env = make()
    stepper = make_stepper(env)
    stepper.reset()
    assert not stepper.disturbed
    disturb(env)
    assert stepper.disturbed
    stepper.reset()
    assert not stepper.disturbed
