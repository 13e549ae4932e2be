"""Flat checkpoints store repeated observations once, which halves the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import FlatStorageCheckpointer, LazyTensorStorage, ReplayBuffer
from gleanrl.errors import CheckpointError, CorruptCheckpointError
from tests.data.replay_buffers.checkpointers.test_base_whole import size


def test_flat_form_halves_the_bytes(tmp_path: Path) -> None:
    frames = torch.randint(0, 255, (501, 84, 84), dtype=torch.uint8)
    rows = TensorDict({"pixels": frames[:-1], "next": {"pixels": frames[1:]}}, [500])
    sizes = []
    for form in (None, FlatStorageCheckpointer()):
        buffer = ReplayBuffer(storage=LazyTensorStorage(500), checkpointer=form)
        buffer.extend(rows)
        buffer.dumps(tmp_path)
        sizes.append(size(tmp_path))
    assert sizes[1] < 0.51 * sizes[0]


def test_records_that_flat_form_cannot_write_are_named(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), checkpointer=FlatStorageCheckpointer())
    buffer.dumps(tmp_path)  # nothing stored yet
    buffer.extend(TensorDict({"done": torch.zeros(5, 3), "next": {"done": torch.zeros(5, 3)}}, [5]))
    with pytest.raises(CheckpointError, match=r"'next', 'done'.*\(3,\).*more dimensions"):
        buffer.dumps(tmp_path)
    tensors, other = (
        ReplayBuffer(storage=LazyTensorStorage(5), checkpointer=FlatStorageCheckpointer()) for _ in range(2)
    )
    tensors.extend(torch.arange(3))
    tensors.dumps(tmp_path)
    other.loads(tmp_path)
    assert torch.equal(other[:], torch.arange(3))


@pytest.mark.parametrize(
    "apart",
    [
        {0: {}},
        {1: {"rows": torch.tensor([99]), "values": torch.zeros(1)}},
        {1: {"rows": [1, 2], "values": torch.zeros(2)}},
        {1: {"rows": torch.arange(4), "values": torch.zeros(1)}},
        None,
    ],
)
def test_damaged_packs_are_refused(apart: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(TensorDict({"a": torch.zeros(5), "next": {"a": torch.zeros(5)}}, [5]))
    packed = FlatStorageCheckpointer().packed(buffer.storage.state_dict())
    packed["packed"]["apart"] = apart
    with pytest.raises(CorruptCheckpointError):
        FlatStorageCheckpointer.unpacked(packed)
