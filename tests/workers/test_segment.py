"""Shared memory without a name."""

from __future__ import annotations

import os

import pytest
import torch

from gleanrl.block import Field, Schema
from gleanrl.errors import CapacityError
from gleanrl.workers import segment as module
from gleanrl.workers.segment import PLACE, WORK, Segment

SCHEMA = Schema(
    {
        ("a",): Field(torch.Size((3,)), torch.float32),
        ("b",): Field(torch.Size(), torch.bool),
        ("none",): Field(torch.Size((0,)), torch.float32),
        ("c", "d"): Field(torch.Size((2,)), torch.bfloat16),
    }
)


@pytest.fixture
def pair():
    """One segment, seen twice, as from two processes."""
    first = Segment(3)
    second = Segment(3, os.dup(first.descriptor))
    yield first, second
    first.close()
    first.close()
    second.close()


def test_both_see_the_same_rows(pair):
    first, second = pair
    mine, theirs = (s.block(SCHEMA, (2,), 5) for s in pair)
    for number, column in enumerate(mine.columns):
        column.fill_(number)
    assert all(torch.equal(a, b) for a, b in zip(mine.columns, theirs.columns, strict=True))
    assert all(column.data_ptr() % 64 == 0 for column in mine.columns if column.numel())
    assert mine.column(("c", "d")).shape == (2, 5, 2) and mine.borrowed
    owned = mine.owned()
    mine.column(("a",)).fill_(9)
    assert not owned.borrowed and float(owned.column(("a",)).max()) == 0
    assert first.size == second.size


def test_old_views_stay_when_it_grows(pair):
    first, second = pair
    old = first.block(SCHEMA, (2,), 5)
    old.column(("a",)).fill_(3)
    new = first.block(SCHEMA, (2,), 500)
    assert torch.equal(new.columns[0].reshape(-1)[:30], old.columns[0].reshape(-1))
    assert float(second.block(SCHEMA, (2,), 5).column(("a",)).max()) == 3
    before = first.size
    first.grow(10)
    assert first.size == before


def test_progress(pair):
    first, second = pair
    first.progress(1)[PLACE] = 4
    first.progress(2)[WORK] += 1
    assert second.progress(1)[PLACE] == 4 and second.progress(0)[PLACE] == 0
    assert second.progress(2)[WORK] == 1


def test_memory_that_is_not_there(pair, monkeypatch):
    first, _ = pair
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="shared memory: .* bytes can't be had"):
        first.grow(1 << 20)
    assert first.size == 0
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError):
        Segment(1)
    assert len(os.listdir("/proc/self/fd")) == descriptors
