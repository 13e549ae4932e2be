"""Rows of storages are read in pieces during writes, and each format stores them correctly."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl._checkpoint.row_segments import SegmentLayout, bytes_of
from gleanrl._checkpoint.tree_codec import LARGE_BYTES, ArrayPieces
from gleanrl.data import (
    FlatStorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorageCheckpointer,
)
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.data.replay_buffers.checkpointers.trajectories import InMemory, SnapshotReader

FORMS = [FlatStorageCheckpointer, NestedStorageCheckpointer]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype is other.dtype
    return alike and np.array_equal(bytes_of(one), bytes_of(other))


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(cls: type[SegmentLayout], fields: Any, rows: int, capacity: int) -> SegmentLayout:
        return cls(tuple(fields), rows, 70)

    monkeypatch.setattr(SegmentLayout, "fitting", classmethod(fitting))


def steps(start: int, count: int) -> TensorDict:
    numbers = torch.arange(start, start + count)
    observation = torch.stack([numbers, -numbers], 1).float()
    after = {"observation": observation + torch.tensor([1.0, -1.0]), "done": (numbers % 23 == 0)[:, None]}
    after["observation"][::41] = float("nan")
    return TensorDict({"observation": observation, "empty": torch.empty(count, 0), "next": after}, [count])


def filled(storage: Any = LazyTensorStorage) -> ReplayBuffer:
    made = ReplayBuffer(storage=storage(1_000), batch_size=4)
    made.extend(steps(0, 1_300))
    return made


def in_memory(value: Any) -> Any:
    if isinstance(value, ArrayPieces):
        return value.tensor()
    if isinstance(value, dict):
        return {key: in_memory(part) for key, part in value.items()}
    return [in_memory(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_packed_rows_are_of_the_snapshot_despite_later_writes(form: Any, storage: Any) -> None:
    made = filled(storage)
    before = made.storage.state_dict()
    expected = form().packed(before)["packed"]
    for writes_first in (0, 37, 650):
        state = made.storage.checkpoint_dict()
        if writes_first:
            made.extend(steps(7_000, writes_first))
        packed = form().packed(state)
        made.extend(steps(9_000, 900))
        assert isinstance(packed["packed"]["generations"], ArrayPieces)
        found = in_memory(packed)
        state["columns"].close()
        assert torch.equal(found["packed"]["generations"], expected["generations"])
        unpacked = StorageCheckpointerBase.unpacked(found)
        for one, other in zip(unpacked["columns"], before["columns"], strict=True):
            assert same_bits(one, other)
        made.storage.load_state_dict(before)
        before = made.storage.state_dict()
        expected = form().packed(before)["packed"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (0,)])
def test_rows_of_both_kinds_are_the_same(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    column = torch.randint(0, 2, (300, *shape)).to(dtype)
    made = ReplayBuffer(storage=LazyTensorStorage(300), batch_size=4)
    made.extend(TensorDict({"a": column, "b": column.roll(-1, 0)}, [300]))
    moment, plain = made.storage.checkpoint_dict()["columns"], InMemory([column, column.roll(-1, 0)])
    live = SnapshotReader(moment)
    made.extend(TensorDict({"a": column[:90], "b": column[:90]}, [90]))
    index = np.array([5, 299, 5, 88, 0, 100])
    assert list(live.fields) == plain.fields
    for place in (0, 1):
        assert np.array_equal(live.pick(place, index), plain.pick(place, index))
        assert not live.pick(place, index[:0]).size
    if shape != (0,):
        rows = np.arange(299)
        for found in (live, plain):
            assert not found.unlike(1, 0, rows, rows + 1).any()
            differs = found.unlike(0, 1, rows, rows)
            assert np.array_equal(differs, (column[:-1] != column[1:]).reshape(299, -1).any(1).numpy())
    assert same_bits(live.selected(0, index).tensor(), column[index])
    assert same_bits(live.column(1).tensor(), plain.column(1))


@pytest.mark.parametrize("form", [TensorStorageCheckpointer, *FORMS])
def test_a_dump_takes_some_pieces_of_memory(
    tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # segments of the real size
    frames = torch.arange(1_201 * 10_000, dtype=torch.int32).view(1_201, 10_000)
    data = TensorDict({"frame": frames[:-1], "next": {"frame": frames[1:]}}, [1_200])
    made = ReplayBuffer(storage=LazyTensorStorage(1_200), batch_size=4, checkpointer=form())
    made.extend(data)
    tracemalloc.start()
    try:
        made.dumps(tmp_path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 40 << 20  # of 92 MiB


def test_a_tensor_is_cut_into_pieces_of_whole_rows() -> None:
    column = torch.arange(3 * LARGE_BYTES // 8).reshape(-1, 3)
    data = column.numpy().view(np.uint8)
    pieces = ArrayPieces(torch.int64, column.shape, lambda start, stop: data[start:stop])
    assert torch.equal(pieces.tensor(), column)
    spans = list(pieces.cut(1_000))
    assert spans[0] == (0, 1_000 // 24) and spans[-1][1] == len(column)
    assert list(ArrayPieces(torch.int64, (2, 1_000), pieces.make).cut(10)) == [(0, 1), (1, 2)]
