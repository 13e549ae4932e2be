"""Transforms of keys rename, select and exclude entries and groups."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    Composite,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    Unbounded,
)
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
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.envs.transforms.ways import SCRIPT, batched, collect_both_ways, joined, single, team
from tests.fakes import Script
from tests.fakes_base import CountingEnv, TwoKeyEnv


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


def test_renamed_copy_keeps_its_value_before_later_transforms():
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


def test_selecting_a_group_keeps_all_its_entries():
    env = TransformedEnv(team(), SelectTransform("agents"))
    assert set(env.rollout(2)["agents"].keys()) >= {"observation", "action", "done"}


@pytest.mark.parametrize("transform", [lambda: SelectTransform("t"), lambda: ExcludeTransform(("agents",))])
def test_empty_groups_are_removed_after_a_selection(transform):
    class Grouped(CountingEnv):
        def __init__(self):
            super().__init__(Script(lengths=(2, 3)))
            self.observation_spec = Composite(t=Unbounded((1,)), agents=Composite(x=Unbounded((2,))))

        def _seen(self, outcome):
            group = TensorDict({"x": torch.zeros(2)}, [])
            return outcome.exclude("observation").update({"t": torch.ones(1), "agents": group})

        def _reset(self, tensordict=None, **kwargs):
            return self._seen(super()._reset(tensordict, **kwargs))

        def _step(self, tensordict):
            return self._seen(super()._step(tensordict))

    env = TransformedEnv(Grouped(), transform())
    check_env_specs(env)
    rows, root = [], env.reset()
    for _ in range(6):
        assert "agents" not in root.keys()
        row, root = env.step_and_maybe_reset(env.rand_action(root))
        rows.append(row)
    by_hand, rolled = torch.stack(rows), env.rollout(6, break_when_any_done=False)
    assert by_hand["next", "done"].any()
    assert set(by_hand.keys(True)) == set(rolled.keys(True)) and ("next", "agents") not in rolled.keys(True)


@pytest.mark.parametrize("env", [two, batched])
def test_environment_without_flags_never_ends(env):
    key = "clock" if env is two else "observation"
    made = TransformedEnv(env(), SelectTransform(key, keep_dones=False))
    check_env_specs(made)
    assert made.done_keys == [] and set(made.reset().keys()) == {key}
    batches = list(SyncDataCollector(made, frames_per_batch=12, total_frames=24))
    assert "done" not in batches[0]["next"].keys()
    for batch in batches:
        assert len(batch["collector", "traj_ids"].unique()) == made.numel()
    clock = torch.cat(batches, -1)["next", key][..., -1]
    assert torch.equal(clock, torch.arange(1, clock.shape[-1] + 1).expand(clock.shape).to(clock.dtype))


def test_done_is_computed_from_the_remaining_flags():
    expected, batch = (
        TransformedEnv(two(), Compose(*chain)).rollout(9, break_when_any_done=False)
        for chain in ([], [ExcludeTransform("done")])
    )
    assert expected["next", "done"].any()
    assert torch.equal(batch["next", "done"], expected["next", "done"])


class GroupEnv(CountingEnv):
    """Has a group of observations in addition to the usual ones."""

    def _declare(self):
        super()._declare()
        spec, shape = self.observation_spec, self.batch_size
        spec["info"] = Composite(a=Unbounded((*shape, 2)), b=Unbounded((*shape, 1)), shape=shape)
        self.observation_spec = spec

    def _package(self, flags):
        out = super()._package(flags)
        out["info"] = TensorDict(
            {"a": out["observation"][..., :2], "b": out["observation"][..., 2:]}, out.batch_size
        )
        return out


@pytest.mark.parametrize("create_copy", [False, True])
@pytest.mark.parametrize("size", [(), (2,)], ids=str)
def test_a_group_is_renamed_as_a_whole(create_copy, size):
    def chain():
        return [RenameTransform(["info"], ["more"], create_copy=create_copy)]

    env = TransformedEnv(GroupEnv(SCRIPT, size), Compose(*chain()))
    check_env_specs(env)
    assert ("info" in env.observation_spec.keys()) == create_copy
    assert ("info" in env.step(env.rand_action(env.reset()))["next"].keys()) == create_copy
    batch = joined(collect_both_ways(lambda: GroupEnv(SCRIPT, size), chain))
    assert torch.equal(batch["more", "b"], batch["observation"][..., 2:])
    assert torch.equal(batch["next", "more", "a"], batch["next", "observation"][..., :2])
    assert ("info" in batch.keys()) == create_copy


def test_a_group_of_a_batch_is_renamed_as_a_whole():
    data = TensorDict({"a": {"x": torch.ones(3), "y": torch.zeros(3)}, "b": torch.ones(3)}, [3])
    out = RenameTransform(["a"], ["c"])(data.clone())
    assert set(out.keys(True, True)) == {("c", "x"), ("c", "y"), "b"} and "a" not in out.keys()


@pytest.mark.parametrize("make", [ExcludeTransform, lambda: ExcludeTransform("nothing")])
def test_excluding_no_key_changes_nothing(make):
    batch = joined(collect_both_ways(two, lambda: [make()]))
    assert "clock" in batch.keys() and ("next", "done") in batch.keys(True)


def test_excluded_keys_are_removed():
    batch = joined(collect_both_ways(two, lambda: [RewardSum(), ExcludeTransform("clock", "truncated")]))
    assert "clock" not in batch.keys()
    assert ("next", "clock") not in batch.keys(True)
    assert ("next", "truncated") not in batch.keys(True)
    assert "episode_reward" in batch.keys()
    check_env_specs(TransformedEnv(two(), ExcludeTransform("clock")))


def test_buffers_select_and_exclude_on_read():
    data = TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3])
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), batch_size=2, transform=SelectTransform("a"))
    buffer.extend(data)
    assert set(buffer.sample().keys()) == {"a"}
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(3), batch_size=2, transform=ExcludeTransform("a", inverse=True)
    )
    buffer.extend(data)
    assert set(buffer.sample().keys()) == {"b"}
    assert set(
        ExcludeTransform("done")(TensorDict({"done": torch.ones(3), "a": torch.ones(3)}, [3])).keys()
    ) == {"a"}
    assert set(data.keys()) == {"a", "b"}


@pytest.mark.parametrize(
    ("transform", "left"),
    [
        (SelectTransform("a"), {"a", "done", "reward"}),
        (SelectTransform("a", keep_rewards=False), {"a", "done"}),
        (SelectTransform(("next", "a"), keep_dones=False), {"next", ("next", "a"), "reward"}),
        (SelectTransform("group"), {"group", ("group", "done"), "done", "reward"}),
        (ExcludeTransform("next", "a"), {"group", ("group", "done"), "done", "reward", "terminated"}),
        (
            ExcludeTransform(("group", "done"), "next"),
            {"a", "group", "done", "reward", "terminated"},
        ),
    ],
    ids=["leaf", "no_rewards", "nested", "group", "without_group", "group_without_entries"],
)
def test_empty_groups_are_removed_in_buffers(transform, left):
    flag = torch.zeros(3, 1, dtype=torch.bool)
    roots = {"a": torch.ones(3), "done": flag, "terminated": flag, "reward": torch.ones(3, 1)}
    after = {"a": torch.ones(3), "done": flag, "reward": torch.ones(3, 1)}
    batch = TensorDict({**roots, "group": {"done": flag}, "next": after}, [3])
    assert set(transform(batch).keys(True)) == left


def test_select_keeps_the_sampling_entries():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9),
        sampler=PrioritizedSampler(9, 1.0, 1.0),
        batch_size=3,
        transform=SelectTransform("a", "td_error"),
    )
    buffer.extend(TensorDict({"a": torch.arange(9), "b": torch.ones(9), "td_error": torch.ones(9)}, [9]))
    batch = buffer.sample()
    assert set(batch.keys()) == {"a", "td_error", "index", "_weight", "priority_weight", "_generation"}
    buffer.update_tensordict_priority(batch.set("td_error", torch.zeros(3)))
    assert not set(buffer.sample()["index"].tolist()) & set(batch["index"].tolist())


def test_remove_empty_specs_removes_empty_groups():
    td = TensorDict({"a": torch.ones(1), "b": {"c": {}}}, [])
    assert set(RemoveEmptySpecs()(td).keys(True)) == {"a"}
    env = single()
    spec = env.observation_spec.clone()
    spec["group"] = Composite({})
    env.observation_spec = spec
    env = TransformedEnv(env, RemoveEmptySpecs())
    assert set(env.observation_spec.keys(True)) == {"observation"}
    assert set(env.full_action_spec.keys()) == {"action"}
    env.rollout(2)


def test_invalid_keys_are_refused():
    with pytest.raises(InvalidArgumentError, match="as many"):
        RenameTransform(["a"], ["b", "c"])
    with pytest.raises(KeyError, match="absent"):
        Compose(RenameTransform(["absent"], ["b"]))(TensorDict({}, []))
