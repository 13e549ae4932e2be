"""Writers that users wrote for other releases work in gleanrl's buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictReplayBuffer,
    Writer,
)
from gleanrl.errors import SchemaError, UnsupportedError
from tests.data.replay_buffers.familiar import Ring


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_custom_ring_writer_works_as_the_librarys(make):
    writer = Ring()
    buffer, other = (ReplayBuffer(storage=make(5), writer=one, batch_size=3) for one in (writer, None))
    for count in (3, 1, 4, 7, 2):
        data = torch.arange(count) + 10 * count
        assert buffer.extend(data).tolist() == other.extend(data).tolist()[-5:]
        assert int(buffer.add(data[0])) == int(other.add(data[0]))
        assert torch.equal(buffer[:], other[:]) and buffer.storage.end == other.storage.end
        buffer.storage.check_valid()
    assert buffer.writer is writer
    buffer.empty()
    assert writer._cursor == 0 == len(buffer)


@pytest.mark.parametrize("ndim", [1, 2])
def test_slices_end_at_the_cursor_of_a_custom_writer(ndim):
    streams = (2,) * (ndim - 1)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10 * 2 ** (ndim - 1), ndim=ndim),
        sampler=SliceSampler(slice_len=3, seed=0),
        writer=Ring(),
        batch_size=30,
    )
    for start in (0, 9):
        t = torch.arange(start, start + 9).expand(*streams, 9)
        over = torch.zeros(*t.shape, 1, dtype=torch.bool)
        buffer.extend(TensorDict({"t": t, "next": {"done": over}}, t.shape))
    t = buffer.sample()["t"].view(-1, 3)
    assert (t.diff(dim=1) == 1).all() and (t >= 8).all() and buffer.storage.end == 8


def test_custom_writers_state_is_saved_with_the_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), writer=Ring())
    buffer.extend(torch.arange(7))
    assert buffer.writer.state_dict() == {"_cursor": 2}
    state = buffer.state_dict()
    for copied in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert copied.extend(torch.arange(2)).tolist() == [2, 3]
    buffer.empty()
    buffer.load_state_dict(state)
    with pytest.raises(SchemaError, match="a Ring rejects the state"):
        buffer.load_state_dict({**state, "_writer": {"state": {}}})
    assert buffer.extend(torch.arange(2)).tolist() == [2, 3]


class Doubling(RoundRobinWriter):
    """Overrides one method."""

    def extend(self, data):
        return super().extend(data * 2)


def test_overridden_extend_is_called():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), writer=Doubling())
    assert buffer.extend(torch.arange(3)).tolist() == [0, 1, 2] and buffer.add(torch.tensor(9)) == 3
    assert buffer[:].tolist() == [0, 2, 4, 9] and buffer.writer.cursor == 4
    twice = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), writer=Doubling())
    assert twice.extend(torch.arange(6).view(3, 2)).tolist() == [
        [0, 0],
        [0, 1],
        [0, 2],
        [1, 0],
        [1, 1],
        [1, 2],
    ]
    assert twice.storage[:].tolist() == [[0, 4, 8], [2, 6, 10]], "extended data come with time last"


@pytest.mark.parametrize("make", [RoundRobinWriter, Ring])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_writer_works_without_a_buffer(make, storage):
    writer, storage = make(), storage(4)
    writer.register_storage(storage)
    assert writer.add(torch.tensor(10)) == 0
    assert writer.extend(torch.arange(11, 15)).tolist() == [1, 2, 3, 0]
    assert [int(x) for x in storage.get(slice(None))] == [14, 11, 12, 13]
    storage._empty()
    writer._empty()
    assert writer.extend(torch.arange(2)).tolist() == [0, 1]


def test_a_writer_of_a_buffer_called_by_itself():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=20)
    buffer.writer.extend([torch.tensor(5), torch.tensor(6)])
    assert set(buffer.sample().tolist()) == {5, 6}


def test_a_writer_of_another_library_may_lack_empty():
    class Foreign:
        add, extend, state_dict, load_state_dict = (
            Ring.add,
            Ring.extend,
            Ring.state_dict,
            Ring.load_state_dict,
        )
        _cursor = 0

        def register_storage(self, storage):
            self._storage = storage

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=Foreign())
    buffer.extend(torch.arange(3))
    buffer.empty()
    assert len(buffer) == buffer.write_count == 0


def test_a_method_that_is_missing():
    class Many(Writer):
        def extend(self, data):
            self._storage.set(range(len(data)), data)
            return torch.arange(len(data))

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=Many())
    buffer.extend(torch.arange(3))
    with pytest.raises(UnsupportedError, match="class Many.*add"):
        buffer.add(torch.tensor(1))
    with pytest.raises(TypeError, match="abstract"):
        type("Idle", (Writer,), {})()
