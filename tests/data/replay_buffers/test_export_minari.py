"""`to_minari` writes data sets that Minari loads, and `from_minari` restores the records bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, from_minari
from gleanrl.errors import InvalidArgumentError, SchemaError, UnsupportedError
from tests.data.replay_buffers.test_export import assert_same, steps

h5py = pytest.importorskip("h5py")


def chained(count: int, start: int = 0) -> TensorDict:
    """Return steps whose next observation is the following observation inside of trajectories of 7 steps."""
    data = steps(count, start).exclude("empty")
    t = torch.arange(start, start + count)
    data["next", "observation"] = data["observation"] + 1
    data["next", "info"] = TensorDict({"x": {"y": (t + 1).double() / 3}}, [count])
    return data


def stored(data: TensorDict, capacity: int = 40) -> ReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity))
    for part in data.split(10):
        buffer.extend(part)
    return buffer


@pytest.mark.parametrize("count", [14, 50])
def test_round_trip_is_bit_for_bit(tmp_path: Path, count: int):
    stored(chained(count)).to_minari("made/trip-v0", root=tmp_path, author="someone")
    expected = chained(count)[-40:]
    again = from_minari("made/trip-v0", root=tmp_path)
    assert_same(again, expected)
    again.to_minari("made/trip-v1", root=tmp_path)
    assert (from_minari("made/trip-v1", root=tmp_path)[:] == again[:]).all()


def test_files_have_the_layout_of_minari(tmp_path: Path):
    space = gymnasium.spaces.Dict(a=gymnasium.spaces.Box(0, 1, (2,)), b=gymnasium.spaces.Discrete(3, start=1))
    stored(chained(14)).to_minari("trip-v0", root=tmp_path, observation_space=space, action_space=space["b"])
    found = json.loads((tmp_path / "trip-v0/data/metadata.json").read_text())
    assert found["total_episodes"] == 2 and found["total_steps"] == 14 and found["dataset_id"] == "trip-v0"
    assert json.loads(found["action_space"]) == {"type": "Discrete", "dtype": "int64", "start": 1, "n": 3}
    assert json.loads(found["observation_space"])["subspaces"]["a"]["shape"] == [2]
    with h5py.File(tmp_path / "trip-v0/data/main_data.hdf5") as file:
        group = file["episode_1"]
        assert {*group} == {"observations", "actions", "rewards", "terminations", "truncations", "infos"}
        assert group["observations"].shape == (8, 2) and group["infos/x/y"].shape == (8,)
        assert group["rewards"].shape == group["truncations"].shape == (7,)
        assert group.attrs["id"] == 1 and group.attrs["total_steps"] == 7


def test_broken_chains_and_missing_entries_are_refused(tmp_path: Path):
    broken = chained(14)
    broken["next", "observation"][9] = 7
    for data, error, message in (
        (
            broken,
            SchemaError,
            r"\('next', 'observation'\) expected the following step's 'observation'.*row 9",
        ),
        (chained(14).exclude("action"), SchemaError, "expected observations with next ones, actions"),
        (chained(14).exclude(("next", "truncated")), SchemaError, "truncated"),
        (chained(14).exclude(("next", "observation")), SchemaError, "expected observations with next ones"),
    ):
        with pytest.raises(error, match=message):
            stored(data).to_minari("made/trip-v0", root=tmp_path)
    wrong = chained(14)
    wrong["next", "done"][3] = True
    wrong["collector", "traj_ids"] = torch.arange(14) // 7
    with pytest.raises(SchemaError, match="'done'"):
        stored(wrong).to_minari("made/trip-v0", root=tmp_path)
    assert not os.listdir(tmp_path)


def test_bad_arguments_are_refused(tmp_path: Path):
    buffer = stored(chained(14))
    with pytest.raises(InvalidArgumentError, match="expected an id"):
        buffer.to_minari("trip", root=tmp_path)
    with pytest.raises(InvalidArgumentError, match="total_steps"):
        buffer.to_minari("trip-v0", root=tmp_path, total_steps=3)
    with pytest.raises(UnsupportedError, match="expected a Box"):
        buffer.to_minari(
            "trip-v0", root=tmp_path, action_space=gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2))
        )
    buffer.to_minari("trip-v0", root=tmp_path)
    with pytest.raises(InvalidArgumentError, match="which exists"):
        buffer.to_minari("trip-v0", root=tmp_path)
    assert os.listdir(tmp_path) == ["trip-v0"]


def test_minari_loads_and_lists_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    minari: Any = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data = chained(50)
    stored(data).to_minari("made/trip-v0")
    dataset = minari.load_dataset("made/trip-v0")
    assert "made/trip-v0" in minari.list_local_datasets()
    assert dataset.total_steps == 40 and dataset.observation_space.shape == (2,)
    episode = dataset[1]
    assert np.array_equal(episode.observations[:-1], data["observation"][14:21])
    assert np.array_equal(episode.observations[-1], data["next", "observation"][20])
    assert np.array_equal(episode.rewards, data["next", "reward"][14:21, 0])
    assert len(from_minari(dataset)) == 40
