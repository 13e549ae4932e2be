"""Agents die one by one: resets, ids, limits and splits follow the flags that end the episode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.utils import split_trajectories
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import ParallelEnv, SerialEnv, check_env_specs
from gleanrl.envs.transforms import RewardSum, TransformedEnv
from tests.contract.helpers import IDS, check_ledger
from tests.fakes import Script
from tests.fakes_marl import SurvivorEnv

SIZES = [(), (2,), (2, 2)]
# Agent k of three dies after 2 + k steps if episode + stream is even, otherwise after 4 + k steps.
LENGTHS = {"all": (4, 6), "any": (2, 4)}


def batch_of(env: Any, frames: int, **kwargs: Any) -> TensorDictBase:
    collector = SyncDataCollector(env, frames_per_batch=frames, total_frames=-1, **kwargs)
    batch = next(iter(collector))
    check_ledger(collector)
    return batch


def rows(batch: TensorDictBase) -> list[TensorDictBase]:
    return [batch] if batch.ndim == 1 else list(batch.reshape(-1, batch.shape[-1]).unbind(0))


@pytest.mark.parametrize("batch_size", SIZES)
@pytest.mark.parametrize("ends", ["all", "any", None])
def test_survivor_environment_passes_the_checks(ends: str | None, batch_size: tuple[int, ...]) -> None:
    check_env_specs(SurvivorEnv(ends, batch_size=batch_size))


@pytest.mark.parametrize("batch_size", SIZES)
@pytest.mark.parametrize("ends", ["all", "any"])
def test_environment_flags_end_an_episode_and_agent_flags_do_not(
    ends: str, batch_size: tuple[int, ...]
) -> None:
    env = SurvivorEnv(ends, batch_size=batch_size)
    batch = batch_of(env, 30 * env.numel())
    for stream, row in enumerate(rows(batch)):
        t, episode = 0, 0
        while t < 30:
            length = LENGTHS[ends][(episode + stream) % 2]
            piece = row[t : t + length]
            assert len(piece[IDS].unique()) == 1 and int((row[IDS] == piece[IDS][0]).sum()) == len(piece)
            for group, first in (("red", 0), ("blue", 2)):
                obs, after = piece[group, "observation"], piece["next", group, "observation"]
                for k in range(obs.shape[1]):
                    life = LENGTHS["any"][(episode + stream) % 2] + first + k
                    steps = torch.arange(len(piece))
                    assert torch.equal(obs[:, k, 2], steps.clamp(max=life).float())
                    assert bool((obs[:, k, 1] == episode).all()) and bool((after[:, k, 1] == episode).all())
                    dead = piece["next", group, "terminated"][:, k, 0]
                    assert torch.equal(dead, steps + 1 >= life)
                    assert torch.equal(piece["next", group, "done"][:, k, 0], dead)
                    assert torch.equal(piece[group, "terminated"][:, k, 0], steps >= life)
                    assert torch.equal(piece["next", group, "reward"][:, k, 0], (steps < life).float())
            done = piece["next", "done"][..., 0].tolist()
            assert done == ([False] * (length - 1) + [True])[: len(piece)]
            t, episode = t + length, episode + 1
    assert all(bool((m.all(-1) | ~m.any(-1)).all()) for m in env.masks)  # a team is reset together


def test_groups_without_parent_flags_reset_separately() -> None:
    env = SurvivorEnv(None, Script(lengths=(2,)))
    batch = batch_of(env, 12)
    for group, k, life in (("red", 0, 2), ("red", 1, 3), ("blue", 0, 4)):
        clock = batch["next", group, "observation"][:, k, 2]
        assert clock.tolist() == [float(t % life + 1) for t in range(12)]
        assert torch.equal(batch["next", group, "done"][:, k, 0], clock == life)
    ended = torch.stack([batch["next", g, "done"].reshape(12, -1).any(-1) for g in ("red", "blue")]).any(0)
    assert torch.equal(batch[IDS].diff() != 0, ended[:-1])


@pytest.mark.parametrize("ends", ["all", "any", None])
@pytest.mark.parametrize("batch_size", SIZES)
def test_a_limit_reaches_every_agents_flags(ends: str | None, batch_size: tuple[int, ...]) -> None:
    env = SurvivorEnv(ends, Script(lengths=(50,)), batch_size)
    batch = batch_of(env, 9 * env.numel(), max_frames_per_traj=3)
    groups = [("red",), ("blue",)] + ([()] if ends else [])
    for row in rows(batch):
        assert row["step_count"][:, 0].tolist() == [0, 1, 2] * 3
        for group in groups:
            for flag in ("done", "truncated"):
                over = row[("next", *group, flag)].reshape(9, -1)
                assert over.tolist() == [[t % 3 == 2] * over.shape[1] for t in range(9)]
            assert not row[("next", *group, "terminated")].any()
        assert row["red", "observation"][:, 0, 2].tolist() == [0, 1, 2] * 3
        assert len(row[IDS].unique()) == 3


def test_the_last_step_may_be_marked_in_every_group() -> None:
    batch = batch_of(SurvivorEnv("all", Script(lengths=(50,))), 6, set_truncated=True)
    for group in ((), ("red",), ("blue",)):
        assert batch[("next", *group, "truncated")][-1].all()
        assert not batch[("next", *group, "truncated")][:-1].any()


def test_rollouts_stop_where_the_environment_does() -> None:
    assert len(SurvivorEnv("all").rollout(20)) == 4 and len(SurvivorEnv("any").rollout(20)) == 2
    assert len(SurvivorEnv(None).rollout(20)) == 2
    data = SurvivorEnv("all").rollout(20, break_when_any_done=False)
    assert data["next", "done"][:, 0].nonzero().flatten().tolist() == [3, 9, 13, 19]


def test_done_key_splits_by_the_flags_of_one_group() -> None:
    batch = batch_of(SurvivorEnv("all"), 10)
    split = split_trajectories(batch, done_key="done")
    assert split["collector", "mask"].sum(-1).tolist() == [4, 6]
    assert split["red", "observation"].shape == (2, 6, 2, 3)


def test_partial_reset_keeps_dead_agents_of_other_rows() -> None:
    env = SurvivorEnv("all", batch_size=(2,))
    data = env.rollout(3, break_when_any_done=False)
    root = data[:, -1]["next"].exclude(("red", "reward"), ("blue", "reward"))
    assert root["red", "done"][0].flatten().tolist() == [True, True]
    root["_reset"] = torch.tensor([[False], [True]])
    for group in env.groups:
        root[group, "_reset"] = root["_reset"][:, None].expand(root[group, "done"].shape).clone()
    after = env.reset(root)
    assert after["red", "done"][0].flatten().tolist() == [True, True]
    assert after["red", "observation"][:, 0].tolist() == [[0, 0, 2], [1, 1, 0]]


@pytest.mark.parametrize("ends", ["all", "any"])
def test_serial_env_of_several_teams_equals_each_team(ends: str) -> None:
    env = SerialEnv(2, lambda: SurvivorEnv(ends))
    batch = batch_of(env, 40)
    alone = batch_of(SurvivorEnv(ends), 20)
    for group in ("red", "blue"):
        for row in batch["next", group, "observation"]:
            assert torch.equal(row, alone["next", group, "observation"])
    assert (batch[IDS][0].diff() != 0).tolist() == (alone[IDS].diff() != 0).tolist()


def transformed(make: Any) -> Any:
    return TransformedEnv(make(), RewardSum(in_keys=[("red", "reward")], reset_keys=["_reset"]))


@pytest.mark.parametrize(
    "around",
    [
        lambda make: make(),
        lambda make: SerialEnv(2, make),
        pytest.param(lambda make: ParallelEnv(2, make), id="ParallelEnv"),
        transformed,
    ],
)
def test_groups_keep_their_batch_sizes(around: Any) -> None:
    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        seen.add(tuple(tensordict["red"].shape))
        return env.rand_action(tensordict)

    seen: set[tuple[int, ...]] = set()
    env = around(lambda: SurvivorEnv("all"))
    own = tuple(env.reset()["red"].shape)
    assert own == (*env.batch_size, 2)
    rolled = env.rollout(5, policy, break_when_any_done=False)
    batch = batch_of(env, 8 * env.numel(), policy=policy)
    for steps in (rolled, batch):
        for group in ("red", ("next", "red")):
            assert steps[group].shape == (*env.batch_size, steps.shape[-1], 2)
            assert steps[group].names == [*steps.names, None]
        assert steps["blue"].shape == (*steps.shape, 1)
    assert seen == {own}
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.extend(batch.reshape(-1))
    again = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    again.load_state_dict(buffer.state_dict())
    for one in (buffer, again):
        assert one.sample()["red"].shape == (4, 2) and one[0]["next", "blue"].shape == (1,)
    env.close()
