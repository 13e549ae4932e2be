"""The shared memory of a storage keeps its metadata and a log that agrees with a single process's log."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

from gleanrl._arrays.schema import Field
from gleanrl.data.replay_buffers.change_log import ChangeLog, touched
from gleanrl.data.replay_buffers.storages.shared_segment import SharedMetadata, StorageSegment
from gleanrl.errors import CapacityError, SchemaError

FIELDS = [
    Field(torch.Size([3]), torch.float32),
    Field(torch.Size(()), torch.bool),
    Field(torch.Size([2]), torch.bfloat16),
]


def seen(segment: StorageSegment) -> StorageSegment:
    """Return the same memory as another process maps it."""
    return pickle.loads(pickle.dumps(segment))


def test_metadata_counts_once_it_is_committed():
    segment = StorageSegment()
    other = seen(segment)
    assert other.metadata() == SharedMetadata(0, 0, 0, 1)
    segment.begin(None)
    assert other.changing and other.metadata() == SharedMetadata(0, 0, 0, 1)
    segment.commit(SharedMetadata(3, 3, 5, 0))
    assert not other.changing and other.metadata() == segment.metadata() == SharedMetadata(3, 3, 5, 0)
    assert [segment.next_copy(), other.next_copy()] == [1, 2]


def test_columns_are_the_same_memory():
    segment = StorageSegment()
    assert not segment.is_ready
    columns = segment.make({"any": "schema"}, FIELDS, 10)
    other = seen(segment)
    segment.ready()
    assert other.is_ready and other.schema() == {"any": "schema"}
    for column, field in zip(columns, FIELDS, strict=True):
        assert column.shape == (10, *field.shape) and column.dtype == field.dtype and not column.any()
    theirs = other.columns(FIELDS)
    columns[0][4] = 7.0
    segment.generations[2] = 5
    assert theirs[0][4].tolist() == [7.0] * 3 and other.generations[2] == 5


def test_undo_restores_rows():
    segment = StorageSegment()
    columns = segment.make(None, FIELDS, 10)
    segment.ready()
    before = [column.random_().clone() for column in columns]
    other = seen(segment)
    other.columns(FIELDS)
    segment.begin(torch.tensor([1, 8, 9]))
    version = segment.log.version
    for column in columns:
        column[[1, 8]] = 0
    other.undo()
    assert not segment.changing and segment.log.version != version
    assert all(torch.equal(column, kept) for column, kept in zip(columns, before, strict=True))


def test_segment_without_enough_space_raises():
    segment = StorageSegment()
    with pytest.raises(SchemaError, match="at most"):
        segment.make("x" * (1 << 20), FIELDS, 10)
    with pytest.raises(CapacityError, match="share a smaller storage"):
        segment.make(None, FIELDS, 1 << 45)
    assert not segment.is_ready


@pytest.mark.parametrize("seed", range(6))
def test_shared_log_agrees_with_the_log_of_one_process(seed):
    draw, size, end = random.Random(seed), 16, 0
    segment, plain = StorageSegment(), ChangeLog()
    log, other = segment.log, seen(segment).log
    known = [(other.version, plain.version)]
    every = torch.arange(size)
    for _ in range(300):
        kind = draw.random()
        if kind < 0.02:
            log.renew()
            plain.renew()
        elif kind < 0.7:
            start, count = (
                (end, draw.randint(1, 9)) if kind < 0.6 else (draw.randrange(size), draw.randint(1, 5))
            )
            end = (start + count) % size
            log.note(start, count, size)
            plain.note(start, count, size)
        else:
            spans = [(draw.randrange(size), draw.randint(1, 3)) for _ in range(draw.randint(1, 3))]
            amended = draw.random() < 0.5
            log.note_ranges(spans, size, amended)
            plain.note_ranges(spans, size, amended)
        known.append((other.version, plain.version))
        for theirs, ours in draw.sample(known, min(len(known), 5)):
            found, expected = other.since(theirs), plain.since(ours)
            assert (found is None) == (expected is None)
            if expected is not None:
                assert (touched(every, found) >= touched(every, expected)).all(), "a change is missing"
                written = [[c for c in changes if not c.amended] for changes in (found, expected)]
                assert (touched(every, written[0]) >= touched(every, written[1])).all()
                if expected == [] or len(plain._runs) < 5:
                    assert found == expected


def test_log_beyond_its_length_reports_all_slots():
    log = StorageSegment().log
    log.note(0, 1, 8)
    version = log.version
    for _ in range(1100):
        log.note_ranges([(3, 1)], 8)
    assert log.since(version) == [(0, 8, False)]
    version = log.version
    log.forget()
    assert log.since(version) == [(0, 8, False)] and log.since(log.version) == []


def test_dropped_amendments_are_never_reported_as_new_records():
    log = StorageSegment().log
    log.note(0, 8, 8)
    version = log.version
    for _ in range(1100):
        log.note_ranges([(3, 1)], 8, amended=True)
    log.note(5, 1, 8)
    assert log.since(version) == [(0, 5, True), (5, 6, False), (6, 8, True)]
    for _ in range(1100):
        log.note_ranges([(3, 1)], 8, amended=True)
    assert log.since(version) == [(0, 8, False)], "a new record was dropped, too"
    log.renew()
    version = log.version
    log.note_ranges([(3, 1)], 8, amended=True)
    assert log.since(version) == [(3, 4, True)]
