"""Lazy stack storages serve records of different shapes and keys as lazy stacks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl.data import LazyStackStorage, ReplayBuffer, TensorDictReplayBuffer
from gleanrl.errors import IndexRangeError, InvalidArgumentError


def records(*lengths: int) -> list[TensorDict]:
    """Return one record per length, with a vector and a text of this length."""
    return [TensorDict({"word": torch.full((n,), n), "text": "a" * n, "n": torch.tensor(n)}) for n in lengths]


@pytest.mark.parametrize("how", [lambda rb: rb, copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_batches_are_lazy_stacks(how):
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=8)
    assert buffer.extend(records(1, 2, 3)).tolist() == [0, 1, 2]
    assert buffer.add(records(4)[0]) == 3 and buffer.add(records(5)[0]) == 0
    batch = how(buffer).sample()
    assert isinstance(batch, LazyStackedTensorDict) and batch.batch_size == (8,)
    for part in batch.unbind(0):
        assert len(part["word"]) == len(part["text"]) == part["n"]
    assert batch.get("word", as_padded_tensor=True).shape[0] == 8


def test_indices_give_records_and_stacks():
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2)
    buffer.extend(records(1, 2, 3))
    assert buffer[1]["text"] == "aa" and isinstance(buffer[:], LazyStackedTensorDict)
    assert buffer[[2, 0]]["text"] == ["aaa", "a"] and buffer[1:]["n"].tolist() == [2, 3]
    with pytest.raises(IndexRangeError):
        buffer[3]


def test_a_batch_is_split_into_its_records():
    buffer = TensorDictReplayBuffer(storage=LazyStackStorage(10), batch_size=3)
    buffer.extend(LazyStackedTensorDict.lazy_stack(records(3, 1)))
    buffer.extend(TensorDict({"word": torch.zeros(2, 5), "n": torch.tensor([5, 5])}, [2]))
    assert [len(buffer[i]["word"]) for i in range(4)] == [3, 1, 5, 5]
    batch = buffer.sample()
    assert [len(buffer[i]["word"]) for i in batch["index"].tolist()] == [
        len(part["word"]) for part in batch.unbind(0)
    ]


def test_keys_may_differ():
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    buffer.extend([TensorDict({"x": torch.ones(1), "y": torch.ones(2)}), TensorDict({"x": torch.ones(1)})])
    batch = buffer.sample()
    assert batch["x"].shape == (4, 1) and {"y" in part.keys() for part in batch.unbind(0)} <= {True, False}


def test_stack_dim_sets_the_dimension_of_the_stack():
    buffer = ReplayBuffer(storage=LazyStackStorage(4, stack_dim=-1), batch_size=3)
    buffer.extend([TensorDict({"x": torch.full((2,), float(i))}, [2]) for i in range(3)])
    assert buffer.sample().batch_size == (2, 3)
    for index in (slice(None), [0, 1, 2]):
        assert buffer[index]["x"].tolist() == [[0, 1, 2]] * 2
    with pytest.raises(InvalidArgumentError, match="stack_dim"):
        LazyStackStorage(4, stack_dim="0")


def test_tensors_and_an_unlimited_size_are_allowed():
    buffer = ReplayBuffer(storage=LazyStackStorage(), batch_size=2)
    buffer.extend(torch.arange(5))
    assert buffer.sample().shape == (2,) and repr(buffer._storage).startswith("LazyStackStorage(5 of")


def test_slices_of_a_storage_are_stacked_like_lists():
    storage = LazyStackStorage(5)
    storage.set(range(3), [TensorDict({"x": torch.ones(n)}) for n in (3, 1, 2)])
    for index in (slice(1, 3), [1, 2]):
        assert [part["x"].shape[0] for part in storage[index].unbind(0)] == [1, 2]
    assert storage[0:0] == []


def test_users_collate_function_gets_the_stack():
    buffer = ReplayBuffer(storage=LazyStackStorage(5), batch_size=3, collate_fn=lambda batch: batch["n"])
    buffer.extend(records(1, 2, 3))
    assert buffer.sample().shape == (3,) and buffer[[2, 0]].tolist() == [3, 1]
