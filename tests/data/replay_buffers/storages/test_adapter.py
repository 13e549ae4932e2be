"""Storages that users wrote for other releases work in gleanrl's buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from gleanrl.errors import EmptyBufferError, InvalidTypeError, UnsupportedError
from gleanrl.testing import check_storage
from tests.data.replay_buffers.familiar import Ring, Shelf


@pytest.mark.parametrize("writer", [None, Ring])
def test_custom_storage_works_as_a_tensor_storage(writer):
    storage = Shelf(5)
    buffer, other = (
        ReplayBuffer(storage=kept, writer=writer and writer(), batch_size=50)
        for kept in (storage, LazyTensorStorage(5))
    )
    for count in (7, 3, 1, 4, 2):
        data = torch.arange(count) + 10 * count
        assert buffer.extend(data).tolist() == other.extend(data).tolist()
        assert int(buffer.add(data[0])) == int(other.add(data[0]))
        assert torch.equal(buffer[:], other[:]) and int(buffer[2]) == int(other[2])
        assert {*torch.cat([buffer.sample(), buffer.sample()]).tolist()} == {*other[:].tolist()}
    buffer[1] = torch.tensor(5)
    buffer[torch.tensor([0, 3])] = torch.tensor([6, 7])
    assert storage.records[1] == 5 and storage.records[3] == 7
    assert buffer.storage is storage and len(buffer) == len(storage) == 5
    buffer.empty()
    assert storage.records == {} and len(buffer) == 0
    with pytest.raises(EmptyBufferError):
        buffer.sample()


def test_custom_storages_state_is_saved_with_the_buffer():
    buffer = ReplayBuffer(storage=Shelf(5), batch_size=2)
    buffer.extend(torch.arange(7))
    state = buffer.state_dict()
    for copied in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        copied.add(torch.tensor(9))
        assert copied[:].tolist() == [5, 6, 9, 3, 4] and buffer[:].tolist() == [5, 6, 2, 3, 4]
    buffer.empty()
    buffer.load_state_dict(state)
    assert buffer[:].tolist() == [5, 6, 2, 3, 4]
    buffer.add(torch.tensor(9))
    assert buffer[:].tolist() == [5, 6, 9, 3, 4]


class Streams(Shelf):
    """Keeps time steps of several streams."""

    def __init__(self, max_size):
        Storage.__init__(self, max_size, ndim=2)
        self.records = {}


def test_empty_custom_storage_with_batch_dimensions_is_saved_and_loaded():
    buffer, other = (ReplayBuffer(storage=Streams(6), batch_size=2) for _ in range(2))
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 0
    other.extend(torch.arange(6).view(2, 3))
    assert [record.tolist() for record in other.storage.records.values()] == [[0, 3], [1, 4], [2, 5]]


def test_custom_storage_may_hold_records_already():
    storage = Shelf(5)
    storage.set(range(3), torch.arange(3))
    buffer = ReplayBuffer(storage=storage, batch_size=3, sampler=SamplerWithoutReplacement())
    assert len(buffer) == 3 and sorted(buffer.sample().tolist()) == [0, 1, 2]
    assert buffer.extend(torch.arange(2)).tolist() == [3, 4]


def test_custom_storage_serves_priorities_and_max_value_writers():
    buffer = TensorDictReplayBuffer(
        storage=Shelf(5),
        sampler=PrioritizedSampler(5, 1.0, 1.0, seed=0),
        writer=TensorDictMaxValueWriter(rank_key="x"),
        batch_size=8,
    )
    rows = TensorDict({"x": torch.tensor([3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0])}, [7])
    assert buffer.extend(rows).tolist() == [0, -1, 1, -1, 2, 3, 4]
    assert buffer.add(TensorDict({"x": torch.tensor(7.0)}, [])) == 4
    assert buffer[:]["x"].tolist() == [3, 4, 5, 9, 7]
    buffer.update_priority(range(5), torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]))
    assert buffer.sample()["x"].tolist() == [9.0] * 8


class Tenfold(LazyTensorStorage):
    """Overrides reading: it returns ten times the values."""

    def get(self, index):
        return super().get(index) * 10

    def set(self, cursor, data, *, set_cursor=True):
        super().set(cursor, data + 1, set_cursor=set_cursor)


class Objects(ListStorage):
    """Overrides reading: it adds one."""

    def get(self, index):
        found = super().get(index)
        return [record + 1 for record in found] if isinstance(found, list) else found + 1


@pytest.mark.parametrize("writer", [None, Ring])
def test_overridden_methods_of_library_storages_are_called(writer):
    buffer = ReplayBuffer(storage=Tenfold(5), writer=writer and writer(), batch_size=30)
    buffer.extend(torch.arange(4))
    buffer.add(torch.tensor(4))
    buffer.extend(torch.arange(10, 13))
    assert buffer[:].tolist() == [110, 120, 130, 40, 50] and int(buffer[3]) == 40
    assert set(buffer.sample().tolist()) == {110, 120, 130, 40, 50}
    assert buffer.storage.end == 3 and len(buffer) == 5 and buffer.stats().rows_written == 8
    buffer.storage.check_valid()
    other = ReplayBuffer(storage=Tenfold(5), writer=writer and writer())
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(other[:], buffer[:])
    buffer.empty()
    assert len(buffer) == 0
    objects = ReplayBuffer(storage=Objects(5), batch_size=2)
    objects.extend([1, 1, 1])
    assert objects.sample().tolist() == [2, 2] and objects[0] == 2


class Half(LazyTensorStorage):
    """Overrides reading: it returns another dtype."""

    def get(self, index):
        return super().get(index).to(torch.float16)


def test_custom_storage_serves_slices():
    buffer = TensorDictReplayBuffer(storage=Half(20), sampler=SliceSampler(slice_len=2, seed=0), batch_size=8)
    t = torch.arange(20)
    buffer.extend(TensorDict({"t": t, "x": t.float(), "next": {"done": (t % 5 == 4)[:, None]}}, [20]))
    batch = buffer.sample()
    assert batch["x"].dtype == torch.float16
    assert (batch["x"].view(4, 2).diff(dim=1) == 1).all() and (batch["index"] == batch["x"]).all()
    assert buffer.sample(keys=["x"])["x"].dtype == torch.float16
    plain = ReplayBuffer(storage=Shelf(5), sampler=SliceSampler(slice_len=2))
    plain.extend(t)
    with pytest.raises(UnsupportedError, match="slices need records in columns"):
        plain.sample(2)


def test_custom_storage_without_required_calls_raises():
    class Hasty(Storage):
        def __init__(self):
            self.records = []

        def get(self, index):
            return self.records[index]

        def set(self, cursor, data):
            self.records.append(data)

    with pytest.raises(InvalidTypeError, match=r"Hasty has to call super\(\).__init__\(max_size\)"):
        ReplayBuffer(storage=Hasty())
    with pytest.raises(TypeError, match="abstract"):
        type("Idle", (Storage,), {})(3)
    with pytest.raises(UnsupportedError, match="use it in a ReplayBuffer"):
        Shelf(3).fetch(torch.arange(2))


def test_check_storage_names_skipped_rules():
    report = check_storage(lambda: Shelf(8))
    assert "by itself" in report.skipped["refusal"] and "ring" in report.passed


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_a_storage_that_overrides_empty_is_loaded(kind):
    class Counting(kind):
        emptied = 0

        def _empty(self):
            self.emptied += 1
            super()._empty()

    def made():
        return ReplayBuffer(storage=Counting(8), batch_size=2)

    one, other = made(), made()
    for rb in (one, other):
        rb.extend([1, 2, 3] if kind is ListStorage else TensorDict({"a": torch.arange(3.0)}, [3]))
    one.extend([4, 5] if kind is ListStorage else TensorDict({"a": torch.arange(2.0)}, [2]))
    other.load_state_dict(one.state_dict())
    assert len(other) == 5 and str(other[:]) == str(one[:])
    emptied = other.storage.emptied
    other.empty()
    assert len(other) == 0 and other.storage.emptied == emptied + 1
