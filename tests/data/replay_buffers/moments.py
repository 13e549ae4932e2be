"""Small buffers of many segments, each in a separate file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl._checkpoint.copy_on_write import CowSnapshot
from gleanrl._checkpoint.row_segments import SegmentLayout
from gleanrl.data import LazyTensorStorage, ReplayBuffer

ROWS, SEGMENT_ROWS = 3_000, 200
SEGMENTS = ROWS // SEGMENT_ROWS


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make segments of a few hundred rows, each in a separate file."""

    def fitting(cls: type[SegmentLayout], fields: Any, rows: int, capacity: int) -> SegmentLayout:
        return cls(tuple(fields), rows, SEGMENT_ROWS)

    monkeypatch.setattr(SegmentLayout, "fitting", classmethod(fitting))


def data(start: int, count: int) -> TensorDict:
    rows = torch.arange(start, start + count)
    return TensorDict({"x": rows[:, None].expand(count, 2).float(), "n": rows}, [count])


def buffer(rows: int = ROWS, storage: Any = LazyTensorStorage) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(rows), batch_size=4)


def moment_of(made: ReplayBuffer) -> CowSnapshot:
    state = made.storage.checkpoint_dict()
    assert isinstance(state["columns"], CowSnapshot)
    return state["columns"]
