"""Memory-mapped storages create, keep and remove their files."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyMemmapStorage, ReplayBuffer
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.data.replay_buffers.oracle import clock, fill, ted


def mapped(directory: object) -> int:
    with open("/proc/self/maps") as maps:
        return sum(str(directory) in line for line in maps)


def test_files_hold_the_written_values(tmp_path):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    fill(storage, ted(30))
    rewards = torch.from_file(str(tmp_path / "next" / "reward.memmap"), size=100)
    assert rewards[:30].tolist() == list(range(30))
    assert len(list(tmp_path.rglob("*.memmap"))) == 11


def test_a_second_storage_in_the_same_place_is_refused(tmp_path):
    fill(LazyMemmapStorage(100, scratch_dir=str(tmp_path)), ted(3))
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    with pytest.raises(UnsupportedError, match=r"exists already and isn't overwritten.*loads\(folder\)"):
        buffer.extend(ted(3))
    assert len(buffer) == 0


def test_maps_and_nameless_files_go_with_the_storage(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = LazyMemmapStorage(10_000)
    fill(storage, ted(50))
    assert mapped(tmp_path) == 11
    assert list(tmp_path.iterdir()) == [], "even a killed process leaves nothing"
    rows = storage.get(slice(None))
    del storage
    gc.collect()
    assert clock(rows).tolist() == list(range(50)), "a view keeps its map alive"
    del rows
    gc.collect()
    assert mapped(tmp_path) == 0


def test_the_space_is_reserved_at_the_first_write(tmp_path):
    storage = LazyMemmapStorage(100_000, scratch_dir=tmp_path)
    fill(storage, torch.zeros(1, 4))
    found = os.stat(tmp_path / "tensor.memmap")
    assert found.st_size == 1_600_000 and found.st_blocks * 512 >= 1_600_000


@pytest.mark.parametrize("device", ["cuda", "meta", torch.device("cuda", 1), "elsewhere", 0, None])
def test_memmap_on_another_device_raises(device):
    with pytest.raises(InvalidArgumentError, match="expected the CPU"):
        LazyMemmapStorage(10, device=device)


def test_memmap_accepts_all_names_of_the_cpu():
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert LazyMemmapStorage(10, device=device).device == torch.device("cpu")


def test_files_of_an_earlier_run_are_replaced_if_asked_for(tmp_path):
    old = LazyMemmapStorage(10, scratch_dir=tmp_path)
    fill(old, ted(10))
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)
    assert clock(old.get(slice(None))).tolist() == list(range(10))
    fill(storage, ted(3, start=50))
    assert clock(storage.get(slice(None))).tolist() == [50, 51, 52]
    assert clock(old.get(slice(None))).tolist() == list(range(10))
    rewards = torch.from_file(str(tmp_path / "next" / "reward.memmap"), size=10)
    assert rewards.tolist() == [50, 51, 52, 0, 0, 0, 0, 0, 0, 0]


def test_trees_have_a_file_for_each_leaf(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path)
    fill(storage, {"a": (torch.arange(3), torch.ones(3, 2))})
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.memmap")) == [
        "a/0.memmap",
        "a/1.memmap",
    ]
    with pytest.raises(UnsupportedError, match="a/0.memmap.* exists already"):
        fill(LazyMemmapStorage(4, scratch_dir=tmp_path), {"a": (torch.arange(3), torch.ones(3, 2))})


def test_capacity_is_rounded_up_to_whole_time_steps(tmp_path):
    storage = LazyMemmapStorage(100, ndim=2, scratch_dir=tmp_path)
    assert storage.max_size == 100
    fill(storage, ted(4, streams=3).transpose(0, 1))
    assert (storage.max_size, storage.shape, len(storage)) == (102, (4, 3), 12)
    assert (tmp_path / "next" / "reward.memmap").stat().st_size == 102 * 4


def test_live_columns_name_their_files(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    buffer.extend(TensorDict({"a": torch.zeros(4), "next": {"b": torch.zeros(4)}}, [4]))
    columns = buffer._storage._storage
    assert columns["a"].filename == str(tmp_path / "a.memmap")
    assert columns["next", "b"].filename == str(tmp_path / "next" / "b.memmap")
    columns["a"][1] = 7.0
    assert buffer[1]["a"] == 7 and torch.from_file(columns["a"].filename, size=10).tolist()[:2] == [0, 7]
    nameless = LazyMemmapStorage(10)
    nameless.set(range(2), torch.zeros(2))
    assert nameless._storage.filename is None
