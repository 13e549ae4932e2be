from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Composite, LazyTensorStorage, ReplayBuffer
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import (
    Compose,
    ExcludeTransform,
    ObservationNorm,
    RemoveEmptySpecs,
    RenameTransform,
    RewardSum,
    SelectTransform,
    StepCounter,
    TransformedEnv,
)
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, UnsupportedError
from tests.envs.transforms.ways import SCRIPT, batched, collect_both_ways, joined, single, team
from tests.fakes_base import TwoKeyEnv


def two():
    return TwoKeyEnv(SCRIPT, (2,))


@pytest.mark.parametrize("copy", [False, True])
def test_observations_and_rewards_are_renamed(copy):
    def chain():
        return [RenameTransform(["observation", "reward"], ["obs", "pay"], create_copy=copy)]

    batch = joined(collect_both_ways(batched, chain))
    raw = joined(collect_both_ways(batched, lambda: []))
    assert torch.equal(batch["obs"], raw["observation"])
    assert torch.equal(batch["next", "obs"], raw["next", "observation"])
    assert torch.equal(batch["next", "pay"], raw["next", "reward"])
    assert ("observation" in batch.keys()) is copy
    assert (("next", "reward") in batch.keys(True)) is copy


def test_a_copy_keeps_what_it_was_before_later_transforms():
    def chain():
        return [
            RenameTransform(["observation"], ["raw"], create_copy=True),
            ObservationNorm(1.0, 2.0, in_keys=["observation"]),
        ]

    batch = joined(collect_both_ways(single, chain))
    assert torch.equal(batch["observation"], batch["raw"] * 2 + 1)
    assert torch.equal(batch["next", "observation"], batch["next", "raw"] * 2 + 1)


def test_names_can_be_exchanged():
    batch = joined(collect_both_ways(two, lambda: [RenameTransform(["place", "clock"], ["clock", "place"])]))
    raw = joined(collect_both_ways(two, lambda: []))
    assert torch.equal(batch["place"], raw["clock"])
    assert torch.equal(batch["next", "clock"], raw["next", "place"])


def test_actions_are_renamed():
    env = single()
    batch = TransformedEnv(env, RenameTransform([], [], ["action"], ["move"])).rollout(2)
    assert "action" not in batch.keys()
    assert torch.equal(torch.from_numpy(env.unwrapped.actions[0]), batch["move"][0])
    collect_both_ways(single, lambda: [RenameTransform([], [], ["action"], ["move"])])


def test_flags_keep_their_names():
    with pytest.raises(UnsupportedError, match="flags"):
        RenameTransform(["done"], ["finished"])


def test_selected_keys_stay_with_rewards_and_flags():
    batch = joined(collect_both_ways(two, lambda: [StepCounter(), SelectTransform("place")]))
    assert set(batch.keys()) == {"place", "done", "terminated", "truncated", "action", "collector", "next"}
    assert set(batch["next"].keys()) == {"place", "done", "terminated", "truncated", "reward"}


def test_groups_are_selected_whole():
    env = TransformedEnv(team(), SelectTransform("agents"))
    assert set(env.rollout(2)["agents"].keys()) >= {"observation", "action", "done"}


def test_without_truncated_flags():
    env = TransformedEnv(two(), SelectTransform("clock", keep_dones=False))
    assert set(env.done_keys) == {"done", "terminated"}
    check_env_specs(env)
    joined(collect_both_ways(two, lambda: [SelectTransform("clock", keep_dones=False)]))


def test_excluded_keys_go():
    batch = joined(collect_both_ways(two, lambda: [RewardSum(), ExcludeTransform("clock", "truncated")]))
    assert "clock" not in batch.keys()
    assert ("next", "clock") not in batch.keys(True)
    assert ("next", "truncated") not in batch.keys(True)
    assert "episode_reward" in batch.keys()
    check_env_specs(TransformedEnv(two(), ExcludeTransform("clock")))


def test_in_buffers():
    data = TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3])
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=2, transform=SelectTransform("a"))
    buffer.extend(data)
    assert set(buffer.sample().keys()) == {"a"}
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(3), batch_size=2, transform=ExcludeTransform("a", inverse=True)
    )
    buffer.extend(data)
    assert set(buffer.sample().keys()) == {"b"}
    assert set(data.keys()) == {"a", "b"}


def test_empty_groups_go():
    td = TensorDict({"a": torch.ones(1), "b": {"c": {}}}, [])
    assert set(RemoveEmptySpecs()(td).keys(True)) == {"a"}
    env = single()
    spec = env.observation_spec
    spec["group"] = Composite({})
    env.observation_spec = spec
    env = TransformedEnv(env, RemoveEmptySpecs())
    assert set(env.observation_spec.keys(True)) == {"observation"}
    assert set(env.full_action_spec.keys()) == {"action"}
    env.rollout(2)


def test_mistakes_are_named():
    with pytest.raises(MissingArgumentError, match="at least one"):
        SelectTransform()
    with pytest.raises(InvalidArgumentError, match="done"):
        ExcludeTransform("done")
    with pytest.raises(InvalidArgumentError, match="as many"):
        RenameTransform(["a"], ["b", "c"])
    with pytest.raises(KeyError, match="absent"):
        Compose(RenameTransform(["absent"], ["b"]))(TensorDict({}, []))
