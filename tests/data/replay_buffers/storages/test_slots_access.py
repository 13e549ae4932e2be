"""Storages can be read without a buffer, and listeners follow their writes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from gleanrl.errors import EmptyBufferError, IndexRangeError, InvalidTypeError, SchemaError
from tests.data.replay_buffers.oracle import clock, fill, ted


class Follower:
    """Records the changes that it receives."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def mark_update(self, index: torch.Tensor) -> None:
        self.told.append(index.tolist())


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_storage_is_indexed_and_iterated_by_record(kind):
    storage = kind(6)
    assert list(storage) == []
    storage.set(range(4), ted(4))
    assert [int(clock(record)) for record in storage] == [0, 1, 2, 3]
    assert int(clock(storage[2])) == 2
    with pytest.raises(IndexRangeError):
        storage[4]


def test_iteration_over_several_batch_dimensions_is_over_time():
    storage = LazyTensorStorage(12, ndim=2)
    fill(storage, torch.arange(6).view(2, 3))
    assert [step.tolist() for step in storage] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("make", [lambda t: t, lambda t: {"a": t, "b": (t.float(),)}], ids=["tensor", "tree"])
def test_the_flat_form_shares_the_memory(kind, make):
    storage = kind(12, ndim=2)
    with pytest.raises(EmptyBufferError):
        storage.flatten()
    fill(storage, make(torch.arange(6).view(2, 3)))
    flat = storage.flatten()
    assert isinstance(flat, TensorStorage) and (flat.ndim, len(flat), flat.max_size) == (1, 6, 6)
    first = (lambda data: data) if isinstance(flat[0], torch.Tensor) else (lambda data: data["a"])
    assert first(flat[:]).tolist() == list(range(6))
    fill(storage, make(torch.full((1, 3), 9)), 1)
    assert first(flat[:]).tolist() == [0, 1, 2, 9, 9, 9]
    assert flat.flatten() is flat


def test_flat_streams_keep_their_rows():
    storage = LazyTensorStorage(12, ndim=2)
    fill(storage, ted(4, streams=3).transpose(0, 1))
    flat = storage.flatten()
    assert flat[:].batch_size == (12,)
    assert clock(flat[:]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert flat[:]["observation"][:, 0].tolist() == [0, 1, 2] * 4


def test_followers_hear_of_every_write():
    rb, follower = ReplayBuffer(storage=LazyTensorStorage(5)), Follower()
    rb.storage.attach(follower)
    rb.storage.attach(follower)
    rb.extend(torch.arange(3))
    rb.add(torch.tensor(3))
    rb.extend(torch.arange(4, 7))
    rb[[1, 3]] = torch.zeros(2, dtype=torch.int64)
    fill(rb.storage, torch.zeros(2, dtype=torch.int64))
    assert follower.told == [[0, 1, 2], [3], [4, 0, 1], [1, 3], [0, 1]]
    grid, follower = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2)), Follower()
    grid.storage.attach(follower)
    grid.extend(torch.zeros(2, 1))
    assert follower.told == [[[0, 0], [0, 1]]]


def test_followers_hear_of_the_records_that_a_max_value_writer_kept():
    rb, follower = ReplayBuffer(storage=ListStorage(2), writer=TensorDictMaxValueWriter()), Follower()
    rb.storage.attach(follower)
    rb.extend(ted(3))
    rb.extend(ted(1))
    assert follower.told == [[0, 1], []]


def test_write_is_complete_before_followers_hear_of_it():
    class Reader(Follower):
        def mark_update(self, index: torch.Tensor) -> None:
            self.told.append(rb[index.tolist()].tolist())

    rb, reader = ReplayBuffer(storage=LazyTensorStorage(5)), Reader()
    rb.storage.attach(reader)
    rb.extend(torch.arange(3))
    assert reader.told == [[0, 1, 2]]


def test_followers_are_held_weakly_and_not_copied():
    storage, follower = LazyTensorStorage(5), Follower()
    storage.attach(follower)
    other = copy.deepcopy(storage)
    fill(other, torch.arange(2))
    assert follower.told == []
    follower_of = weakref.ref(follower)
    del follower
    gc.collect()
    assert follower_of() is None
    fill(storage, torch.arange(2))
    with pytest.raises(InvalidTypeError, match="mark_update"):
        storage.attach(3)


# Calls by users, without a buffer


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_records_are_set_at_any_kind_of_index(storage):
    storage = storage(10)
    storage.set(0, torch.tensor(5.0))
    assert storage[:].tolist() == [5], "an int is one record"
    storage.set(range(1, 3), torch.tensor([6.0, 7.0]))
    storage.set([3, 0], torch.tensor([8.0, 4.0]))
    storage.set(torch.tensor([4]), torch.tensor([9.0]))
    storage.set(slice(1, 2), torch.tensor([-6.0]))
    storage[5] = torch.tensor(10.0)
    storage[[5, 5]] = torch.tensor([1.0, 2.0])
    assert storage[:].tolist() == [4, -6, 7, 8, 9, 2] and storage.end == 6
    assert storage.generation(torch.arange(6)).tolist() == [2, 2, 1, 1, 1, 3]
    storage[:6] = torch.arange(6.0)
    storage[6:10] = torch.arange(6.0, 10.0)
    assert storage[:].tolist() == list(range(10)) and storage.end == 0 and storage.get(3) == 3
    storage.check_valid()
    for index, data in ((10, 1.0), (-1, 1.0), ([0, 1], [1.0]), (range(3), [1.0] * 4)):
        with pytest.raises((IndexRangeError, SchemaError), match="set"):
            storage.set(index, torch.tensor(data))
    short = LazyTensorStorage(10)
    with pytest.raises(IndexRangeError, match="gap"):
        short.set([0, 2], torch.zeros(2))


def test_objects_are_set_at_any_kind_of_index():
    storage = ListStorage()
    storage[0] = "a"
    storage.set(range(1, 3), ["b", "c"])
    storage.set([4, 3], ["e", "d"])
    storage.set(slice(0, 2), ["A", "B"])
    assert storage.get(slice(None)) == ["A", "B", "c", "d", "e"] and storage.get(1) == "B"
    assert storage.get(torch.tensor([0, 4])) == storage.get([0, 4]) == ["A", "e"]
    storage.check_valid()


def test_steps_of_several_streams_are_set():
    storage = LazyTensorStorage(12, ndim=2)
    storage.set(0, torch.arange(3))
    storage.set([2, 1], torch.tensor([[6, 7, 8], [3, 4, 5]]))
    assert storage[:].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] and len(storage) == 9


def test_contains_reports_stored_slots():
    storage, grid = LazyTensorStorage(10), LazyTensorStorage(10, ndim=2)
    assert 0 not in storage
    storage.set(range(4), torch.arange(4))
    assert storage.contains(2) is True and storage.contains(5) is False and 3 in storage and 4 not in storage
    assert storage.contains(-1) and not storage.contains(-5)
    assert (
        storage.contains(torch.tensor([1, 7])).tolist() == storage.contains([1, 7]).tolist() == [True, False]
    )
    assert torch.tensor([1, 2]) in storage and [1, 7] not in storage and range(4) in storage
    grid.set(range(3), torch.zeros(3, 2))
    assert grid.contains(2) and not grid.contains(3)
    assert grid.contains(torch.tensor([[1, 1], [2, 5]])).tolist() == [True, False]
    assert grid.contains((torch.tensor([1, 3]), torch.tensor([1, 1]))).tolist() == [True, False]


def test_contains_reads_an_index_like_getitem():
    grid, line = LazyTensorStorage(10, ndim=2), LazyTensorStorage(10)
    grid.set(range(3), torch.zeros(3, 2))
    line.set(range(3), torch.zeros(3))
    first = torch.tensor(1)
    for one in [(first, first), (1, 1), (-1, first), (2,)]:
        assert grid.contains(one) is True and one in grid and grid[one].numel() in (1, 2)
    for one in [(first, torch.tensor(2)), (1, 2), (3, 0), (3,)]:
        assert grid.contains(one) is False and one not in grid
    assert grid.contains((1, [0, 1, 2])).tolist() == [True, True, False]
    # A tensor (2,) holds time steps. So does one whose last dimension isn't ndim.
    assert grid.contains(torch.tensor([2, 2])).tolist() == [True, True] and grid[
        torch.tensor([2, 2])
    ].shape == (2, 2)
    steps = torch.tensor([[0, 1, 2], [2, 3, 4]])
    assert grid.contains(steps).tolist() == [[True, True, True], [True, False, False]]
    assert (
        line.contains((first,)) is True and line.contains((steps,)).tolist() == grid.contains(steps).tolist()
    )


def test_directories_may_be_anything_that_names_a_path(tmp_path):
    class Named:
        def __fspath__(self) -> str:
            return str(tmp_path / "replay")

    LazyMemmapStorage(10, scratch_dir=Named()).set(range(3), TensorDict({"x": torch.arange(3)}, [3]))
    assert (tmp_path / "replay" / "x.memmap").exists()


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_key_selects_the_column_of_stored_records(make):
    storage = make(5)
    x = torch.arange(3)
    storage.set(range(3), TensorDict({"x": x, "next": {"y": x + 1}}, [3]))
    for at in (storage.get, storage.__getitem__):
        assert torch.equal(at("x"), x) and torch.equal(at(("next", "y")), x + 1)
        with pytest.raises(KeyError, match="'z' isn't stored"):
            at("z")
