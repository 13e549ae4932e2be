"""Reading a storage by itself, and following its writes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from gleanrl.errors import EmptyBufferError, IndexRangeError, InvalidTypeError
from tests.data.replay_buffers.oracle import clock, ted


class Follower:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def mark_update(self, index: torch.Tensor) -> None:
        self.told.append(index.tolist())


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_indexing_and_iteration(kind):
    storage = kind(6)
    assert list(storage) == []
    storage.set(range(4), ted(4))
    assert [int(clock(record)) for record in storage] == [0, 1, 2, 3]
    assert int(clock(storage[2])) == 2
    with pytest.raises(IndexRangeError):
        storage[4]


def test_iteration_over_several_batch_dimensions_is_over_time():
    storage = LazyTensorStorage(12, ndim=2)
    storage.set(0, torch.arange(6).view(2, 3))
    assert [step.tolist() for step in storage] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("make", [lambda t: t, lambda t: {"a": t, "b": (t.float(),)}], ids=["tensor", "tree"])
def test_the_flat_form_shares_the_memory(kind, make):
    storage = kind(12, ndim=2)
    with pytest.raises(EmptyBufferError):
        storage.flatten()
    storage.set(0, make(torch.arange(6).view(2, 3)))
    flat = storage.flatten()
    assert isinstance(flat, TensorStorage) and (flat.ndim, len(flat), flat.max_size) == (1, 6, 6)
    first = (lambda data: data) if isinstance(flat[0], torch.Tensor) else (lambda data: data["a"])
    assert first(flat[:]).tolist() == list(range(6))
    storage.set(1, make(torch.full((1, 3), 9)))
    assert first(flat[:]).tolist() == [0, 1, 2, 9, 9, 9]
    assert flat.flatten() is flat


def test_flat_streams_keep_their_rows():
    storage = LazyTensorStorage(12, ndim=2)
    storage.set(0, ted(4, streams=3).transpose(0, 1))
    flat = storage.flatten()
    assert flat[:].batch_size == (12,)
    assert clock(flat[:]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert flat[:]["observation"][:, 0].tolist() == [0, 1, 2] * 4


def test_followers_are_told_of_every_write():
    rb, follower = ReplayBuffer(storage=LazyTensorStorage(5)), Follower()
    rb.storage.attach(follower)
    rb.storage.attach(follower)
    rb.extend(torch.arange(3))
    rb.add(torch.tensor(3))
    rb.extend(torch.arange(4, 7))
    rb[[1, 3]] = torch.zeros(2, dtype=torch.int64)
    rb.storage.set(0, torch.zeros(2, dtype=torch.int64))
    assert follower.told == [[0, 1, 2], [3], [4, 0, 1], [1, 3], [0, 1]]
    grid, follower = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2)), Follower()
    grid.storage.attach(follower)
    grid.extend(torch.zeros(2, 1))
    assert follower.told == [[[0, 0], [0, 1]]]


def test_followers_are_told_what_a_choosing_writer_kept():
    rb, follower = ReplayBuffer(storage=ListStorage(2), writer=TensorDictMaxValueWriter()), Follower()
    rb.storage.attach(follower)
    rb.extend(ted(3))
    rb.extend(ted(1))
    assert follower.told == [[0, 1], []]


def test_a_write_counts_before_it_is_told():
    class Reader(Follower):
        def mark_update(self, index: torch.Tensor) -> None:
            self.told.append(rb[index.tolist()].tolist())

    rb, reader = ReplayBuffer(storage=LazyTensorStorage(5)), Reader()
    rb.storage.attach(reader)
    rb.extend(torch.arange(3))
    assert reader.told == [[0, 1, 2]]


def test_followers_are_held_weakly_and_stay_behind():
    storage, follower = LazyTensorStorage(5), Follower()
    storage.attach(follower)
    other = copy.deepcopy(storage)
    other.set(0, torch.arange(2))
    assert follower.told == []
    follower_of = weakref.ref(follower)
    del follower
    gc.collect()
    assert follower_of() is None
    storage.set(0, torch.arange(2))
    with pytest.raises(InvalidTypeError, match="mark_update"):
        storage.attach(3)
