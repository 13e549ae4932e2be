"""`RewardSum` adds up the rewards of an episode."""

from __future__ import annotations

import pytest
import torch

from gleanrl.envs.transforms import RewardSum, TransformedEnv
from gleanrl.errors import InvalidArgumentError, MissingKeyError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single, team


def group(env):
    return "agents" if env is team else ()


def key(env, name):
    return ("agents", name) if env is team else name


@pytest.mark.parametrize("env", [single, batched])
def test_rewards_add_up_within_an_episode(env):
    batch = joined(collect_both_ways(env, lambda: [RewardSum()]))
    total, reward = batch["next", "episode_reward"], batch["next", "reward"]
    assert torch.equal(total, batch["episode_reward"] + reward)
    first = batch["observation"][..., -1:] == 0
    assert bool((batch["episode_reward"][first] == 0).all())
    assert bool((batch["episode_reward"][~first] != 0).any())


def test_sums_of_agents_are_stored_next_to_their_rewards():
    batch = joined(collect_both_ways(team, lambda: [RewardSum()]))
    reward_keys = TransformedEnv(team(), RewardSum()).reward_keys
    for reward in reward_keys:
        path = (reward,) if isinstance(reward, str) else reward
        name = (*path[:-1], f"episode_{path[-1]}")
        assert torch.equal(batch[("next", *name)], batch[name] + batch[("next", *path)])


def test_sums_declared_as_rewards_are_not_in_the_root():
    batch = joined(collect_both_ways(single, lambda: [RewardSum(reward_spec=True)]))
    assert "episode_reward" not in batch.keys()
    ends = batch["next", "done"].flatten().nonzero().flatten().tolist()
    begin = 0
    for end in ends:
        rewards = batch["next", "reward"][begin : end + 1]
        assert torch.equal(batch["next", "episode_reward"][begin : end + 1], rewards.cumsum(0))
        begin = end + 1


def test_unknown_reset_keys_and_rewards_are_refused():
    env = TransformedEnv(single(), RewardSum(reset_keys=["other"]))
    with pytest.raises(InvalidArgumentError, match="reset_keys"):
        env.reset()
    with pytest.raises(MissingKeyError, match="pay"):
        TransformedEnv(single(), RewardSum(in_keys=["pay"])).observation_spec  # noqa: B018


@pytest.mark.parametrize(("in_keys", "out_keys"), [(["a", "b"], ["c"]), (["a"], ["c", "d"]), (["a"], [])])
def test_unlike_numbers_of_keys_raise_at_construction(in_keys, out_keys):
    with pytest.raises(InvalidArgumentError, match="RewardSum: expected as many out_keys as in_keys"):
        RewardSum(in_keys=in_keys, out_keys=out_keys)
