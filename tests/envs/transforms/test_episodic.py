"""Episodic transforms carry values within an episode and renew them at resets."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.envs.transforms import (
    ActionMask,
    Compose,
    DTypeCastTransform,
    InitTracker,
    RewardScaling,
    RewardSum,
    StepCounter,
    TargetReturn,
    TimeMaxPool,
    TransformedEnv,
)
from gleanrl.envs.transforms.episodic import Following
from gleanrl.errors import MissingKeyError, UnsupportedError
from tests.envs.transforms.ways import batched, batches, joined, single, team


@pytest.mark.parametrize(
    "make", [ActionMask, InitTracker, RewardSum, StepCounter, lambda: TargetReturn(1.0), TimeMaxPool]
)
def test_use_without_an_environment_is_refused(make):
    with pytest.raises(UnsupportedError, match="can't be used in a replay buffer"):
        make()(TensorDict({}, [2]))
    with pytest.raises(UnsupportedError, match="part of an environment"):
        make().surroundings()


def test_groups_pair_flags_with_keys_of_the_same_group():
    follower = Following()
    env = TransformedEnv(team(), follower)
    assert follower.container is env
    assert ("agents", "done") in [group[0] for group in follower.groups("n")]
    assert ("agents", "n") in [group[1] for group in follower.groups("n")]


def test_carry_is_renewed_in_reset_rows():
    follower = Following()
    env = TransformedEnv(batched(), follower)
    assert follower.container is env
    first = follower.renewed("n", torch.zeros(3), None)
    follower.carried["n"] = first + 5
    mask = torch.tensor([True, False, False])
    assert follower.renewed("n", torch.zeros(3), mask).tolist() == [0.0, 5.0, 5.0]
    assert follower.renewed("n", torch.zeros(3), mask, torch.ones(3)).tolist() == [0.0, 1.0, 1.0]
    assert first.tolist() == [0.0, 0.0, 0.0]
    assert follower.last(TensorDict({}, [3]), "n").tolist() == [0.0, 1.0, 1.0]
    assert follower.last(TensorDict({"n": torch.ones(3)}, [3]), "n").tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(MissingKeyError, match="step from the result of reset"):
        follower.last(TensorDict({}, [3]), "m")
    request = TensorDict({"_reset": torch.tensor([[True], [False], [False]])}, [3])
    assert follower.reset_mask(request).tolist() == [True, False, False]


@pytest.mark.parametrize(
    "make, casts",
    [
        (StepCounter, (torch.int64, torch.int32)),
        (RewardSum, (torch.float32, torch.float64)),
        (lambda: TargetReturn(9.0), (torch.float32, torch.float64)),
    ],
)
def test_carry_keeps_its_dtype_before_a_later_cast(make, casts):
    env, fresh = (TransformedEnv(batched(), Compose(make(), DTypeCastTransform(*casts))) for _ in range(2))
    rows = env.rollout(2)
    state = env.state_dict()
    fresh.load_state_dict(state)
    for key, value in env.transform[0].carried.items():
        assert rows["next", key].dtype == casts[1]
        assert value.dtype == casts[0]
        assert torch.equal(fresh.transform[0].carried[key], value)


@pytest.mark.parametrize(
    ("make", "key"),
    [(RewardSum, "episode_reward"), (lambda: TargetReturn(9.0), "target_return")],
    ids=["sum", "target"],
)
@pytest.mark.parametrize(
    "change",
    [lambda key: RewardScaling(0, 0.5, in_keys=[key]), lambda key: lambda td: td.set(key, td[key] * 0.5)],
    ids=["ours", "function"],
)
@pytest.mark.parametrize("make_env", [single, batched])
def test_in_place_change_by_a_later_transform_leaves_the_carry_unchanged(make, key, change, make_env):
    def collected(*transforms):
        _, parts = batches(TransformedEnv(make_env(), Compose(*transforms)), sizes=(4, 1, 5))
        return joined(parts)

    expected, rows = collected(make()), collected(make(), change(key))
    assert expected["next", "done"].any()
    assert torch.equal(rows[key], expected[key] * 0.5)
    assert torch.equal(rows["next", key], expected["next", key] * 0.5)
