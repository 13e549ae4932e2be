"""`from_hdf5` reads D4RL's layout and others, and refuses files that are damaged, foreign or forged."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.data import LazyTensorStorage, ReplayBuffer, from_hdf5
from gleanrl.data.datasets import D4RLExperienceReplay
from gleanrl.data.replay_buffers.checkpointers import H5StorageCheckpointer
from gleanrl.errors import DatasetError, IncompatibleCheckpointError, InvalidArgumentError, UnsupportedError
from tests.conversions import during_conversion

h5py = pytest.importorskip("h5py")
ROWS = 12

pytestmark = pytest.mark.filterwarnings("ignore:.*terminated steps have no next observation")


def arrays() -> dict[str, Any]:
    """Return three episodes of 4 (terminal), 5 (timeout) and 3 (timeout) rows in D4RL's layout."""
    rng, row = np.random.default_rng(0), np.arange(ROWS)
    return {
        "observations": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "actions": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "rewards": rng.normal(size=ROWS).astype(np.float32),
        "terminals": row == 3,
        "timeouts": np.isin(row, [8, 11]),
        "infos/qpos": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "metadata/algorithm": np.bytes_(b"SAC"),
        "metadata/iteration": 7,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hopper_medium-v2.hdf5"


def write(path: Path, **changed: Any) -> dict[str, Any]:
    found = {name: array for name, array in {**arrays(), **changed}.items() if array is not None}
    with h5py.File(path, "w") as file:
        for name, array in found.items():
            file[name] = array
    return found


def test_rows_without_next_observations_end_before_the_last_row(path: Path):
    wrote = write(path)
    steps = from_hdf5(path)[:]
    kept = [0, 1, 2, 4, 5, 6, 7, 9, 10]
    assert np.array_equal(steps["observation"], wrote["observations"][kept])
    assert np.array_equal(steps["next", "observation"], wrote["observations"][np.add(kept, 1)])
    assert np.array_equal(steps["action"], wrote["actions"][kept])
    assert np.array_equal(steps["next", "reward"][:, 0], wrote["rewards"][kept])
    assert np.array_equal(steps["info", "qpos"], wrote["infos/qpos"][kept])
    assert steps["collector", "traj_ids"].tolist() == [-2] * 3 + [-3] * 4 + [-4] * 2
    assert steps["next", "truncated"][:, 0].nonzero()[:, 0].tolist() == [2, 6, 8]
    assert not steps["next", "terminated"].any()


@pytest.mark.parametrize("longest", [1, 3, 30, 300])
def test_rows_of_a_file_that_is_read_in_many_blocks(path: Path, longest: int):
    """A block of 1 MB holds 64 of these observations, so episodes lie in one block or in several."""
    rng, rows = np.random.default_rng(longest), 1000
    lengths = np.array([1, 2, *rng.integers(1, longest + 1, rows)])
    ended = np.isin(np.arange(rows), np.cumsum(lengths) - 1)
    ended[-1] = True
    observed = rng.normal(size=(rows, 4096)).astype(np.float32)
    per_row = {"actions": rng.normal(size=(rows, 2)), "rewards": np.arange(rows, dtype=np.float32)}
    write(
        path,
        observations=observed,
        terminals=ended & False,
        timeouts=ended,
        **per_row,
        **{"infos/qpos": None},
    )
    steps = from_hdf5(path)[:]
    kept = np.flatnonzero(~ended)
    assert np.array_equal(steps["next", "reward"][:, 0], kept)
    assert np.array_equal(steps["observation"], observed[kept])
    assert np.array_equal(steps["next", "observation"], observed[kept + 1])
    assert np.array_equal(steps["action"], per_row["actions"][kept])
    episode = np.cumsum(ended) - ended
    assert np.array_equal(steps["collector", "traj_ids"], -2 - episode[kept])


def test_file_with_next_observations_keeps_all_rows(path: Path):
    observations = arrays()["observations"]
    following = np.roll(observations, -1, 0)
    following[[3, 8, 11]] = 7
    write(path, next_observations=following)
    buffer = from_hdf5(path, batch_size=3)
    assert np.array_equal(buffer[:]["next", "observation"], following)
    found = buffer.episodes()
    assert found.length.tolist() == [4, 5, 3]
    assert found.terminated.tolist() == [True, False, False] and found.truncated.tolist() == [
        False,
        True,
        True,
    ]
    assert buffer.sample().shape == (3,)


def test_variants_of_columns_give_the_same_records(path: Path):
    wrote = write(path)
    model = from_hdf5(path)[:]
    write(
        path,
        rewards=wrote["rewards"][:, None],
        terminals=wrote["terminals"].astype(np.float32)[:, None],
        timeouts=wrote["timeouts"][:, None],
    )
    assert (from_hdf5(path)[:] == model).all()
    with h5py.File(path, "w") as file:
        for name, array in wrote.items():
            if name.startswith("metadata"):
                file[name] = array
            else:
                chunks = (5, *np.shape(array)[1:])
                file.create_dataset(name, data=array, chunks=chunks, compression="gzip", shuffle=True)
    assert (from_hdf5(path)[:] == model).all()


def test_float64_rewards_become_float32_or_stay(path: Path):
    rewards = np.linspace(0, 1, ROWS)
    write(path, rewards=rewards)
    kept = [0, 1, 2, 4, 5, 6, 7, 9, 10]
    assert np.array_equal(from_hdf5(path)[:]["next", "reward"][:, 0], rewards[kept].astype(np.float32))
    assert np.array_equal(from_hdf5(path, reward_dtype=None)[:]["next", "reward"][:, 0], rewards[kept])


def test_file_without_timeouts_needs_the_caller_to_say_where_episodes_end(path: Path):
    write(path, timeouts=None)
    with pytest.raises(DatasetError, match=r"'timeouts'.*max_episode_steps"):
        from_hdf5(path)
    assert from_hdf5(path, max_episode_steps=5).episodes().length.tolist() == [3, 4, 2]
    assert from_hdf5(path, max_episode_steps=5).episodes().truncated.tolist() == [True, True, False]
    assert from_hdf5(path, episode_ends="terminals").episodes().length.tolist() == [3, 7]
    assert from_hdf5(path, episode_ends=[1, 11])[:]["collector", "traj_ids"].tolist() == [-2] + [-3] * 9


def test_clustered_terminals_stay_inside_episodes_that_end_at_timeouts(path: Path):
    write(path, terminals=np.isin(np.arange(ROWS), [2, 3, 4]))
    buffer = from_hdf5(path, episode_ends="timeouts")
    assert buffer[:]["collector", "traj_ids"].tolist() == [-2] * 8 + [-3] * 2
    assert buffer[:]["next", "terminated"][:, 0].nonzero()[:, 0].tolist() == [2, 3, 4]


def test_flat_infos_and_a_mapping_are_read(path: Path):
    demo = np.repeat([5, 2, 9], [4, 5, 3])
    wrote = write(path, **{"infos/qpos": None, "infos": demo})
    assert from_hdf5(path)[:]["info"].tolist() == demo[[0, 1, 2, 4, 5, 6, 7, 9, 10]].tolist()
    layout = {
        "observation": "observations",
        ("next", "truncated"): "terminals",
        ("next", "reward"): "rewards",
        ("collector", "traj_ids"): "infos",
    }
    buffer = from_hdf5(path, layout)
    assert buffer.episodes().length.tolist() == [3, 4, 2] and "action" not in buffer[:].keys()
    assert np.array_equal(buffer[:]["observation"][:3], wrote["observations"][:3])
    with pytest.raises(DatasetError, match="expected an array 'nothing', got"):
        from_hdf5(path, {"observation": "nothing"})
    with pytest.raises(InvalidArgumentError, match="layout"):
        from_hdf5(path, "other")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"observations": None}, "hopper.*expected an array 'observations', got"),
        ({"actions": np.zeros((11, 2))}, "expected 1[12] rows"),
        ({"infos/qpos": np.zeros((11, 2))}, "'infos/qpos': expected 12 rows.*got 11"),
        ({"terminals": np.full(ROWS, 0.5)}, "'terminals': expected flags of 0 and 1, got 0.5"),
        ({"rewards": np.full(ROWS, np.inf)}, "NaN or an infinite value"),
        ({"rewards": np.zeros(ROWS, [("a", "f4")])}, "'rewards': expected numbers or bools"),
        ({"actions": 3.0}, "'actions': expected one row for each step"),
    ],
)
def test_files_with_other_arrays_are_refused(path: Path, changed: dict[str, Any], message: str):
    write(path, **changed)
    with pytest.raises(DatasetError, match=message):
        from_hdf5(path)


def test_damaged_and_foreign_files_are_refused(path: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        from_hdf5(path)
    path.write_bytes(b"not HDF5, but a text")
    with pytest.raises(DatasetError, match="expected an HDF5 file, got a file that begins with b'not HDF5'"):
        from_hdf5(path)
    write(path)
    content = path.read_bytes()
    for size in (8, len(content) // 2):
        path.write_bytes(content[:size])
        with pytest.raises(DatasetError, match="damaged"):
            from_hdf5(path)
    with pytest.raises(DatasetError, match="got a folder"):
        from_hdf5(tmp_path)
    storage = LazyTensorStorage(3)
    ReplayBuffer(storage=storage).extend(torch.zeros(3))
    H5StorageCheckpointer().dumps(storage, tmp_path / "saved.h5")
    with pytest.raises(DatasetError, match="got a checkpoint of a buffer"):
        from_hdf5(tmp_path / "saved.h5")
    write(tmp_path / "foreign.h5")
    with pytest.raises(IncompatibleCheckpointError, match="another program wrote it.*from_hdf5"):
        H5StorageCheckpointer().loads(storage, tmp_path / "foreign.h5")


def test_flipped_bits_are_refused_or_leave_a_buffer(path: Path):
    write(path)
    content, draw, outcomes = path.read_bytes(), random.Random(7), set[str]()
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            outcomes.add(type(from_hdf5(path)).__name__)
        except DatasetError:
            outcomes.add("refused")
    assert outcomes == {"refused", "TensorDictReplayBuffer"}


def forge_soft_link(file: Any, tmp_path: Path) -> None:
    file["actions"] = h5py.SoftLink("/observations")


def forge_external_link(file: Any, tmp_path: Path) -> None:
    file["actions"] = h5py.ExternalLink("other.hdf5", "/observations")


def forge_external_data(file: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 96)
    file.create_dataset("actions", (ROWS, 2), "f4", external=[(str(tmp_path / "secret"), 0, 96)])


def forge_virtual(file: Any, tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((ROWS, 2), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf5"), "x", (ROWS, 2))
    file.create_virtual_dataset("actions", layout)


def forge_size(file: Any, tmp_path: Path) -> None:
    file.create_dataset("actions", (1 << 60,), "f4", chunks=(1 << 20,), compression="gzip")


def forge_size_beside_zero(file: Any, tmp_path: Path) -> None:
    file.create_dataset("actions", (ROWS, 1 << 62, 0), "f4")


def forge_array_type(file: Any, tmp_path: Path) -> None:
    file.create_dataset("actions", (ROWS,), np.dtype(("f4", (2,))))


def forge_cycle(file: Any, tmp_path: Path) -> None:
    file["actions"] = arrays()["actions"]
    group = file.create_group("infos")
    group["again"] = group


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (forge_soft_link, "'actions'.*link"),
        (forge_external_link, "'actions'.*link"),
        (forge_external_data, "'actions'.*another file"),
        (forge_virtual, "'actions'.*another file"),
        (forge_size, "'actions'.*got the shape \\(1152921504606846976,\\) in 0 bytes"),
        (forge_size_beside_zero, "'actions'.*got the shape \\(12, 4611686018427387904, 0\\) in 0 bytes"),
        (forge_array_type, "'actions'.*expected numbers or strings, got arrays .* as single values"),
        (forge_cycle, "at most 16 levels"),
    ],
)
def test_forged_files_are_refused_before_memory_is_taken(
    path: Path, tmp_path: Path, forge: Any, message: str
):
    write(path, actions=None, **{"infos/qpos": None})
    with h5py.File(path, "a") as file:
        forge(file, tmp_path)
    with pytest.raises(DatasetError, match=message):
        from_hdf5(path)


def test_external_data_behind_an_address_in_the_file_are_refused(path: Path, tmp_path: Path):
    """HDF5 reads the other file, whatever the address says."""
    write(path, actions=None)
    with h5py.File(path, "a") as file:
        forge_external_data(file, tmp_path)
    content, unset = path.read_bytes(), b"\x03\x01" + b"\xff" * 8
    assert content.count(unset) == 1
    path.write_bytes(content.replace(unset, unset[:2] + (2048).to_bytes(8, "little")))
    with h5py.File(path) as file:
        assert file["actions"].id.get_offset() == 2048
    with pytest.raises(DatasetError, match="'actions'.*another file"):
        from_hdf5(path)


def test_a_file_that_changes_while_it_is_read_is_refused(path: Path):
    write(path)
    message = r"hopper.*was changed while it was read"
    with (
        during_conversion(lambda: os.truncate(path, path.stat().st_size // 2)),
        pytest.raises(DatasetError, match=message),
    ):
        from_hdf5(path)


def test_a_new_file_in_the_place_of_the_one_that_is_read_does_not_matter(path: Path, tmp_path: Path):
    wrote = write(path)
    (tmp_path / "new").write_bytes(b"other")
    with during_conversion(lambda: os.replace(tmp_path / "new", path)):
        buffer = from_hdf5(path)
    assert np.array_equal(buffer[:]["action"], wrote["actions"][[0, 1, 2, 4, 5, 6, 7, 9, 10]])


def test_d4rl_class_finds_the_file_by_name(path: Path, monkeypatch: pytest.MonkeyPatch):
    write(path, rewards=np.arange(ROWS, dtype=np.float64))
    for root in (path.parent, None):
        monkeypatch.setenv("D4RL_DATASET_DIR", str(path.parent))
        buffer = D4RLExperienceReplay("hopper-medium-v2", batch_size=5, root=root)
        assert len(buffer) == 9 and buffer.sample().shape == (5,)
        assert buffer[:]["next", "reward"].dtype == torch.float64
    assert len(D4RLExperienceReplay(path, next_observation=False, batch_size=2)) == ROWS
    with pytest.raises(FileNotFoundError, match=r"hopper_random-v2\.hdf5.*downloads nothing"):
        D4RLExperienceReplay("hopper-random-v2", batch_size=5, root=path.parent)
    with pytest.raises(UnsupportedError, match="split_trajs=True"):
        D4RLExperienceReplay(path, split_trajs=True)
