"""Shared memory without a file name holds columns that two processes see."""

from __future__ import annotations

import gc
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch

from gleanrl._arrays.schema import Field, Schema
from gleanrl._process import shared_columns as module
from gleanrl._process.shared_columns import ITEM, WORK, SharedRows, SharedSegment
from gleanrl.errors import CapacityError

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
    """Return two views of one segment, as two processes have them."""
    first = SharedSegment(3)
    yield first, SharedSegment(3, first.descriptor)
    first.close()
    first.close()


def rows(num_steps):
    return SharedRows(SCHEMA, torch.Size((2,)), num_steps)


def test_both_processes_see_the_same_rows(pair):
    region = pickle.loads(pickle.dumps(pair[0].region("rows", rows(5))))
    mine, theirs = (s.block(region) for s in pair)
    for number, column in enumerate(mine.columns):
        column.fill_(number)
    assert all(torch.equal(a, b) for a, b in zip(mine.columns, theirs.columns, strict=True))
    assert all(column.data_ptr() % 64 == 0 for column in mine.columns if column.numel())
    assert mine.column(("c", "d")).shape == (2, 5, 2) and mine.borrowed
    owned = mine.owned()
    mine.column(("a",)).fill_(9)
    assert not owned.borrowed and float(owned.column(("a",)).max()) == 0


def test_regions_and_blocks_do_not_overlap(pair):
    first, second = pair
    regions = [first.region(name, rows(5), num_blocks=2) for name in ("a", "b", "c")]
    blocks = [(region, number) for region in regions for number in range(2)]
    for value, (region, number) in enumerate(blocks):
        second.block(region, number).columns[0].fill_(value)
    for value, (region, number) in enumerate(blocks):
        assert bool((first.block(region, number).columns[0] == value).all())
    assert first.region("b", rows(4), num_blocks=2).start == regions[1].start, "it fits where it stood"
    moved = first.region("b", rows(50), num_blocks=2)
    assert moved.start == regions[2].end
    assert first.region("d", rows(5)).start == regions[1].start, "what it left is used again"
    assert first.region("e", rows(100)).start == moved.end


def test_old_views_stay_valid_after_growth(pair):
    first, second = pair
    old = first.block(first.region("rows", rows(5)))
    old.column(("a",)).fill_(3)
    grown = first.region("rows", rows(500))
    new = first.block(grown)
    assert torch.equal(new.columns[0].reshape(-1)[:30], old.columns[0].reshape(-1))
    assert float(second.block(grown).columns[0].reshape(-1)[:30].max()) == 3


def test_progress_words_are_shared_by_worker(pair):
    first, second = pair
    first.progress(1)[ITEM] = 4
    first.progress(2)[WORK] += 1
    assert second.progress(1)[ITEM] == 4 and second.progress(0)[ITEM] == 0
    assert second.progress(2)[WORK] == 1


def test_scarce_memory_raises(pair, monkeypatch):
    first, _ = pair
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="shared memory: .* bytes can't be reserved"):
        first.region("rows", rows(1 << 20))
    monkeypatch.undo()
    assert first.region("other", rows(5)).start == 0, "nothing has changed"
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    gc.collect()  # free objects of other tests now, so that they close no descriptor during the test
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError):
        SharedSegment(1)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_address_space_limit_raises(pair):
    first, _ = pair
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (8 << 20), limits[1]))
    try:
        with pytest.raises(CapacityError, match="shared memory: .* bytes can't be mapped"):
            first.region("rows", rows(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert first.region("other", rows(5)).start == 0, "nothing has changed"
