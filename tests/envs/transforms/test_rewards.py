"""Transforms of rewards scale, clip and binarise them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import (
    BinarizeReward,
    ClipTransform,
    Compose,
    LineariseRewards,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    StepCounter,
    TargetReturn,
    TransformedEnv,
)
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.envs.transforms.ways import SCRIPT, batched, collect_both_ways, joined, single, team
from tests.fakes_base import CountingEnv


def plain(env):
    return joined(collect_both_ways(env, lambda: []))


@pytest.mark.parametrize("env", [single, batched])
def test_rewards_are_scaled(env):
    batch = joined(collect_both_ways(env, lambda: [RewardScaling(loc=1.0, scale=2.0)]))
    assert torch.equal(batch["next", "reward"], plain(env)["next", "reward"] * 2 + 1)
    batch = joined(collect_both_ways(env, lambda: [RewardScaling(1.0, 2.0, standard_normal=True)]))
    assert torch.equal(batch["next", "reward"], (plain(env)["next", "reward"] - 1) / 2)


def test_rewards_of_agents_are_found():
    batch = joined(collect_both_ways(team, lambda: [RewardScaling(loc=0.0, scale=2.0)]))
    assert torch.equal(batch["next", "agents", "reward"], plain(team)["next", "agents", "reward"] * 2)


def test_out_keys_keep_the_reward():
    batch = joined(
        collect_both_ways(single, lambda: [RewardScaling(0.0, 2.0, in_keys=["reward"], out_keys=["big"])])
    )
    assert torch.equal(batch["next", "big"], batch["next", "reward"] * 2)
    assert "big" not in batch.keys()


def test_rewards_are_clipped():
    batch = joined(collect_both_ways(batched, lambda: [RewardClipping(0.01, 1.05)]))
    assert torch.equal(batch["next", "reward"], plain(batched)["next", "reward"].clamp(0.01, 1.05))
    spec = TransformedEnv(batched(), RewardClipping(0.0, 1.0)).reward_spec
    assert spec == Bounded(0.0, 1.0, spec.shape)


def test_clip_transform_clips_in_both_directions():
    clip = ClipTransform(["observation"], in_keys_inv=["action"], low=-0.25, high=0.25)
    env = single()
    batch = TransformedEnv(env, clip).rollout(3)
    assert float(batch["observation"].abs().max()) <= 0.25
    assert max(abs(a).max() for a in env.unwrapped.actions) <= 0.25
    assert float(batch["action"].abs().max()) > 0.25


def test_clipped_integers_lie_in_the_interval():
    td = TensorDict({"a": torch.tensor([-3, 0, 3])}, [3])
    assert ClipTransform(["a"], low=0.1, high=2.5)(td.clone())["a"].tolist() == pytest.approx([0.1, 0.1, 2.5])
    whole = ClipTransform(["a"], low=-1.0, high=2)(td.clone())["a"]
    assert whole.dtype is torch.int64
    assert whole.tolist() == [-1, 0, 2]
    check_env_specs(TransformedEnv(batched(), Compose(StepCounter(), ClipTransform(["step_count"], low=0.5))))


def test_sign_and_binarize_map_rewards():
    td = TensorDict({"reward": torch.tensor([-2.0, 0.0, 3.0])}, [3])
    assert SignTransform(in_keys=["reward"])(td.clone())["reward"].tolist() == [-1.0, 0.0, 1.0]
    out = BinarizeReward()(td.clone())["reward"]
    assert out.dtype is torch.int8
    assert out.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: BinarizeReward(),
        lambda: SignTransform(in_keys=["reward"]),
        lambda: RewardClipping(-1.0, 1.0),
        lambda: ClipTransform(in_keys=["reward", "observation"], low=0.0),
        lambda: TargetReturn(10.0),
    ],
)
def test_reward_transforms_keep_their_specs(make):
    check_env_specs(TransformedEnv(batched(), make()))
    collect_both_ways(batched, lambda: [make()])


@pytest.mark.parametrize("env", [single, batched])
def test_target_return_decreases_by_the_rewards(env):
    batch = joined(collect_both_ways(env, lambda: [RewardSum(), TargetReturn(8.0)]))
    assert torch.allclose(batch["target_return"], 8.0 - batch["episode_reward"])
    assert torch.allclose(batch["next", "target_return"], 8.0 - batch["next", "episode_reward"])
    batch = joined(collect_both_ways(env, lambda: [TargetReturn(8.0, mode="constant")]))
    assert bool((batch["next", "target_return"] == 8).all())


def test_bad_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="low <= high"):
        ClipTransform(["a"], low=2.0, high=1.0)
    with pytest.raises(InvalidArgumentError, match="neither"):
        RewardClipping()
    with pytest.raises(InvalidArgumentError, match="mode"):
        TargetReturn(1.0, mode="other")
    with pytest.raises(InvalidArgumentError, match="zero"):
        RewardScaling(0.0, 0.0, standard_normal=True)
    with pytest.raises(UnsupportedError, match="replay buffer"):
        TargetReturn(1.0)(TensorDict({}, []))


class TwoAims(CountingEnv):
    """Has a reward of two components."""

    def _declare(self):
        super()._declare()
        self.reward_spec = Bounded(-2.0, 4.0, (*self.batch_size, 2))

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return out.set("reward", torch.cat([out["reward"], -out["reward"] / 2], -1))


@pytest.mark.parametrize(
    ("weights", "low", "high"), [(None, -4, 8), ([1.0, 2.0], -6, 12), ([1.0, -2.0], None, None)]
)
def test_several_rewards_become_one(weights, low, high):
    def chain():
        return [LineariseRewards(["reward"], weights=weights)]

    env = TransformedEnv(TwoAims(SCRIPT, (2,)), *chain())
    check_env_specs(env)
    assert env.reward_spec.shape == (2, 1)
    if low is not None:
        assert env.reward_spec.low.flatten()[0] == low and env.reward_spec.high.flatten()[0] == high
    rows = joined(collect_both_ways(lambda: TwoAims(SCRIPT, (2,)), chain))["next", "reward"]
    plain = joined(collect_both_ways(lambda: TwoAims(SCRIPT, (2,)), list))["next", "reward"]
    assert torch.allclose(rows[..., 0], (plain * torch.tensor(weights or [1.0, 1.0])).sum(-1))


def test_wrong_number_of_weights_is_refused():
    with pytest.raises(InvalidArgumentError, match="2 weights"):
        TransformedEnv(TwoAims(), LineariseRewards(["reward"], weights=[1.0])).reward_spec  # noqa: B018


@pytest.mark.parametrize(
    ("dtype", "values", "low", "high", "expected"),
    [
        (torch.uint8, [0, 1, 5, 255], -1, 1, [0, 1, 1, 1]),
        (torch.uint8, [0, 255], 0, 300, [0, 255]),
        (torch.int8, [-128, 0, 127], -1000.0, 1000.0, [-128, 0, 127]),
        (torch.int64, [2**24 + 1, 2**62], 0.0, 1e19, [2**24 + 1, 2**62]),
        (torch.int64, [-(2**63), 3], -float("inf"), float("inf"), [-(2**63), 3]),
    ],
)
def test_whole_bounds_outside_an_integer_dtype_do_not_wrap_around(dtype, values, low, high, expected):
    clip = ClipTransform(["a"], low=low, high=high)
    clipped = clip(TensorDict({"a": torch.tensor(values, dtype=dtype)}, [len(values)]))["a"]
    assert clipped.dtype == dtype and clipped.tolist() == expected
    spec = clip.transform_observation_spec(Composite(a=Unbounded((len(values),), dtype=dtype)))
    assert spec.is_in(TensorDict({"a": clipped}, []))


def test_clipped_integer_rewards_have_the_declared_dtype():
    class Counted(CountingEnv):
        def __init__(self):
            super().__init__()
            self.reward_spec = Unbounded((1,), dtype=torch.int64)

        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("reward", torch.full((1,), 3))

    for bounds in ((-1, 1), (-0.5, 0.5)):
        env = TransformedEnv(Counted(), RewardClipping(*bounds))
        rewards = env.rollout(3)["next", "reward"]
        assert rewards.dtype == env.reward_spec.dtype and rewards.flatten().tolist() == [bounds[1]] * 3
