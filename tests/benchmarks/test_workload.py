"""The benchmark's recording loop and rows hold correct data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.climit import Gather
from benchmarks.recording_loop import recording_loop
from benchmarks.workload import FRAMES_ENV, OBSERVATION_SPACES, as_tensordict, make_policy, rows
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv

TRAJ_IDS = "collector.traj_ids"


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", FRAMES_ENV])
def test_recording_loop_stores_the_leaves_of_a_batch(name: str) -> None:
    collector = SyncDataCollector(GymEnv(name), None, frames_per_batch=20, total_frames=20)
    (batch,) = list(collector)
    by_hand = next(recording_loop(name, steps=20))
    by_hand[TRAJ_IDS] = by_hand.pop("traj_ids")
    leaves = batch.flatten_keys(".").items()
    ours = {path: (tuple(leaf.shape), leaf.numpy().dtype) for path, leaf in leaves}
    assert ours == {path: (array.shape[1:], array.dtype) for path, array in by_hand.items()}


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_the_recording_loop_records_correctly(name: str, num_envs: int) -> None:
    batches = recording_loop(name, make_policy(name), num_envs=num_envs, steps=300)
    batch = next(batches)
    done, ids = batch["next.done"][..., 0], batch["traj_ids"]
    assert np.array_equal(done, (batch["next.terminated"] | batch["next.truncated"])[..., 0])
    same = ~done[:, :-1]
    assert done.any()
    assert np.array_equal(batch["observation"][:, 1:][same], batch["next.observation"][:, :-1][same])
    assert np.array_equal(ids[:, 1:] == ids[:, :-1], same)
    assert sum(len(np.unique(row)) for row in ids) == len(np.unique(ids))  # no id occurs in two environments
    action = torch.from_numpy(batch["action"])
    with torch.no_grad():
        torch.testing.assert_close(make_policy(name)(torch.from_numpy(batch["observation"])), action)
    following = next(batches)["observation"][:, 0]
    assert np.array_equal(
        following == batch["next.observation"][:, -1], ~done[:, -1:] & (following == following)
    )
    assert torch.is_grad_enabled()


def test_random_actions_are_recorded_correctly() -> None:
    batch = next(recording_loop("CartPole-v1", steps=100))
    assert (batch["action"].sum(-1) == 1).all()
    velocity = batch["next.observation"][..., 1] - batch["observation"][..., 1]
    assert np.array_equal(
        velocity > 0, batch["action"][..., 1] == 1
    )  # the push decides in which direction the cart accelerates


@pytest.mark.parametrize("kind", sorted(OBSERVATION_SPACES))
def test_rows_have_eleven_leaves_and_the_same_values_each_time(kind: str) -> None:
    columns = rows(kind, 10)
    assert len(columns) == 11
    data = as_tensordict(columns)
    assert data.batch_size == (10,)
    assert len(list(data.keys(True, True))) == 11
    again = rows(kind, 10)
    assert all(np.array_equal(columns[path], again[path]) for path in columns)


def test_cartpole_rows_are_laid_out_as_a_batch() -> None:
    (batch,) = list(SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=20, total_frames=20))
    data = as_tensordict(rows("cartpole", 20))
    layout = [{path: (leaf.shape, leaf.dtype) for path, leaf in td.items(True, True)} for td in (batch, data)]
    assert layout[0] == layout[1]


@pytest.mark.parametrize("kind", ["cartpole", "image"])
def test_the_c_gather_fetches_the_rows_asked_for(kind: str) -> None:
    columns = list(rows(kind, 50).values())
    index = np.random.default_rng(0).integers(0, 50, 64)
    for column, out in zip(columns, Gather(columns, 64)(index), strict=True):
        assert np.array_equal(out, column[index])
