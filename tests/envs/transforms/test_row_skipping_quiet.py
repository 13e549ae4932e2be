"""Transforms are skipped in rows that end no episode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl.envs import GymEnv
from gleanrl.envs.transforms import (
    Compose,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from gleanrl.envs.transforms.row_columns import Output
from gleanrl.envs.transforms.row_skipping import Destinations, row_skipping_plan, skippable
from tests.envs.transforms.ways import needs_row_maps

STEPS = 6


def block(fields):
    made = Block(Schema(fields), (), STEPS)
    for column in made.columns:
        column.zero_()
    return made


def destinations(spare=False, required=()):
    """Return the inner and the outer block. With `spare`, all reward rows of the inner one share their memory."""
    flag, number = Field(torch.Size((1,)), torch.bool), Field(torch.Size((1,)), torch.float32)
    count = Field(torch.Size((1,)), torch.int64)
    observation = Field(torch.Size((4,)), torch.float32)
    fields = {"done": flag, "truncated": flag, "step_count": count, "episode_reward": number}
    fields |= {"observation": observation}
    both = {(key,): field for key, field in fields.items()}
    outer = block({**both, **{("next", *p): f for p, f in both.items()}, ("next", "reward"): number})
    inner = block(
        {
            ("next", key): {"reward": number, "observation": observation}.get(key, flag)
            for key in ("done", "terminated", "reward", "observation")
        }
    )
    if spare:
        position = inner.schema.index(("next", "reward"))
        inner.columns[position] = inner.columns[position][:1].expand(STEPS, 1)
    outputs = {key: Output(outer, (key,)) for key in ("truncated", "step_count", "episode_reward")}
    return Destinations(inner, outer, list(required), outputs)


@pytest.fixture
def chain_of():
    """Put transforms into an environment, and keep a reference to it."""
    held = []

    def make(*transforms):
        held.append(TransformedEnv(GymEnv("CartPole-v1"), Compose(*transforms)))
        return list(held[-1].transform)

    return make


@pytest.mark.parametrize(
    ("transforms", "seen", "number"),
    [
        (lambda: (StepCounter(5), RewardSum()), (), 2),
        (lambda: (StepCounter(5), RewardSum()), ("observation",), 2),
        (lambda: (StepCounter(5), RewardSum()), ("step_count",), 2),  # written ahead
        (lambda: (StepCounter(5), RewardSum()), ("episode_reward",), 1),
        (lambda: (StepCounter(5), RewardSum()), None, 1),
        # The sum reads the count.
        (lambda: (StepCounter(), RewardSum(["step_count"], ["episode_reward"])), None, 0),
        (lambda: (StepCounter(5), RewardScaling(0.0, 2.0), RewardSum()), (), 1),
        (lambda: (RewardSum(), RewardScaling(0.0, 2.0)), (), 0),
        (lambda: (StepCounter(5), StepCounter()), (), 0),  # both write the same count
        (lambda: (RewardSum(out_keys=["elsewhere"]),), (), 0),  # no column
    ],
)
def test_last_transforms_are_skipped_if_their_outputs_are_not_used(chain_of, transforms, seen, number):
    assert (
        len(skippable(chain_of(*transforms()), destinations(), seen, past_entries=False).transforms) == number
    )


@pytest.mark.parametrize(
    ("transforms", "number"),
    [
        (lambda: (StepCounter(5), RewardScaling(0.0, 2.0), RewardSum()), 2),
        (lambda: (RewardSum(), RewardScaling(0.0, 2.0)), 1),
        (lambda: (RewardScaling(0.0, 2.0), RewardSum(), RewardScaling(0.0, 2.0)), 0),
        (lambda: (StepCounter(5), RewardScaling(0.0, 2.0, out_keys=["step_count"])), 0),
        (lambda: (RewardSum(), RewardScaling(0.0, 2.0, out_keys=["episode_reward"])), 0),
    ],
)
def test_counters_before_skipped_arithmetic_are_skipped_too(chain_of, transforms, number):
    assert len(skippable(chain_of(*transforms()), destinations(), (), past_entries=True).transforms) == number


def test_skipped_sums_add_the_rewards_at_their_place_in_the_chain(chain_of):
    ours = destinations()
    scaling = RewardScaling(0.0, 2.0)
    (summed,) = skippable(chain_of(RewardSum(), scaling), ours, (), past_entries=True).addends.values()
    assert np.shares_memory(summed, ours.inner.array(("next", "reward")))
    (summed,) = skippable(
        chain_of(RewardScaling(0.0, 2.0), RewardSum()), ours, (), past_entries=False
    ).addends.values()
    assert np.shares_memory(summed, ours.outer.array(("next", "reward")))


def test_sums_of_rewards_without_a_column_are_not_skipped(chain_of):
    chain = chain_of(RewardSum(), RewardScaling(0.0, 2.0))
    assert not skippable(chain, destinations(spare=True), (), past_entries=True).transforms


def hooks(chain):
    return [transform.stepping() for transform in chain]


@needs_row_maps
@pytest.mark.parametrize(
    ("transforms", "required", "mapped", "always"),
    [
        (lambda: (StepCounter(5), RewardSum()), (), set(), 0),
        (lambda: (RewardSum(), RewardScaling(0.0, 2.0), StepCounter()), ("reward",), {"reward"}, 0),
        (
            lambda: (ObservationNorm(0.0, 2.0, ["observation"]), RewardSum()),
            ("observation",),
            {"observation"},
            0,
        ),
        # One transform must run in each row, or more values must be written.
        (lambda: (RewardClipping(-1.0, 1.0), StepCounter()), ("reward",), None, 1),
        (lambda: (RewardScaling(0.0, 2.0), StepCounter()), ("reward", "observation"), None, 1),
        (lambda: (RewardClipping(-1.0, 1.0), RewardScaling(0.0, 2.0), StepCounter()), (), None, 2),
    ],
)
def test_chain_runs_entirely_in_the_core_or_in_transforms(chain_of, transforms, required, mapped, always):
    chain = chain_of(*transforms())
    plan = row_skipping_plan(chain, hooks(chain), destinations(required=required), ())
    assert len(plan.in_every_row) == always
    assert (None if plan.mapped is None else plan.mapped.keys) == mapped
    if mapped is not None:  # a row with an end runs the whole chain
        assert len(plan.in_other_rows) == len(chain)
    assert plan.required == ([] if mapped is not None else list(required))


def test_no_row_is_skipped_if_every_transform_must_run(chain_of):
    chain = chain_of(RewardSum(), RewardClipping(-1.0, 1.0))
    assert row_skipping_plan(chain, hooks(chain), destinations(), ()) is None


@needs_row_maps
def test_root_after_skipped_rows_has_mapped_values(chain_of):
    ours = destinations(required=["observation"])
    chain = chain_of(ObservationNorm(1.0, 2.0, ["observation"]), StepCounter())
    plan = row_skipping_plan(chain, hooks(chain), ours, ())
    plan.counters.begin(0, {"step_count": torch.zeros(1, dtype=torch.int64)})
    ours.inner.column(("next", "observation"))[:] = torch.arange(6.0)[:, None]
    for t in range(3):
        plan.mapped.run(t)

    class Roots:
        def row(self, key, t):
            return ours.outer.column((key,))[t]

    values = plan.catch_up(3, Roots())
    assert values["observation"].tolist() == [5.0] * 4
    assert values["step_count"].tolist() == [3]
