"""Counting transforms skip rows, and catch up with the same counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv
from gleanrl.envs.transforms import (
    Compose,
    InitTracker,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from gleanrl.envs.transforms.counting import Counters, Skippable
from gleanrl.envs.transforms.row_columns import Output
from tests.envs.transforms.ways import ENVS, SCRIPT, batched, batches, collect_both_ways, single
from tests.fakes import Script
from tests.fakes_base import CountingEnv
from tests.interrupts import interruptions

CHAINS = {
    "limit": lambda: [StepCounter(3), RewardSum(), InitTracker()],
    "high limit": lambda: [InitTracker(), RewardSum(), StepCounter(40)],
    "no limit": lambda: [RewardSum(), StepCounter()],
    "limit passed": lambda: [RewardSum(), StepCounter(2, update_done=False)],
    "two limits": lambda: [StepCounter(4, step_count_key="long"), StepCounter(3)],
    "scaled before": lambda: [RewardScaling(0.5, 1.7), RewardSum(), StepCounter(4)],
    "scaled after": lambda: [StepCounter(4), RewardSum(), RewardScaling(0.5, 1.7)],
}


def act(key):
    """Return a policy that reads the value at `key`."""
    return TensorDictModule(lambda x: x[..., :1].float().expand(*x.shape[:-1], 2).clone(), [key], ["action"])


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("env", ENVS)
def test_caught_up_counts_equal_stepped_counts(env, chain):
    collect_both_ways(env, CHAINS[chain], sizes=(20, 1, 2, 7))


@pytest.mark.parametrize("key", ["observation", "step_count", "truncated", "episode_reward"])
@pytest.mark.parametrize("env", [single, batched])
def test_policy_sees_current_counts_that_it_reads(env, key):
    collect_both_ways(env, lambda: [StepCounter(4), RewardSum()], policy=act(key), sizes=(20, 1, 7))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("env", [single, batched])
def test_policy_with_unknown_reads_sees_stepped_counts(env, chain):
    def policy(tensordict):
        seen = [
            tensordict[key].float().cos()
            for key in ("step_count", "episode_reward", "is_init")
            if key in tensordict
        ]
        return tensordict.set("action", sum(seen).expand(*tensordict.shape, 2))

    collect_both_ways(env, CHAINS[chain], policy=policy, sizes=(20, 1, 2, 7))


def test_sums_use_the_rewards_before_later_transforms():
    """A later transform may write sums in the place of the rewards."""
    collect_both_ways(
        batched, lambda: [RewardSum(), RewardSum(["reward"], ["reward"], reward_spec=True)], sizes=(20, 1, 7)
    )


@pytest.mark.parametrize("flags", [("done",), ("done", "terminated")])
@pytest.mark.parametrize("chain", [lambda: [StepCounter(40, step_count_key="long")], lambda: [InitTracker()]])
def test_a_limit_of_frames_sets_a_flag_that_only_a_counter_has(flags, chain):
    def env():
        return CountingEnv(Script(lengths=(9,)), (3,), flags=flags)

    (batch,) = collect_both_ways(env, chain, sizes=(20,), max_frames_per_traj=2)
    assert batch["next", "done"].sum() == 30
    assert torch.equal(batch["next", "truncated"], batch["next", "done"])


def act_on_rows(tensordict):
    return tensordict.set("action", torch.zeros(*tensordict.shape, 2))


def test_partial_reset_between_batches_restarts_its_counts():
    collector = SyncDataCollector(TransformedEnv(batched(), StepCounter()), act_on_rows, frames_per_batch=6)
    first = collector.next()
    collector.reset(1)
    second = collector.next()
    going_on = ~first["next", "done"][:, -1, 0]
    assert int(second["step_count"][1, 0]) == 0
    going_on[1] = False
    assert bool(going_on.any())
    assert torch.equal(second["step_count"][going_on, 0], first["next", "step_count"][going_on, -1])


def block(steps=6):
    flag, number = Field(torch.Size((1,)), torch.bool), Field(torch.Size((1,)), torch.float32)
    count = Field(torch.Size((1,)), torch.int64)
    fields = {"done": flag, "truncated": flag, "step_count": count, "episode_reward": number}
    paths = {(key,): field for key, field in fields.items()}
    made = Block(
        Schema({**paths, **{("next", *p): f for p, f in paths.items()}, ("next", "reward"): number}),
        (),
        steps,
    )
    for column in made.columns:
        column.zero_()
    return made


def env_of(*transforms):
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(*transforms))


GIVEN = ("done", "terminated", "reward")


def addends(made):
    return {"episode_reward": made.row_arrays(("next", "reward"))}


def begin(counters, outputs, t, root):
    for key, value in root.items():
        outputs[key].write_root(t, value)
    counters.begin(t, root)


def test_steps_below_the_limit_are_skipped():
    made, env = block(), env_of(StepCounter(5), RewardSum())
    chain = list(env.transform)
    outputs = {key: Output(made, (key,)) for key in ("truncated", "step_count", "episode_reward")}
    counters = Counters(Skippable(chain, addends(made)), made, outputs, GIVEN)
    root = {
        "step_count": torch.ones(1, dtype=torch.int64),
        "truncated": torch.zeros(1, dtype=torch.bool),
        "episode_reward": torch.full((1,), 0.1),
    }
    begin(counters, outputs, 1, root)
    assert counters.until == 4  # the step of row 4 makes the fifth
    rewards = torch.tensor([9.0, 0.2, 0.3, 0.4, 9.0, 9.0])[:, None]
    made.fill(("next", "reward"), rewards)
    for _ in range(2):  # twice, as after an interrupt
        after = counters.catch_up(4)
        assert made.column(("next", "step_count"))[1:4, 0].tolist() == [2, 3, 4]
        assert made.column(("step_count",))[2:5, 0].tolist() == [2, 3, 4]
        assert after["step_count"].tolist() == chain[0].carried["step_count"].tolist() == [4]
        want = root["episode_reward"].clone()
        for t in range(1, 4):
            want = want + rewards[t]
            assert torch.equal(made.column(("next", "episode_reward"))[t], want)
        assert torch.equal(after["episode_reward"], want)
    assert not bool(made.column(("next", "step_count"))[[0, 4, 5]].any())


def test_counts_written_ahead_match_the_skipped_rows():
    made, env = block(), env_of(StepCounter(), RewardSum())
    chain = list(env.transform)
    outputs = {key: Output(made, (key,)) for key in ("step_count", "episode_reward")}
    counters = Counters(Skippable(chain, addends(made)), made, outputs, GIVEN, {"step_count"})
    root = {"step_count": torch.full((1,), 7), "episode_reward": torch.zeros(1)}
    made.fill(("next", "reward"), torch.arange(6.0)[:, None])
    begin(counters, outputs, 1, root)
    assert made.column(("step_count",))[2:, 0].tolist() == [8, 9, 10, 11]
    for _ in range(2):  # twice, as after an interrupt
        after = counters.catch_up(3)
        assert after["step_count"].tolist() == chain[0].carried["step_count"].tolist() == [9]
        assert after["episode_reward"].tolist() == chain[1].carried["episode_reward"].tolist() == [3.0]
    made.column(("step_count",))[2:] = 0
    begin(counters, outputs, 3, after)
    assert made.column(("step_count",))[:, 0].tolist()[4:] == [10, 11]


def test_flags_are_cleared_to_the_end_of_the_block():
    made, env = block(8), env_of(StepCounter(5))
    outputs = {key: Output(made, (key,)) for key in ("truncated", "step_count")}
    flags = [made.column(("next", "truncated")), made.column(("truncated",))]
    for flag in flags:
        flag[...] = True
    counters = Counters(Skippable(list(env.transform), {}), made, outputs, GIVEN)
    root = {"step_count": torch.full((1,), 3), "truncated": torch.zeros(1, dtype=torch.bool)}
    begin(counters, outputs, 2, root)
    assert counters.catch_up(3)["truncated"].tolist() == [False]
    assert flags[0][:, 0].tolist() == [True, True] + [False] * 6
    assert flags[1][:, 0].tolist() == [True, True] + [False] * 6
    outputs["truncated"].write(3, torch.ones(1, dtype=torch.bool))
    begin(counters, outputs, 4, {key: torch.zeros_like(value) for key, value in root.items()})
    assert counters.catch_up(6)["truncated"].tolist() == [False]
    assert flags[0][:, 0].tolist() == [True, True, False, True] + [False] * 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", [act("observation"), act_on_rows])
def test_an_interrupt_loses_no_count(policy):
    def make():
        env = TransformedEnv(CountingEnv(SCRIPT, (2,)), Compose(StepCounter(4), RewardSum()))
        return SyncDataCollector(env, policy, frames_per_batch=20, total_frames=-1)

    for collector, place in interruptions(make, lambda collector: collector.next(), most=60):
        for _ in range(2):
            batch = collector.next()
            count, root = batch["next", "step_count"], batch["step_count"]
            same = batch["collector", "traj_ids"][:, 1:] == batch["collector", "traj_ids"][:, :-1]
            assert torch.equal(count, root + 1), place
            assert torch.equal(root[:, 1:][same], count[:, :-1][same]), place
            assert not bool(root[:, 1:][~same].any()), place
            sums, before = batch["next", "episode_reward"], batch["episode_reward"]
            assert torch.equal(sums, before + batch["next", "reward"]), place
            assert torch.equal(before[:, 1:][same], sums[:, :-1][same]), place
            assert bool(batch["next", "truncated"][count >= 4].all()), place
        collector.shutdown()


class WrittenRows(Output):
    """Counts the rows of its block writes."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.count = 0

    def run_on(self, first, count, addends):
        self.count += count
        return super().run_on(first, count, addends)


@pytest.mark.parametrize("every", [1, 2, 7, 50, 1000])
def test_rows_written_ahead_are_linear_in_the_block(every):
    made, env = block(1000), env_of(StepCounter())
    output = WrittenRows(made, ("step_count",))
    counters = Counters(Skippable(list(env.transform), {}), made, {"step_count": output}, GIVEN, None)
    root, steps = {"step_count": torch.zeros(1, dtype=torch.int64)}, 0
    counters.begin(0, root)
    for t in range(1000):
        if t < counters.until and t % every:
            continue
        steps += 1
        root = {"step_count": counters.catch_up(t)["step_count"] + 1}
        output.write(t, root["step_count"])
        if t < 999:
            counters.begin(t + 1, root)
    assert made.column(("next", "step_count")).flatten().tolist() == list(range(1, 1001))
    # At least 64 after each end, and twice as many as the rows skipped before.
    assert output.count <= 68 * 1000
    assert steps <= 5 * (1000 // every) + 8


class Overflowing(CountingEnv):
    """Has rewards beyond the range of float32, which cancel out to nan."""

    def _step(self, tensordict):
        out = super()._step(tensordict)
        steps = self._clock.reshape(-1, 1)
        out["reward"] = torch.where(steps < 3, 3e38, -float("inf"))
        return out


def test_overflowing_sums_do_not_warn():
    env = TransformedEnv(Overflowing(Script(lengths=(6,)), (2,)), RewardSum())
    with np.errstate(all="raise"):
        _, (batch,) = batches(env, (8,))
    sums = batch["next", "episode_reward"][0, :6, 0]
    assert sums.tolist()[:2] == [pytest.approx(3e38), float("inf")]
    assert bool(sums[2:].isnan().all())
