"""The ring writer agrees with rows that are written one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import tensorclass

from gleanrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictRoundRobinWriter
from gleanrl.data.replay_buffers import RoundRobinWriter
from gleanrl.data.replay_buffers.storages.base import Prepared
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import clock, fill, fingerprint, ted


def pair(capacity: int) -> tuple[RoundRobinWriter, LazyTensorStorage]:
    writer, storage = RoundRobinWriter(), LazyTensorStorage(capacity)
    writer.register_storage(storage)
    return writer, storage


def write(writer: RoundRobinWriter, storage: LazyTensorStorage, values: torch.Tensor) -> None:
    prepared = storage.prepare(values, single=False, dim_extend=0, where="test")
    placement = writer.place(prepared)
    storage.write(prepared, placement)


@given(capacity=st.integers(1, 9), counts=st.lists(st.integers(1, 25), max_size=8))
def test_long_writes_end_as_single_writes_would(capacity, counts):
    writer, storage = pair(capacity)
    cursor, slots, clock = 0, [None] * capacity, 0
    for count in counts:
        before = len(storage)
        placement = writer.place(Prepared(None, count))
        assert placement.skipped == max(count - capacity, 0)
        assert placement.evicted == before + placement.num_steps - placement.length
        write(writer, storage, torch.arange(clock, clock + count))
        for _ in range(count):
            slots[cursor] = clock
            cursor, clock = (cursor + 1) % capacity, clock + 1
        stored = [slot for slot in slots if slot is not None]
        assert storage.get(slice(None)).tolist() == stored
        assert writer.cursor == cursor
        writer.check_valid()
        storage.check_valid()


def test_place_decides_and_changes_nothing():
    writer, _ = pair(10)
    assert writer.place(Prepared(None, 4)) == writer.place(Prepared(None, 4))
    assert writer.cursor == 0


def test_loaded_writer_continues_at_the_cursor():
    writer, storage = pair(10)
    write(writer, storage, torch.arange(13))
    other, its_storage = pair(10)
    fill(its_storage, torch.arange(10))
    assert other.cursor == 0
    other.load_state_dict(writer.state_dict())
    assert other.cursor == its_storage.end == 3


def test_a_cursor_that_leaves_a_gap_is_refused():
    writer, storage = pair(10)
    write(writer, storage, torch.arange(4))
    with pytest.raises(SchemaError, match="'cursor' of a RoundRobinWriter: expected 4"):
        writer.load_state_dict({"cursor": 7})
    assert writer.cursor == 4


@pytest.mark.parametrize("cursor", [-1, 10, None, 1.5])
def test_a_cursor_outside_the_ring_is_refused(cursor):
    writer, _ = pair(10)
    with pytest.raises(SchemaError, match="'cursor' of a RoundRobinWriter"):
        writer.load_state_dict({"cursor": cursor})
    assert writer.cursor == 0


def test_a_filled_storage_is_continued():
    storage = LazyTensorStorage(10)
    fill(storage, torch.arange(4))
    writer = RoundRobinWriter()
    writer.register_storage(storage)
    assert writer.cursor == 4
    storage.clear()
    assert writer.cursor == 0


# Ring writers of TensorDict buffers


@tensorclass
class Point:
    x: torch.Tensor


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_tensordict_writer_is_a_ring_and_keeps_its_input_unchanged(storage):
    rb = ReplayBuffer(storage=storage(10), writer=TensorDictRoundRobinWriter())
    data = ted(13)
    before = fingerprint(data.to_dict())
    assert rb.extend(data).tolist() == [-1, -1, -1, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert fingerprint(data.to_dict()) == before
    rb.add(ted(1, start=13)[0])
    rb.extend([ted(1, start=14)[0]])
    stored = rb[:] if storage is LazyTensorStorage else torch.stack(list(rb.storage.get(slice(None))))
    assert sorted(clock(stored).tolist()) == list(range(5, 15))


@pytest.mark.parametrize("data", [torch.zeros(3), {"x": torch.zeros(3)}, [torch.zeros(())], [3, "text"]])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_other_data_is_refused_before_anything_changes(storage, data):
    if storage is LazyTensorStorage and data == [3, "text"]:
        pytest.skip("a tensor storage can't stack it")
    rb = ReplayBuffer(storage=storage(10), writer=TensorDictRoundRobinWriter(), seed=0)
    before = fingerprint(rb.state_dict())
    with pytest.raises(ValueError, match="extend: a TensorDictRoundRobinWriter takes TensorDicts, got"):
        rb.extend(data)
    with pytest.raises(SchemaError, match="add: "):
        rb.add(torch.zeros(()))
    assert fingerprint(rb.state_dict()) == before
    rb.extend(ted(3))
    with pytest.raises(SchemaError, match="__setitem__: "):
        rb[0] = 3


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_tensorclasses_are_welcome(storage):
    rb = ReplayBuffer(storage=storage(10), writer=TensorDictRoundRobinWriter(), batch_size=4)
    rb.extend(Point(x=torch.arange(3), batch_size=[3]))
    assert type(rb.sample()) is Point


def test_the_cursor_has_a_private_name():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(torch.arange(7))
    assert buffer._writer._cursor == buffer.writer.cursor == 2
    buffer.writer._cursor = 4
    assert buffer.writer._cursor == 4 and buffer.writer.cursor == 2, "a subclass may keep one of its own"
