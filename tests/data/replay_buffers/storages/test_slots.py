"""Storages reject bad sizes, and keep a generation of eight bytes for each slot in use."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, ListStorage
from gleanrl.errors import IndexRangeError, InvalidArgumentError
from tests.data.replay_buffers.oracle import fill


@pytest.mark.parametrize("size", [0, -3, 1.5, None, True])
def test_bad_sizes_are_refused(size):
    with pytest.raises(InvalidArgumentError, match="max_size: expected an integer of 1 or more"):
        LazyTensorStorage(size)
    with pytest.raises(InvalidArgumentError, match="ndim"):
        LazyTensorStorage(3, ndim=size)


def test_generations_cost_eight_bytes_a_row_and_only_where_used():
    storage = ListStorage(10_000_000)
    fill(storage, [1])
    assert storage.generation(torch.tensor([0, 9_999_999])).tolist() == [1, 0]


def test_the_end_leaves_no_gap():
    storage = LazyTensorStorage(5)
    for step in (1, -1, 5):
        with pytest.raises(IndexRangeError, match="end: expected a step"):
            storage.end = step
    fill(storage, torch.arange(5))
    storage.end = 3
    assert storage.end == 3
