"""The ring writer against rows that are written one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.data.replay_buffers import LazyTensorStorage, RoundRobinWriter
from gleanrl.data.replay_buffers.storages.direct import Prepared
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import fill


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


def test_state_goes_on_at_the_cursor():
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
