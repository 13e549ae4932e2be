"""`StepCounter` counts the steps of each episode, and its limit truncates the episode."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import Bounded
from gleanrl.envs import SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    Compose,
    InitTracker,
    RenameTransform,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from gleanrl.errors import InvalidArgumentError, MissingKeyError, UnsupportedError
from tests.envs.transforms.ways import ENVS, batched, collect_both_ways, joined, single, team
from tests.fakes import Script
from tests.fakes_base import CountingEnv, StepCountEnv


def group(env):
    return "agents" if env is team else ()


def key(env, name):
    return ("agents", name) if env is team else name


@pytest.mark.parametrize("env", ENVS)
def test_counts_follow_the_environments_own_clock(env):
    batch = joined(collect_both_ways(env, lambda: [StepCounter()]))
    clock = batch["observation" if env is not team else ("agents", "observation")][..., -1:].long()
    assert torch.equal(batch[key(env, "step_count")], clock)
    assert torch.equal(batch["next", key(env, "step_count")], clock + 1) if env is not team else True


@pytest.mark.parametrize("env", ENVS)
def test_a_limit_truncates_and_resets(env):
    batch = joined(collect_both_ways(env, lambda: [StepCounter(max_steps=2)]))
    path = () if env is not team else ("agents",)
    count = batch[(*path, "step_count")] if path else batch["step_count"]
    after = batch[("next", *path, "step_count")]
    truncated, done = batch[("next", *path, "truncated")], batch[("next", *path, "done")]
    assert int(after.max()) == 2
    assert bool((truncated | (after != 2)).all())
    assert bool((done | ~truncated).all())
    # The step after an end begins a new episode. Time is the last batch dimension.
    time = batch.ndim - 1
    ended = done.any(-2) if path else done
    begun = (count.amax(-2) if path else count).narrow(time, 1, batch.shape[-1] - 1)
    assert bool((begun[ended.narrow(time, 0, batch.shape[-1] - 1)] == 0).all())


def test_limit_ends_only_its_own_environment():
    env = CountingEnv(Script(lengths=(9, 4, 9)), (3,))
    batch = TransformedEnv(env, StepCounter(max_steps=6)).rollout(13, break_when_any_done=False)
    # Stream 0 has episodes of 9, 4 and 9 steps, which end by the limit, by themselves, and by the limit.
    assert batch["step_count"][0, :, 0].tolist() == [*range(6), *range(4), *range(3)]
    # Stream 1 has episodes of 4, 9 and 9 steps, which end by themselves, by the limit, and by the limit.
    assert batch["step_count"][1, :, 0].tolist() == [*range(4), *range(6), *range(3)]
    assert batch["observation"][1, :, 1].tolist() == [0.0] * 4 + [1.0] * 6 + [2.0] * 3


def test_truncation_reaches_the_flags_of_agents():
    batch = TransformedEnv(team(), StepCounter(max_steps=1)).rollout(4, break_when_any_done=False)
    assert bool(batch["next", "agents", "truncated"].all())
    assert bool(batch["next", "agents", "done"].all())


def test_without_update_done_the_episode_continues():
    env = TransformedEnv(CountingEnv(Script(lengths=(9,))), StepCounter(2, update_done=False))
    batch = env.rollout(5, break_when_any_done=False)
    assert batch["next", "truncated"].flatten().tolist() == [False, True, True, True, True]
    assert not bool(batch["next", "done"].any())


@pytest.mark.parametrize("env", ENVS)
def test_a_flag_without_update_done_is_gone_after_a_reset(env):
    # Episodes are longer than the limit, so each is flagged from its second step to its end.
    batch = joined(collect_both_ways(env, lambda: [StepCounter(2, update_done=False)], sizes=(2, 7, 1, 12)))
    count, truncated = batch[key(env, "step_count")], batch[key(env, "truncated")]
    assert int(count.max()) > 2
    assert not bool(truncated[count == 0].any())
    assert bool(truncated[count >= 2].all())


def test_counts_have_bounds():
    end = torch.iinfo(torch.int64).max
    for options, most in (({}, end), ({"max_steps": 3, "update_done": False}, end), ({"max_steps": 3}, 3)):
        env = TransformedEnv(batched(), StepCounter(**options))
        check_env_specs(env)
        spec = env.observation_spec["step_count"]
        assert isinstance(spec, Bounded) and spec.shape == (3, 1) and spec.dtype is torch.int64
        assert spec.low.unique().tolist() == [0] and spec.high.unique().tolist() == [most]
        assert spec.is_in(spec.rand()) and not spec.zero().any() and not spec.is_in(spec.zero() - 1)


@pytest.mark.parametrize("update_done", [True, False])
def test_custom_truncated_key_is_cleared_by_a_partial_reset(update_done):
    base = SerialEnv(
        2, [lambda: CountingEnv(Script(lengths=(3,))), lambda: CountingEnv(Script(lengths=(4,)))]
    )
    env = TransformedEnv(base, StepCounter(2, truncated_key="own", update_done=update_done))
    batch = env.rollout(9, break_when_any_done=False)
    count, own = batch["step_count"], batch["own"]
    assert torch.equal(own, count >= 2) and own.any() == (not update_done)
    root = env.reset()
    for _ in range(6):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        assert torch.equal(root["own"], root["step_count"] >= 2)
    whole = env.reset(root.set("own", torch.ones_like(root["own"])))
    assert not whole["own"].any()


def test_flags_of_two_counters_are_gone_after_a_reset():
    def chain():
        return [
            StepCounter(3, step_count_key="n"),
            StepCounter(2, update_done=False),
            InitTracker(),
            RewardSum(),
        ]

    for env in ENVS:
        batch = joined(collect_both_ways(env, chain))
        assert not bool(batch[key(env, "truncated")][batch[key(env, "is_init")]].any())


def test_a_truncated_flag_is_added_where_there_is_none():
    env = TransformedEnv(CountingEnv(Script(lengths=(9,)), flags=("done", "terminated")), StepCounter(2))
    assert "truncated" in env.done_keys
    batch = env.rollout(9)
    assert batch["next", "truncated"].flatten().tolist() == [False, True]
    assert not bool(batch["next", "terminated"].any())


@pytest.mark.parametrize("steps", [0, -1])
def test_a_limit_below_one_is_refused(steps):
    with pytest.raises(ValueError, match="max_steps: expected at least 1"):
        StepCounter(max_steps=steps)


def test_a_count_that_is_taken_is_refused():
    with pytest.raises(InvalidArgumentError, match="step_count_key"):
        TransformedEnv(StepCountEnv(), StepCounter()).observation_spec  # noqa: B018


@pytest.mark.parametrize("env", [single, batched])
def test_counts_and_sums_continue_if_a_later_transform_renames_them(env):
    def chain():
        return [
            StepCounter(max_steps=2),
            RewardSum(),
            RenameTransform(["step_count", "episode_reward"], ["n", "s"]),
        ]

    batch = joined(collect_both_ways(env, chain))
    named = joined(collect_both_ways(env, lambda: chain()[:2]))
    assert torch.equal(batch["n"], named["step_count"])
    assert torch.equal(batch["next", "s"], named["next", "episode_reward"])


def test_the_first_step_needs_a_reset():
    env = TransformedEnv(single(), Compose(StepCounter()))
    with pytest.raises(MissingKeyError, match="step_count"):
        env.rand_step(env.base_env.reset())


@pytest.mark.parametrize("env", ENVS)
def test_the_first_root_of_an_episode_is_marked(env):
    batch = joined(collect_both_ways(env, lambda: [InitTracker(), StepCounter()]))
    path = ("agents",) if env is team else ()
    marks, counts = batch[(*path, "is_init")], batch[(*path, "step_count")]
    assert torch.equal(marks, counts == 0)
    assert not bool(batch[("next", *path, "is_init")].any())


@pytest.mark.parametrize("transform", [StepCounter(), InitTracker(), RewardSum()])
def test_use_without_an_environment_is_refused(transform):
    with pytest.raises(UnsupportedError, match="replay buffer"):
        transform(torch.zeros(3))
    with pytest.raises(UnsupportedError, match="environment"):
        transform.transform_observation_spec(CountingEnv().observation_spec)


def test_a_partial_reset_by_hand_touches_its_rows_only():
    env = TransformedEnv(
        CountingEnv(Script(ending="never"), (3,)), Compose(StepCounter(), RewardSum(), InitTracker())
    )
    root = env.reset()
    for _ in range(2):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
    mask = torch.tensor([[False], [True], [False]])
    fresh = env.reset(root.clone().set("_reset", mask))
    assert fresh["step_count"].flatten().tolist() == [2, 0, 2]
    assert fresh["is_init"].flatten().tolist() == [False, True, False]
    assert fresh["observation"][:, 1].tolist() == [0.0, 1.0, 0.0]
    assert torch.equal(fresh["episode_reward"][[0, 2]], root["episode_reward"][[0, 2]])
    assert fresh["episode_reward"][1].item() == 0


def test_keys_that_follow_from_the_groups_of_flags():
    env = TransformedEnv(team(), Compose(StepCounter(), InitTracker()))
    counter, tracker = env.transform
    assert ("agents", "step_count") in counter.step_count_keys and len(counter.step_count_keys) == len(
        env.reset_keys
    )
    assert ("agents", "truncated") in counter.truncated_keys
    assert ("agents", "is_init") in tracker.init_keys


@pytest.mark.parametrize("limits", [(3, None), (None, 3), (2, 3)])
def test_counters_may_share_a_count(limits):
    def chain():
        return [StepCounter(limit) for limit in limits]

    env = TransformedEnv(batched(), Compose(*chain()))
    check_env_specs(env)
    rows = joined(collect_both_ways(batched, chain))
    expected = joined(collect_both_ways(batched, lambda: [StepCounter(min(x for x in limits if x))]))
    for key in expected.keys(True, True):
        assert torch.equal(rows[key], expected[key]), key


@pytest.mark.parametrize("env", [single, team])
def test_counters_marks_and_sums_report_their_keys(env):
    counter, marks, sums = StepCounter(), InitTracker(), RewardSum()
    made = TransformedEnv(env(), Compose(counter, marks, sums))
    assert counter.done_keys == [k for k in made.done_keys if "done" in k]
    assert counter.terminated_keys == [k for k in made.done_keys if "terminated" in k]
    assert counter.reset_keys == marks.reset_keys == list(made.reset_keys)
    assert sums.reset_keys == [("agents", "_reset") if env is team else "_reset"]
