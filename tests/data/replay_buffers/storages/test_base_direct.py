"""Storages accept direct writes without a buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyTensorStorage, ListStorage
from gleanrl.errors import IndexRangeError, InvalidTypeError, SchemaError


def test_set_leaves_no_gap_and_stays_inside():
    storage = LazyTensorStorage(5)
    storage.set(0, torch.arange(3))
    for start, count in [(4, 1), (-1, 1), (3, 3)]:
        with pytest.raises(IndexRangeError, match="set: expected steps in"):
            storage.set(start, torch.arange(count))
    assert storage.get(slice(None)).tolist() == [0, 1, 2]
    storage.set(1, torch.arange(10, 14))
    assert storage.get(slice(None)).tolist() == [0, 10, 11, 12, 13]


CURSORS = {
    "range": lambda steps: range(steps[0], steps[-1] + 1),
    "slice": lambda steps: slice(steps[0], steps[-1] + 1),
    "list": lambda steps: steps,
    "tensor": torch.tensor,
    "array": np.array,
}


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("cursor", CURSORS.values(), ids=CURSORS)
def test_set_takes_steps_of_any_kind(make, cursor):
    storage = make(5)
    storage.set(cursor([0, 1, 2]), torch.tensor([10, 11, 12]))
    storage[cursor([2, 3])] = torch.tensor([22, 13])
    assert [int(x) for x in storage.get(slice(None))] == [10, 11, 22, 13] and storage.end == 4
    storage.set(cursor([1]), torch.tensor([31]))
    assert [int(x) for x in storage.get(slice(None))] == [10, 31, 22, 13] and storage.end == 4
    storage.check_valid()


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_set_goes_around_the_ring(make):
    storage = make(5)
    storage.set(range(4), torch.arange(4))
    storage.set(torch.tensor([4, 0, 1]), torch.arange(4, 7))
    assert [int(x) for x in storage.get(slice(None))] == [5, 6, 2, 3, 4] and storage.end == 2
    storage.set(2, torch.tensor(7))
    assert storage.end == 3, "a record behind the newest one goes on with the ring"
    storage.set(0, torch.tensor(50))
    storage.set([4, 1], torch.tensor([40, 60]))
    assert [int(x) for x in storage.get(slice(None))] == [50, 60, 7, 3, 40] and storage.end == 3
    storage.set([3], torch.tensor([30]), set_cursor=False)
    assert storage.end == 3
    for cursor in ([5], [-1], [0, 5]):
        with pytest.raises(IndexRangeError, match="set: expected steps in"):
            storage.set(cursor, torch.zeros(len(cursor), dtype=torch.int64))
    with pytest.raises(SchemaError, match="expected 2 time steps, as many as the cursor names, got 3"):
        storage.set([0, 1], torch.arange(3))
    with pytest.raises(IndexRangeError, match="names no time step"):
        storage.set([], torch.arange(3))
    storage.check_valid()


def test_set_that_leaves_a_gap_raises():
    storage = LazyTensorStorage(6)
    storage.set([1, 0], torch.tensor([1, 0]))
    assert storage.get(slice(None)).tolist() == [0, 1]
    for cursor in ([3], [3, 4], [4, 2]):
        with pytest.raises(IndexRangeError, match="leave no gap after the 2 steps"):
            storage.set(cursor, torch.arange(len(cursor)))
    storage.set([3, 2], torch.tensor([3, 2]))
    assert storage.get(slice(None)).tolist() == [0, 1, 2, 3] and storage.end == 4


@pytest.mark.parametrize("ndim", [1, 2])
def test_set_at_an_int_tells_one_record_from_many(ndim):
    storage, batch = LazyTensorStorage(12, ndim=ndim), (3,) * (ndim - 1)
    storage.set(0, TensorDict({"x": torch.zeros(*batch, 2)}, batch))
    assert storage.num_steps == 1
    storage.set(1, TensorDict({"x": torch.ones(2, *batch, 2)}, (2, *batch)))
    storage.set(3, TensorDict({"x": torch.full((*batch, 2), 3.0)}, batch))
    assert storage.get(slice(None))["x"].reshape(4, -1)[:, 0].tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_set_accepts_an_int_in_a_tuple(make):
    storage = make(6)
    storage.set((0,), torch.tensor(7))
    storage.set((torch.tensor(1),), torch.tensor(8))
    assert [int(x) for x in storage.get(slice(None))] == [7, 8]
    with pytest.raises(IndexRangeError, match="leave no gap"):
        storage.set((4,), torch.tensor(9))


def test_set_at_slices_of_other_values_raises():
    storage = LazyTensorStorage(6)
    storage.set(range(3), torch.arange(3))
    with pytest.raises(IndexRangeError, match="has the step 0"):
        storage.set(slice(0, 3, 0), torch.arange(3))
    with pytest.raises(InvalidTypeError, match="integers or None in a slice"):
        storage.set(slice("a", None), torch.arange(3))


def test_set_accepts_coordinates():
    storage = LazyTensorStorage(6, ndim=2)
    storage.set(range(2), torch.arange(6).view(2, 3))
    storage[torch.tensor([0, 1]), torch.tensor([2, 0])] = torch.tensor([20, 30])
    assert storage.get(slice(None)).tolist() == [[0, 1, 20], [30, 4, 5]]


def test_a_storage_can_be_emptied_by_its_older_name():
    storage = LazyTensorStorage(3)
    storage.set(range(3), torch.arange(3))
    storage._empty()
    assert len(storage) == 0
