"""List storages keep any object unchanged."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyStackStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.storages.lists import collate, split
from gleanrl.errors import (
    EmptyBufferError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.oracle import clock, ted


def test_the_default_buffer_keeps_any_object():
    buffer = ReplayBuffer(batch_size=2)
    marker = object()
    assert buffer.extend(["a", marker]).tolist() == [0, 1]
    assert buffer.add({"a": 1}) == 2
    assert buffer[1] is marker and buffer[0] == "a" and buffer[-1] == {"a": 1}
    assert buffer._storage.max_size == 1000
    with pytest.raises(IndexRangeError):
        buffer[3]


def test_batches_are_split_into_copies():
    data = ted(4)
    storage = ListStorage(10)
    storage.set(range(4), data)
    data["observation"].zero_()
    assert clock(torch.stack(storage.get([0, 3]))).tolist() == [0, 3]


@pytest.mark.parametrize(
    "data, rows",
    [
        ([1, "x"], [1, "x"]),
        (torch.arange(2), [0, 1]),
        ({"a": torch.arange(2), "b": (torch.ones(2),)}, [{"a": 0, "b": (1,)}, {"a": 1, "b": (1,)}]),
        ((torch.arange(2), torch.ones(2)), [(0, 1), (1, 1)]),
        (range(2), [0, 1]),
    ],
)
def test_split_returns_the_objects_of_a_batch(data, rows):
    assert split(data, "extend") == rows


@pytest.mark.parametrize(
    "data, error",
    [
        (torch.tensor(1.0), SchemaError),
        ((), InvalidTypeError),
        ({"a": "x"}, InvalidTypeError),
        ({"a": torch.ones(2), "b": torch.ones(3)}, SchemaError),
        ("text", InvalidTypeError),
        (3, InvalidTypeError),
    ],
)
def test_split_refuses_values_without_a_batch_dimension(data, error):
    with pytest.raises(error, match="extend"):
        split(data, "extend")


def test_batches_are_stacked():
    rows = [TensorDict({"x": torch.full((2,), float(i))}, []) for i in range(3)]
    assert collate(rows)["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert collate([torch.ones(2), torch.zeros(2)]).shape == (2, 2)
    assert collate([1, 2]).tolist() == [1, 2]
    assert collate([np.ones(2), np.zeros(2)]).shape == (2, 2)
    assert collate([{"a": 1.5}, {"a": 2.5}])["a"].tolist() == [1.5, 2.5]


def test_a_sample_doesnt_alias_the_objects():
    buffer = ReplayBuffer(batch_size=4)
    buffer.extend([torch.ones(2), torch.ones(2)])
    buffer.sample().zero_()
    assert buffer[0].tolist() == [1, 1]


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sample_of_unlike_records_doesnt_alias_them(storage, prefetch):
    buffer = ReplayBuffer(storage=storage(4), batch_size=8, prefetch=prefetch, seed=0)
    buffer.extend([TensorDict({"x": torch.full((n,), n), "n": torch.tensor(n)}) for n in (1, 2)])
    batch = buffer.sample()
    batch["place"] = torch.arange(8)
    assert batch["place"].tolist() == [*range(8)], "a record that is drawn twice is there twice"
    for part in batch.unbind(0):
        part["x"].zero_()
    for n in (1, 2):
        assert {*buffer[n - 1].keys()} == {"x", "n"} and buffer[n - 1]["x"].tolist() == [n] * n


def test_assignment_by_index_replaces_objects():
    buffer = ReplayBuffer()
    buffer.extend([1, 2, 3])
    buffer[1] = 20
    buffer[[0, 2]] = [10, 30]
    assert buffer._storage._storage == [10, 20, 30]
    with pytest.raises(SchemaError, match="selects 2 records, got 1"):
        buffer[[0, 2]] = [5]
    with pytest.raises(UnsupportedError, match="only a tensor storage of TensorDicts has columns"):
        buffer["key"] = 3


def test_writes_without_rows_and_dim_extend_raise():
    buffer = ReplayBuffer(dim_extend=1)
    with pytest.raises(UnsupportedError, match="dim_extend"):
        buffer.extend(torch.ones(2, 2))
    with pytest.raises(SchemaError, match="no record"):
        ReplayBuffer().extend([])
    with pytest.raises(EmptyBufferError):
        ReplayBuffer()[0]


def test_state_is_deep():
    storage = ListStorage(5)
    storage.set(0, [[1], torch.ones(2)])
    state = storage.state_dict()
    storage.get(0).append(2)
    assert state["items"][0] == [1]
    other = ListStorage(5)
    other.load_state_dict(state)
    other.get(1).zero_()
    assert state["items"][1].tolist() == [1, 1]
    other.check_valid()
    for bad in ({**state, "num_steps": 3}, {**state, "max_size": 1}, {}):
        with pytest.raises(SchemaError, match="load_state_dict"):
            other.load_state_dict(bad)
    assert len(other) == 2


def test_a_list_without_a_size_takes_any_number():
    buffer = ReplayBuffer(storage=ListStorage(), batch_size=100)
    for start in range(0, 3000, 750):
        assert buffer.extend(list(range(start, start + 750))).tolist() == list(range(start, start + 750))
        buffer.storage.check_valid()
    assert buffer.add(3000) == 3000 and len(buffer) == 3001 and buffer[3000] == 3000 and buffer[0] == 0
    assert set(buffer.sample().tolist()) <= set(range(3001)) and "any number" in repr(buffer.storage)
    other = ReplayBuffer(storage=ListStorage(), batch_size=100)
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 3001 and other.sample().tolist() == buffer.sample().tolist()
    assert len(copy.deepcopy(buffer)) == 3001
    buffer.empty()
    assert buffer.extend(["again"]).tolist() == [0] and buffer.generation(0).item() >= 2


def test_the_size_of_its_sampler_is_that_of_a_list_without_one():
    buffer = ReplayBuffer(storage=ListStorage(), sampler=PrioritizedSampler(3, 1.0, 1.0), batch_size=5)
    assert buffer.storage.max_size == 3 and buffer.extend(list(range(4))).tolist()[-1] == 0
    assert buffer[:].tolist() == [3, 1, 2]
    later = ReplayBuffer(storage=ListStorage(), batch_size=200)
    later.extend(list(range(4)))
    with pytest.raises(InvalidArgumentError, match="3 is less than the 4"):
        later.set_sampler(PrioritizedSampler(3, 1.0, 1.0))
    later.set_sampler(PrioritizedSampler(6, 1.0, 1.0))
    assert later.storage.max_size == 6 and later.extend([4, 5, 6]).tolist() == [4, 5, 0]
    assert set(later.sample().tolist()) == {1, 2, 3, 4, 5, 6}
    with pytest.raises(InvalidArgumentError, match="max_size"):
        ReplayBuffer(storage=ListStorage(), writer=TensorDictMaxValueWriter())


def test_priorities_grow_with_a_list_without_a_size():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(), batch_size=50)
    buffer.extend(list(range(10)))
    buffer.update_priority(torch.arange(10), torch.tensor([1.0] + [0.0] * 9))
    for start in range(10, 4000, 500):
        index = buffer.extend(list(range(start, start + 500)))
        buffer.update_priority(index, torch.zeros(500))
        assert buffer.sample().tolist() == [0] * 50, "what was given stays as the table grows"


def test_objects_are_moved_to_the_device_of_a_list():
    storage = ListStorage(5, device="meta")
    ReplayBuffer(storage=storage).extend([torch.zeros(2), {"a": torch.zeros(3)}, "text", ted(1)[0]])
    assert storage.get(0).is_meta and storage.get(1)["a"].is_meta and storage.get(2) == "text"
    assert storage.get(3).device.type == "meta"


def test_tuples_are_stacked_as_tuples():
    rb = ReplayBuffer(storage=ListStorage(4), batch_size=3)
    rb.extend([(torch.tensor(n), (torch.ones(2), f"{n}")) for n in range(4)])
    numbers, (ones, texts) = rb[:]
    assert type(rb[:]) is type(rb.sample()) is tuple
    assert numbers.tolist() == [*range(4)] and ones.shape == (4, 2) and texts == ["0", "1", "2", "3"]


class Holder:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "record, value",
    [
        (lambda x: x, lambda item: item),
        (lambda x: {"a": (x, [x])}, lambda item: item["a"][1][0]),
        (lambda x: TensorDict({"a": x}), lambda item: item["a"]),
        (Holder, lambda item: item.value),
    ],
)
def test_state_of_tensors_with_a_graph_holds_their_values(record, value):
    layer = torch.nn.Linear(3, 3)
    buffer, other = (ReplayBuffer(storage=ListStorage(10), batch_size=2) for _ in range(2))
    buffer.extend([record(layer(torch.full((3,), float(i)))) for i in range(3)])
    buffer.add(record(layer.weight))
    state = buffer.state_dict()
    assert [value(item).requires_grad for item in state["_storage"]["items"][:3]] == [False] * 3
    other.load_state_dict(state)
    for i in range(4):
        assert torch.equal(value(other[i]), value(buffer[i])) and value(other[i]) is not value(buffer[i])
    assert value(buffer[0]).requires_grad, "the stored object keeps its graph"


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_records_of_unlike_length_get_index_and_weights_row_by_row(storage, prioritized, sized):
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0) if prioritized else None
    buffer = TensorDictReplayBuffer(storage=storage(10), sampler=sampler, batch_size=4, seed=0)
    lengths = [1, 3, 2, 3, 1, 2]
    for n in lengths:
        x = torch.full((n,), float(n))
        buffer.add(TensorDict({"x": x, "next": {"y": x}}, [n] if sized else []))
    for _ in range(10):
        batch = buffer.sample()
        for record in batch.unbind(0):
            slots = record["index"].reshape(-1).tolist()
            assert len(slots) == (len(record["x"]) if sized else 1) and len(set(slots)) == 1
            assert lengths[slots[0]] == len(record["x"]) == len(record["next", "y"])
            assert not prioritized or record["_weight"].shape == record["index"].shape
    with pytest.warns(UserWarning, match="batch_size=40 differs"):
        batch = buffer.sample(40)
    for record in batch.unbind(0):
        record["td_error"] = (record["x"] == 3.0).float()
    buffer.update_tensordict_priority(batch)
    if prioritized:
        assert {len(record["x"]) for record in buffer.sample().unbind(0)} == {3}


@pytest.mark.parametrize("record", [lambda x: x, lambda x: {"a": x}, Holder])
@pytest.mark.parametrize("whole", [False, True])
def test_deep_copy_of_tensors_with_a_graph_raises(record, whole):
    buffer = ReplayBuffer(storage=ListStorage(10))
    buffer.add(record(torch.ones(2, requires_grad=True) * 2))
    with pytest.raises(UnsupportedError, match="tensors that a graph computed.*detach them"):
        copy.deepcopy(buffer if whole else buffer.storage)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_deep_copy_shares_no_record(storage):
    buffer = ReplayBuffer(storage=storage(10))
    buffer.add(TensorDict({"a": torch.ones(2)}))
    copied = copy.deepcopy(buffer)
    copied[0]["a"].add_(1)
    copied.add(TensorDict({"a": torch.zeros(2)}))
    assert buffer[0]["a"].tolist() == [1, 1]
    assert (len(copied), len(buffer)) == (2, 1)
