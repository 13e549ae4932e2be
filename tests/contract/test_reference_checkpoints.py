"""The reference's tests of checkpointers for each storage and checkpointer, and its documentation's program."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict, assert_close

import gleanrl.data.replay_buffers.checkpointers
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorageCheckpointer,
)
from gleanrl.envs import GymEnv, SerialEnv
from gleanrl.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:(total_frames=200|frames_per_batch=22) isn't a multiple:UserWarning"
)
STORAGES = [LazyMemmapStorage, LazyTensorStorage]
CHECKPOINTERS = [
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
    TensorStorageCheckpointer,
]


def run(env: Any, folder: Path, storage: Any, checkpointer: Any, **options: Any) -> ReplayBuffer:
    """Collect, save and load in a loop."""
    env.set_seed(0)
    torch.manual_seed(0)
    collector = SyncDataCollector(env, policy=env.rand_step, total_frames=200, frames_per_batch=22)
    rb, rb_test = (ReplayBuffer(storage=storage(100, **options)) for _ in range(2))
    rb.storage.checkpointer, rb_test.storage.checkpointer = checkpointer(), checkpointer()
    for data in collector:
        rb.extend(data)
        rb.dumps(folder)
        rb_test.loads(folder)
        assert_close(rb_test[:], rb[:], rtol=0, atol=0)
    collector.shutdown()
    return rb


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_checkpoints_of_one_environment_are_restored(tmp_path: Path, storage: Any, checkpointer: Any) -> None:
    rb = run(GymEnv("CartPole-v1", device=None), tmp_path, storage, checkpointer)
    assert len(rb) == 100


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_checkpoints_of_several_environments_are_restored(
    tmp_path: Path, storage: Any, checkpointer: Any
) -> None:
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1", device=None))
    rb = run(env, tmp_path, storage, checkpointer, ndim=2)
    assert rb._storage.max_size == 102


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS[:-1])
def test_flags_larger_than_the_storage_are_refused(tmp_path: Path, checkpointer: Any) -> None:
    flags = {"done": torch.zeros(3, 4, 5).bool(), "next": {"done": torch.zeros(3, 4, 5).bool()}}
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), checkpointer=checkpointer())
    rb.extend(TensorDict(flags, [3, 4]))
    with pytest.raises(CheckpointError, match="more dimensions"):
        rb.dumps(tmp_path)


@pytest.mark.parametrize("module", [gleanrl.data, gleanrl.data.replay_buffers])
def test_every_name_can_be_imported(module: ModuleType) -> None:
    names = [
        "Flat2TED",
        "FlatStorageCheckpointer",
        "H5Combine",
        "H5Split",
        "H5StorageCheckpointer",
        "ListStorageCheckpointer",
        "Nested2TED",
        "NestedStorageCheckpointer",
        "StorageCheckpointerBase",
        "StorageEnsembleCheckpointer",
        "TED2Flat",
        "TED2Nested",
        "TensorStorageCheckpointer",
    ]
    assert set(names) <= set(module.__all__)
    kinds = [getattr(module, name) for name in names if "Checkpointer" in name]
    assert all(kind.__name__ in dir(gleanrl.data.replay_buffers.checkpointers) for kind in kinds)
