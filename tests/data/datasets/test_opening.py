"""`open_buffer` recognises checkpoints and data sets by their content, and `export` writes them in another format."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gleanrl.checkpoint import Checkpoint
from gleanrl.data import (
    H5StorageCheckpointer,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    from_arrays,
)
from gleanrl.data.datasets.opening import export, open_buffer
from gleanrl.errors import CheckpointError, DatasetError, InvalidArgumentError, SchemaError, UnsupportedError

pytest.importorskip("h5py")


@pytest.fixture
def buffer() -> ReplayBuffer:
    """Return a buffer of 10 rows whose oldest 3 rows were overwritten."""
    made = ReplayBuffer(storage=LazyTensorStorage(10))
    t = torch.arange(13)
    ended = (t % 4 == 3)[:, None]
    flags = {"terminated": ended, "truncated": torch.zeros_like(ended), "done": ended}
    following = {"observation": t + 1.0, "reward": t[:, None].double(), **flags}
    made.extend(TensorDict({"observation": t + 0.0, "action": t, "next": following}, [13]))
    return made


def test_every_kind_of_checkpoint_is_opened(tmp_path: Path, buffer: ReplayBuffer):
    buffer.dumps(tmp_path / "buffer")
    buffer.storage.dumps(tmp_path / "storage")
    H5StorageCheckpointer().dumps(buffer.storage, tmp_path / "storage.h5")
    Checkpoint(buffer=buffer, model=torch.nn.Linear(2, 2)).save(tmp_path / "run")
    for name in os.listdir(tmp_path):
        opened = open_buffer(tmp_path / name)
        assert (opened[:] == buffer[:]).all() and opened.storage.end == buffer.storage.end, name
        with pytest.raises(UnsupportedError, match="ImmutableDatasetWriter"):
            opened.extend(buffer[:])


def test_priorities_of_a_checkpoint_are_opened(tmp_path: Path, buffer: ReplayBuffer):
    made = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.7, storage=LazyTensorStorage(20))
    made.extend(buffer[:])
    priorities = torch.arange(1.0, 11.0)
    made.update_priority(torch.arange(10), priorities)
    made.dumps(tmp_path / "buffer")
    opened = open_buffer(tmp_path / "buffer")
    assert opened.sampler.state_dict()["priorities"]["raw"].tolist() == priorities.tolist()
    assert (opened.sampler.alpha, opened.sampler.beta) == (0.5, 0.7)
    weights = opened.sample(5)["_weight"]
    assert (
        weights.max() <= 1
        and opened.sampler.state_dict()["priorities"]["raw"].tolist() == priorities.tolist()
    )


def test_part_names_one_of_several_buffers(tmp_path: Path, buffer: ReplayBuffer):
    other = ReplayBuffer(storage=LazyTensorStorage(3))
    other.extend(torch.zeros(2))
    Checkpoint(first=buffer, second=other).save(tmp_path / "run")
    assert len(open_buffer(tmp_path / "run", "first")) == 10
    for part in (None, "third"):
        with pytest.raises(
            InvalidArgumentError, match=r"part: expected one of the buffers \['first', 'second'\]"
        ):
            open_buffer(tmp_path / "run", part)
    buffer.dumps(tmp_path / "buffer")
    with pytest.raises(InvalidArgumentError, match="part: expected None"):
        open_buffer(tmp_path / "buffer", "first")


def test_data_sets_are_opened_and_exported(
    tmp_path: Path, buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    buffer.dumps("saved")
    assert export("saved", "minari", "made/name-v0") == "wrote 10 transitions to made/name-v0"
    assert export("made/name-v0", "hdf5", "rows.hdf5") == "wrote 10 transitions to rows.hdf5"
    assert export("rows.hdf5", "safetensors") == "wrote 10 transitions to rows.safetensors"
    opened = open_buffer("rows.hdf5")
    assert (
        opened[:]["observation"].tolist() == [*range(3, 13)]
        and opened[:]["next", "reward"].dtype == torch.float64
    )
    assert len(open_buffer(tmp_path / "root/made/name-v0")) == 10
    pytest.importorskip("pyarrow")
    export("rows.hdf5", "parquet", "table")
    assert (open_buffer("table")[:] == opened[:]).all()
    assert (open_buffer("table/part-00000.parquet")[:] == opened[:]).all()


def test_other_paths_and_formats_are_refused(tmp_path: Path, buffer: ReplayBuffer):
    with pytest.raises(DatasetError, match="expected a file, a folder or the id of a Minari data set"):
        open_buffer(tmp_path / "nothing")
    with pytest.raises(DatasetError, match="no such folder"):
        open_buffer("made/nothing-v0")
    with pytest.raises(CheckpointError):
        open_buffer(tmp_path)
    (tmp_path / "text").write_text("no data set")
    with pytest.raises(DatasetError, match="expected an HDF5 file"):
        open_buffer(tmp_path / "text")
    with pytest.raises(InvalidArgumentError, match="to: expected one of"):
        export("made/nothing-v0", "csv")
    with pytest.raises(InvalidArgumentError, match="out: expected the id"):
        export("made/nothing-v0", "minari")
    listed = ReplayBuffer(storage=ListStorage(3))
    listed.extend([1, 2])
    Checkpoint(buffer=listed).save(tmp_path / "list")
    with pytest.raises((DatasetError, SchemaError)):
        open_buffer(tmp_path / "list")


def test_names_of_buffers_of_arrays_are_no_parts(tmp_path: Path):
    steps = from_arrays({"observation": torch.arange(4), "reward": torch.zeros(4)}, episode_ends=[3])
    steps.to_hdf5(tmp_path / "rows.hdf5")
    assert len(open_buffer(tmp_path / "rows.hdf5")) == 3
