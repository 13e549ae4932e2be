"""Records are written unchanged, and only stored records are written."""

from __future__ import annotations

from pathlib import Path

import torch

from gleanrl.data import LazyTensorStorage, ListStorageCheckpointer, ReplayBuffer, TensorStorageCheckpointer


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_only_the_filled_part_takes_bytes(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
    buffer.extend(torch.zeros(100, 25))
    buffer.dumps(tmp_path)
    assert 10_000 < size(tmp_path) < 15_000


def test_packing_is_the_identity() -> None:
    state = {"columns": [torch.ones(2)]}
    assert TensorStorageCheckpointer().pack(state) == state == TensorStorageCheckpointer.unpack(state)
    assert repr(ListStorageCheckpointer()) == "ListStorageCheckpointer()"
