"""Nested checkpoints store readable trajectories, one after the other, with repeated observations stored once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, NestedStorageCheckpointer, ReplayBuffer
from gleanrl.errors import CheckpointError, CorruptCheckpointError
from tests.data.replay_buffers.checkpointers.test_base_whole import size


def test_a_reader_makes_nested_tensors() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    done = torch.tensor([[0], [0], [1], [0], [0]]).bool()
    buffer.extend(
        TensorDict(
            {
                "observation": torch.tensor([0, 1, 2, 10, 11]),
                "action": torch.arange(5),
                "next": {"observation": torch.tensor([1, 2, 3, 11, 12]), "done": done},
            },
            [5],
        )
    )
    packed = NestedStorageCheckpointer().pack(buffer.storage.state_dict())
    paths, offsets = packed["format"]["paths"], packed["offsets"]
    observations, actions = (
        packed["columns"][[list(path) for path in paths].index([key])] for key in ("observation", "action")
    )
    assert offsets.tolist() == [0, 3, 5]
    nested = torch.nested.nested_tensor_from_jagged(actions, offsets)
    assert [row.tolist() for row in nested.unbind()] == [[0, 1, 2], [3, 4]]
    nested = torch.nested.nested_tensor_from_jagged(observations, offsets + torch.arange(len(offsets)))
    assert [row.tolist() for row in nested.unbind()] == [[0, 1, 2, 3], [10, 11, 12]]


def test_nested_form_halves_the_bytes(tmp_path: Path) -> None:
    frames = torch.randint(0, 255, (501, 84, 84), dtype=torch.uint8)
    rows = TensorDict({"pixels": frames[:-1], "next": {"pixels": frames[1:]}}, [500])
    sizes = []
    for form in (None, NestedStorageCheckpointer()):
        buffer = ReplayBuffer(storage=LazyTensorStorage(500), checkpointer=form)
        buffer.extend(rows)
        buffer.dumps(tmp_path)
        sizes.append(size(tmp_path))
    assert sizes[1] < 0.51 * sizes[0]


def test_flags_are_named_by_key_or_path_and_large_ones_refused(tmp_path: Path) -> None:
    rows = TensorDict({"a": torch.zeros(4), "next": {"group": {"over": torch.zeros(4, 3)}}}, [4])
    for keys, refused in (
        (None, False),
        ("over", True),
        ([("group", "over")], True),
        ([("next", "over")], False),
    ):
        buffer = ReplayBuffer(storage=LazyTensorStorage(4), checkpointer=NestedStorageCheckpointer(keys))
        buffer.dumps(tmp_path)  # nothing stored yet
        buffer.extend(rows)
        if refused:
            with pytest.raises(CheckpointError, match=r"over.*\(3,\).*more dimensions"):
                buffer.dumps(tmp_path)
        else:
            buffer.dumps(tmp_path)


def test_damaged_packs_are_refused() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(TensorDict({"a": torch.zeros(5), "next": {"a": torch.zeros(5)}}, [5]))
    for damage in (
        {"offsets": torch.tensor([0, 9])},
        {"offsets": torch.tensor([0, 2**62, -(2**62) - 2**61, 2**61, 5])},
        {"offsets": torch.tensor([0, 2**63 - 1, -(2**63) + 1, 5])},
        {"offsets": None},
        {"columns": [torch.zeros(2), None]},
    ):
        packed = NestedStorageCheckpointer().packed(buffer.storage.state_dict())
        packed["packed"].update(damage)
        with pytest.raises(CorruptCheckpointError):
            NestedStorageCheckpointer.unpacked(packed)
