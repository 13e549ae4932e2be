"""Observations once: exact for any data, and half the bytes where data repeat themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl.data import FlatStorageCheckpointer, LazyTensorStorage, ReplayBuffer
from gleanrl.errors import CheckpointError, CorruptCheckpointError
from tests.data.replay_buffers.checkpointers.test_whole import size


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    capacity=st.integers(1, 12),
    width=st.integers(1, 3),
    noise=st.floats(0, 1),
)
def test_every_row_comes_back_bit_for_bit(
    lengths: list[int], capacity: int, width: int, noise: float
) -> None:
    """Interleaved streams, wrapped rings, steps that repeat nothing, NaN."""
    generator = torch.Generator().manual_seed(sum(lengths))
    first, other = (
        LazyTensorStorage(capacity * width, ndim=2) if width > 1 else LazyTensorStorage(capacity)
        for _ in range(2)
    )
    made, loaded = ReplayBuffer(storage=first), ReplayBuffer(storage=other)
    for length in lengths:
        observation = torch.rand(length + 1, width, 2, generator=generator)
        observation[torch.rand(length + 1, generator=generator) < 0.2] = float("nan")
        after = observation[1:].clone()
        after[torch.rand(length, width, generator=generator) < noise] += 1
        rows = TensorDict(
            {
                "observation": observation[:-1],
                "next": {"observation": after, "reward": torch.ones(length, width, 1)},
            },
            [length, width],
        )
        made.extend(rows.transpose(0, 1).contiguous() if width > 1 else rows[:, 0])
    checkpointer = FlatStorageCheckpointer()
    packed = checkpointer.packed(made.storage.state_dict())
    loaded.storage.load_state_dict(checkpointer.unpacked(packed))
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        assert torch.equal(made[:][key].view(torch.int32), loaded[:][key].view(torch.int32))


def test_bytes(tmp_path: Path) -> None:
    frames = torch.randint(0, 255, (501, 84, 84), dtype=torch.uint8)
    rows = TensorDict({"pixels": frames[:-1], "next": {"pixels": frames[1:]}}, [500])
    sizes = []
    for form in (None, FlatStorageCheckpointer()):
        buffer = ReplayBuffer(storage=LazyTensorStorage(500), checkpointer=form)
        buffer.extend(rows)
        buffer.dumps(tmp_path)
        sizes.append(size(tmp_path))
    assert sizes[1] < 0.51 * sizes[0]


def test_what_it_cant_write_is_named(tmp_path: Path) -> None:
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
    "apart", [{0: {}}, {1: {"rows": torch.tensor([99]), "values": torch.zeros(1)}}, None]
)
def test_damaged_packs_are_refused(apart: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(TensorDict({"a": torch.zeros(5), "next": {"a": torch.zeros(5)}}, [5]))
    packed = FlatStorageCheckpointer().packed(buffer.storage.state_dict())
    packed["packed"]["apart"] = apart
    with pytest.raises(CorruptCheckpointError):
        FlatStorageCheckpointer.unpacked(packed)
