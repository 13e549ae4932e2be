"""Lazy tensor storages allocate memory at the first write."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage
from gleanrl.data.replay_buffers.storages.allocators import FileAllocator
from gleanrl.errors import CapacityError, UnsupportedError
from tests.data.replay_buffers.oracle import fill, ted


def test_capacity_is_rounded_up_to_whole_time_steps_once_they_are_known():
    storage = LazyTensorStorage(100, ndim=2)
    assert storage.max_size == 100
    fill(storage, ted(4, streams=3).transpose(0, 1))
    assert (storage.max_size, storage.capacity_steps) == (102, 34)


def test_memory_is_asked_for_at_the_first_write():
    storage = LazyTensorStorage(10**12)
    with pytest.raises(CapacityError, match="bytes of memory"):
        fill(storage, ted(4))
    assert not storage.initialized


def test_a_subclass_chooses_the_memory(tmp_path):
    class FileStorage(LazyTensorStorage):
        def __init__(self, max_size):
            super().__init__(max_size)
            self.allocator = FileAllocator(tmp_path)

    storage = FileStorage(10)
    storage.set(0, TensorDict({"x": torch.arange(4)}, [4]))
    assert (tmp_path / "x.memmap").stat().st_size >= 40
    assert storage.get([3])["x"].tolist() == [3]


def test_meta_devices_are_refused():
    with pytest.raises(UnsupportedError, match="meta"):
        LazyTensorStorage(5, device="meta")


def test_the_device_of_the_first_data():
    storage = LazyTensorStorage(5, device="auto")
    assert pickle.loads(pickle.dumps(storage)).device == torch.device("cpu")
    fill(storage, ted(3))
    assert storage.device == torch.device("cpu") and storage.get([0]).device == torch.device("cpu")
    other = LazyTensorStorage(5, device="auto")
    other.load_state_dict(storage.state_dict())
    assert (other.get(slice(None)) == ted(3)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_device_of_the_first_data_on_cuda():
    storage = LazyTensorStorage(5, device="auto")
    fill(storage, TensorDict({"x": torch.arange(3, device="cuda")}, [3]))
    assert storage.device.type == "cuda" and storage.get([1])["x"].is_cuda
