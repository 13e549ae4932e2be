"""`from_arrays` keeps every value, invents no next observation, and refuses arrays that contradict each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl import data
from gleanrl.data import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    from_arrays,
)
from gleanrl.errors import DatasetError, InvalidArgumentError, InvalidTypeError, UnsupportedError

ROWS = 10

pytestmark = pytest.mark.filterwarnings("ignore:.*terminated steps have no next observation")


def arrays(**changed: Any) -> dict[Any, Any]:
    """Return three episodes of 4, 3 and 3 rows: terminated, truncated, and without an end."""
    step = np.arange(ROWS)
    found = {
        "observation": np.stack([step, 10 * step], 1).astype(np.float32),
        "action": step,
        "reward": step / 2,
        "terminated": step == 3,
        "truncated": step == 6,
    }
    return {name: value for name, value in {**found, **changed}.items() if value is not None}


def column(buffer: TensorDictReplayBuffer, *key: str) -> list[Any]:
    return buffer[:].get(key).reshape(len(buffer), -1)[:, 0].tolist()


def test_last_rows_without_a_next_observation_are_dropped():
    with pytest.warns(UserWarning, match="arrays: 1 terminated steps have no next observation") as found:
        buffer = from_arrays(arrays())
    assert found[0].filename == __file__
    assert column(buffer, "observation") == [0, 1, 2, 4, 5, 7, 8]
    assert column(buffer, "next", "observation") == [1, 2, 3, 5, 6, 8, 9]
    assert column(buffer, "action") == [0, 1, 2, 4, 5, 7, 8]
    assert column(buffer, "next", "reward") == [0, 0.5, 1, 2, 2.5, 3.5, 4]
    assert column(buffer, "collector", "traj_ids") == [-2] * 3 + [-3] * 2 + [-4] * 2
    # The rows before the dropped ends, but not the last row: nothing tells that the last episode ended.
    assert column(buffer, "next", "truncated") == [False, False, True, False, True, False, False]
    assert not any(column(buffer, "next", "terminated"))
    assert buffer.verify().ok and buffer.episodes().length.tolist() == [3, 2, 2]


def test_a_single_row_without_a_next_observation_is_refused():
    for ended in (True, False):
        with pytest.raises(DatasetError, match="at least one step with a known next observation, got none"):
            from_arrays({"observation": [1.0], "terminated": [ended]})


def test_given_next_observations_keep_every_row_and_flag():
    following = np.arange(ROWS)[:, None] * [1, 10] + [1, 10]
    given = arrays()
    given["next", "observation"] = following.astype(np.float32)
    buffer = from_arrays(given)
    assert column(buffer, "next", "terminated") == (np.arange(ROWS) == 3).tolist()
    assert column(buffer, "next", "truncated") == (np.arange(ROWS) == 6).tolist()
    assert column(buffer, "next", "observation")[3] == 4
    assert len(buffer) == ROWS


def test_one_more_observation_for_each_episode_is_the_last_next_observation():
    buffer = from_arrays(arrays(observation=np.arange(ROWS + 3)), episode_ends=[3, 6, 9])
    assert column(buffer, "observation") == [0, 1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert column(buffer, "next", "observation") == [1, 2, 3, 4, 6, 7, 8, 10, 11, 12]
    assert sum(column(buffer, "next", "terminated")) == 1


def test_nested_observations_shift_together():
    observation = {"a": np.arange(ROWS), "b": {"c": np.arange(ROWS) * 2.0}}
    buffer = from_arrays(arrays(observation=observation))
    assert column(buffer, "next", "observation", "b", "c") == [2, 4, 6, 10, 12, 16, 18]
    assert column(buffer, "next", "observation", "a") == [1, 2, 3, 5, 6, 8, 9]


def test_without_next_observations_all_rows_are_kept():
    buffer = from_arrays(arrays(), next_observation=False)
    assert len(buffer) == ROWS and ("next", "observation") not in buffer[:].keys(True)
    assert column(buffer, "next", "terminated")[3] and column(buffer, "next", "truncated")[6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_reward_dtype_is_float32_unless_the_call_says_otherwise(dtype: torch.dtype):
    reward = torch.arange(ROWS, dtype=dtype)
    assert from_arrays(arrays(reward=reward))[:]["next", "reward"].dtype == torch.float32
    kept = from_arrays(arrays(reward=reward), reward_dtype=None)[:]["next", "reward"]
    assert kept.dtype == dtype and kept.shape == (7, 1)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_columns_of_one_value_may_have_an_axis(shape: tuple[int, ...]):
    changed = {name: arrays()[name].reshape(shape) for name in ("reward", "terminated", "truncated")}
    buffer, model = from_arrays(arrays(**changed)), from_arrays(arrays())
    assert (buffer[:] == model[:]).all()


def test_flags_of_numbers_are_read_and_others_refused():
    step = np.arange(ROWS)
    assert (from_arrays(arrays(terminated=(step == 3) * 1.0))[:] == from_arrays(arrays())[:]).all()
    with pytest.raises(DatasetError, match=r"'terminated'.*0 and 1, got 0\.5 in row 2"):
        from_arrays(arrays(terminated=np.where(step == 2, 0.5, 0)))


def test_numbers_of_episodes_split_rows_and_become_free_ids():
    ids = np.repeat([7, 3, 9], [4, 3, 3])
    buffer = from_arrays({**arrays(terminated=None, truncated=None), ("collector", "traj_ids"): ids})
    assert column(buffer, "collector", "traj_ids") == [-2] * 3 + [-3] * 2 + [-4] * 2
    negative = from_arrays({**arrays(), ("collector", "traj_ids"): -ids})
    assert column(negative, "collector", "traj_ids") == [-7] * 3 + [-3] * 2 + [-9] * 2
    with pytest.raises(DatasetError, match="episode 7 in several places"):
        from_arrays({**arrays(), ("collector", "traj_ids"): np.repeat([7, 3, 7], [4, 3, 3])})


def test_a_flag_within_an_episode_is_refused_unless_the_caller_chose_the_ends():
    inside = arrays(terminated=np.isin(np.arange(ROWS), [1, 3]), truncated=None)
    ids = {("collector", "traj_ids"): np.repeat([7, 3, 9], [4, 3, 3])}
    with pytest.raises(DatasetError, match="got one in row 1, after which the episode continues"):
        from_arrays({**inside, **ids})
    chosen = from_arrays({**inside, **ids}, episode_ends=[3, 6, 9])
    assert column(chosen, "next", "terminated") == [row == 1 for row in range(7)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"action": np.arange(9)}, r"'action'.*expected 10 rows.*got 9|expected 9 rows"),
        ({"action": np.array([{}] * ROWS)}, "'action'.*object array"),
        ({"action": np.zeros(ROWS, "M8[s]")}, "'action'.*datetime64"),
        ({"action": 3}, "'action'.*one row for each step"),
        ({"reward": np.full(ROWS, np.nan)}, "'reward'.*NaN"),
        ({"terminated": None, "truncated": None}, "episode_ends"),
        ({"terminated": np.zeros((ROWS, 2), bool)}, "one flag for each step"),
        ({"done": np.zeros(ROWS, bool)}, "expected done where a step is terminated or truncated"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(changed: dict[str, Any], message: str):
    with pytest.raises(DatasetError, match=message):
        from_arrays(arrays(**changed))


def test_bad_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="episode_ends"):
        from_arrays(arrays(), episode_ends=[3, 12])
    with pytest.raises(InvalidTypeError, match="arrays"):
        from_arrays([1, 2])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="storage"):
        from_arrays(arrays(), storage=LazyTensorStorage(3))
    with pytest.raises(InvalidTypeError, match="unexpected|batchsize"):
        from_arrays(arrays(), batchsize=3)
    with pytest.raises(DatasetError, match="at least one array"):
        from_arrays({})
    with pytest.raises(DatasetError, match="known next observation"):
        from_arrays(arrays(), episode_ends=np.ones(ROWS, bool))


def test_verify_false_accepts_nan():
    assert len(from_arrays(arrays(reward=np.full(ROWS, np.nan)), verify=False)) == 7


def test_big_endian_and_text_columns_are_stored():
    texts = np.array([f"word {row}" for row in range(ROWS)])
    buffer = from_arrays(arrays(action=np.arange(ROWS, dtype=">i4"), word=texts))
    assert buffer[:]["action"].dtype == torch.int32 and column(buffer, "action")[-1] == 8
    assert buffer[:2]["word"] == ["word 0", "word 1"]


def test_buffer_refuses_writes_and_samples():
    buffer = from_arrays(arrays(), batch_size=4, sampler=SliceSampler(slice_len=2))
    with pytest.raises(UnsupportedError, match="ImmutableDatasetWriter"):
        buffer.extend(buffer[:])
    ids = buffer.sample()["collector", "traj_ids"].view(2, 2)
    assert (ids[:, 0] == ids[:, 1]).all()


def test_mapped_files_hold_the_same_records_and_leave_nothing(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mapped, memory = from_arrays(arrays(), memmap_above=0), from_arrays(arrays(), memmap_above=None)
    assert (mapped[:] == memory[:]).all()
    assert "main" not in os.listdir(tmp_path) and not os.listdir(tmp_path)


def test_offline_to_online_buffer_mixes_a_data_set_with_steps_of_a_collector():
    buffer = from_arrays(arrays(), batch_size=4)
    steps = buffer[:3].clone()
    steps["collector", "traj_ids"].zero_()
    mixed = OfflineToOnlineReplayBuffer(buffer, online_capacity=10, batch_size=8)
    mixed.extend(steps)
    ids = mixed.sample()["collector", "traj_ids"]
    assert (ids[:4] <= -2).all() and (ids[4:] == 0).all()


def test_readers_are_public_names_of_the_data_package():
    names = {"from_arrays", "from_hdf5", "from_lerobot", "from_minari", "from_parquet"}
    assert names <= {*data.__all__}
