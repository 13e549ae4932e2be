"""An ensemble of writers belongs to several storages."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, WriterEnsemble
from gleanrl.errors import InvalidArgumentError, SchemaError


def written(*counts: int) -> tuple[list[ReplayBuffer], WriterEnsemble]:
    buffers = [ReplayBuffer(storage=LazyTensorStorage(4)) for _ in counts]
    for buffer, count in zip(buffers, counts, strict=True):
        buffer.extend(torch.arange(count))
    return buffers, WriterEnsemble(*(buffer.writer for buffer in buffers))


def test_index_selects_members():
    buffers, writers = written(1, 2, 3)
    assert len(writers) == 3 and list(writers) == [buffer.writer for buffer in buffers]
    assert writers[1] is buffers[1].writer and writers[-1] is buffers[2].writer
    assert list(writers[1:]) == list(writers)[1:]
    assert list(writers[[2, 0]]) == [writers[2], writers[0]]
    assert list(writers[torch.tensor([True, False, True])]) == [writers[0], writers[2]]
    with pytest.raises(IndexError):
        writers[3]


def test_writes_are_blocked():
    _, writers = written(1, 2)
    for call in (writers.add, writers.extend):
        with pytest.raises(RuntimeError, match=r"write to one of its members, ensemble\[0\]"):
            call(torch.zeros(1))


def test_states_go_to_their_members_or_to_none():
    _, writers = written(9, 6)
    _, others = written(8, 4)
    others.load_state_dict(writers.state_dict())
    assert [writer.cursor for writer in others] == [1, 2]
    broken = {"writers": [{"cursor": 3}, {"cursor": 9}]}
    for state in (broken, {"writers": [{"cursor": 3}]}, {}):
        with pytest.raises(SchemaError):
            others.load_state_dict(state)
    assert [writer.cursor for writer in others] == [1, 2]


def test_checkpoints_hold_all_members(tmp_path):
    written(9, 6)[1].dumps(tmp_path)
    others = written(8, 4)[1]
    others.loads(tmp_path)
    assert [writer.cursor for writer in others] == [1, 2]


def test_only_writers_are_taken():
    with pytest.raises(InvalidArgumentError, match="at least one"):
        WriterEnsemble()
    with pytest.raises(InvalidArgumentError, match="expected Writers"):
        WriterEnsemble(RoundRobinWriter(), None)
