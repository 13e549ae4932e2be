"""Ensembles save all members in one commit, and load all members or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    StorageEnsembleCheckpointer,
)
from gleanrl.errors import IncompatibleCheckpointError, SchemaError


def ensemble(capacity: int = 10) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(
        ReplayBuffer(storage=LazyTensorStorage(capacity), checkpointer=NestedStorageCheckpointer()),
        ReplayBuffer(storage=LazyMemmapStorage(10), sampler=PrioritizedSampler(10, 0.7, 0.5)),
        batch_size=6,
        p=[0.5, 0.5],
        seed=0,
    )


def filled() -> ReplayBufferEnsemble:
    made = ensemble()
    for member, count in ((0, 13), (1, 4)):
        steps = torch.arange(count).float()
        made[member].extend(TensorDict({"x": steps, "next": {"x": steps + 1}}, [count]))
    return made


def test_loaded_ensemble_samples_as_the_saved_one(tmp_path: Path) -> None:
    first, other = filled(), ensemble()
    first.sample()
    first.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(5):
        assert (first.sample() == other.sample()).all()
    with pytest.raises(
        IncompatibleCheckpointError,
        match="expected a checkpoint of a ReplayBuffer, got one of a ReplayBufferEnsemble",
    ):
        other[0].loads(tmp_path)


def test_members_that_dont_fit_change_nothing(tmp_path: Path) -> None:
    filled().dumps(tmp_path)
    for other in (ensemble(7), ReplayBufferEnsemble(*(ensemble()[0], ensemble()[1], ensemble()[0]))):
        with pytest.raises(SchemaError):
            other.loads(tmp_path)
        assert not len(other)


def test_storages_of_an_ensemble_are_restored(tmp_path: Path) -> None:
    first, other = filled().storage, ensemble().storage
    StorageEnsembleCheckpointer().dumps(first, tmp_path)
    StorageEnsembleCheckpointer().loads(other, tmp_path)
    for mine, theirs in zip(first, other, strict=True):
        assert (mine.get(range(len(mine))) == theirs.get(range(len(mine)))).all()
