"""Members step into the rows of one block."""

from __future__ import annotations

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Lease
from gleanrl._rollout.tensordict_stepper import make_stepper
from gleanrl.envs import GymWrapper
from gleanrl.envs.vector.serial import MemberSteppers
from gleanrl.errors import UnsupportedError
from tests.envs.vector.makers import SCRIPT, oracle, with_goal
from tests.fakes import FakeFailure, RaisingEnv
from tests.fakes_base import CountingEnv

ACTION = {("action",): Field(torch.Size((2,)), torch.float32)}


def batch(envs, rules=FREELY):
    return MemberSteppers([make_stepper(env, rules) for env in envs], Lease())


def run(stepper, num_steps, ready=False):
    block = Block(Schema({**stepper.schema().items(), **ACTION}), stepper.batch_size, num_steps)
    block.column(("action",)).zero_()
    stepper.bind(block, ready)
    for t in range(num_steps):
        stepper.step(t)
    return block


@pytest.mark.parametrize("ready", [False, True])
def test_rows_equal_each_member_alone(ready):
    together = run(batch([oracle(0), oracle(1), CountingEnv(SCRIPT)]), 12, ready).batch()
    for index, env in enumerate([oracle(0), oracle(1), CountingEnv(SCRIPT)]):
        alone = make_stepper(env)
        block = Block(together_schema := Schema({**alone.schema().items(), **ACTION}), (), 12)
        block.column(("action",)).zero_()
        alone.bind(block, ready)
        for t in range(12):
            alone.step(t)
        for path in together_schema.paths:
            assert torch.equal(block.column(path), together.get(path)[index]), path


def test_carry_continues_from_block_to_block():
    stepper = batch([oracle(0), oracle(1)])
    first, second = run(stepper, 5), run(stepper, 5)
    ended = first.column(("next", "done"))[:, -1, 0]
    went_on = torch.equal(
        first.column(("next", "observation"))[~ended, -1], second.column(("observation",))[~ended, 0]
    )
    assert went_on
    assert stepper.root()["observation",].shape == (2, 3)


def test_resets_by_mask():
    stepper = batch([oracle(0), oracle(1), oracle(2)])
    stepper.schema()
    stepper.reset(torch.tensor([True, False, True]))
    assert stepper.root()[("observation",)][:, 1].tolist() == [1, 0, 1]
    stepper.reset()
    assert stepper.root()[("observation",)][:, 1].tolist() == [2, 1, 2]


def test_batches_can_be_nested():
    stepper = batch([CountingEnv(SCRIPT, (2,)), CountingEnv(SCRIPT, (2,))])
    assert stepper.batch_size == (2, 2)
    stepper.schema()
    stepper.reset(torch.tensor([[False, True], [False, False]]))
    assert stepper.root()[("observation",)][..., 1].tolist() == [[0, 1], [0, 0]]
    assert run(stepper, 4).batch()["next", "observation"].shape == (2, 2, 4, 3)


def test_limits_and_stops_and_ends():
    stepper = batch([oracle(0), oracle(1)], EpisodeRules(reset_when_done=False, max_steps=2))
    block = Block(Schema({**stepper.schema().items(), **ACTION}), stepper.batch_size, 3)
    block.column(("action",)).zero_()
    stepper.bind(block, False)
    stepper.step(0)
    stepper.step(1)
    stepper.stop(2)
    assert bool(block.column(("next", "done"))[:, :2].any(1).all())


def test_a_fault_names_the_environment_in_the_flat_batch():
    stepper = batch([oracle(), GymWrapper(RaisingEnv(3))])
    with pytest.raises(StepFault) as caught:
        run(stepper, 5)
    fault = caught.value
    assert (fault.env, fault.t, fault.during) == (1, 2, "step") and isinstance(fault.cause, FakeFailure)
    assert fault.made(2) == [3, 2]
    with pytest.raises(StepFault) as caught:
        batch([oracle(), GymWrapper(RaisingEnv(1, "reset"))]).schema()
    assert caught.value.env == 1


def test_unlike_columns_are_refused():
    with pytest.raises(UnsupportedError, match="environment 1 and environment 0 differ in .*goal"):
        batch([oracle(), with_goal()]).schema()


def test_use_outside_the_stepper_is_noticed():
    envs = [oracle(0), oracle(1)]
    stepper = batch(envs)
    stepper.schema()
    assert not stepper.disturbed
    envs[1].reset()
    assert stepper.disturbed
    stepper.reset()
    assert not stepper.disturbed
