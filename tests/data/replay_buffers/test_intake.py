"""The writing half of a buffer: what it returns, what it tells the sampler, and what an error leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.oracle import fingerprint


def rows(count: int, start: int = 0, streams: int | None = None) -> TensorDict:
    t = torch.arange(start, start + count)
    t = t if streams is None else t + 1000 * torch.arange(streams)[:, None]
    done = (t % 5 == 4)[..., None]
    return TensorDict({"t": t, "next": {"done": done}}, list(t.shape))


def prioritized(capacity: int = 6, ndim: int = 1) -> ReplayBuffer:
    storage = LazyTensorStorage(capacity, ndim=ndim)
    sampler = PrioritizedSampler(capacity, 1.0, 1.0, 0.0, seed=0)
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=100)


def raw(buffer: ReplayBuffer) -> list[float]:
    buffer.sampler._priorities.sync(buffer.storage)
    return buffer.sampler._priorities.state_dict()["raw"].tolist()


def test_what_writes_return():
    one, two = ReplayBuffer(storage=LazyTensorStorage(5)), ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    assert one.extend(rows(3)).tolist() == [0, 1, 2]
    assert one.add(rows(1)[0]) == 3 and one.extend(rows(3)).tolist() == [4, 0, 1]
    assert one.extend(rows(7)).tolist() == [4, 0, 1, 2, 3]
    assert two.extend(rows(2, streams=2)).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert two.add(rows(1, streams=2)[:, 0]).tolist() == [[2, 0], [2, 1]]
    assert two.extend(rows(1, streams=2)).dtype == torch.int64


class Holding:
    """A transform that holds back what comes in until it is told otherwise."""

    hold = True

    def __call__(self, batch: Any) -> Any:
        return batch

    def inv(self, data: Any) -> Any:
        return None if self.hold else data


@pytest.mark.parametrize("ndim", [1, 2])
def test_records_that_are_held_back(ndim):
    streams = None if ndim == 1 else 2
    transform = Holding()
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=ndim), transform=transform)
    for _ in range(2):
        index = buffer.extend(rows(2, streams=streams))
        assert index.shape == ((0,) if ndim == 1 else (0, 2)) and index.dtype == torch.int64
        index = buffer.add(rows(2, streams=streams)[..., 0])
        assert index.shape == ((0,) if ndim == 1 else (0, 2)) and len(buffer) == 0
    transform.hold = False
    buffer.extend(rows(2, streams=streams))
    before = fingerprint(buffer.state_dict())
    transform.hold = True
    buffer[0] = rows(1, 50, streams)[..., 0]
    assert fingerprint(buffer.state_dict()) == before


def test_the_dimension_of_time():
    assert ReplayBuffer(storage=LazyTensorStorage(8, ndim=3)).dim_extend == 2
    first = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), dim_extend=0)
    first.extend(rows(4, streams=2).transpose(0, 1))
    last = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    last.extend(rows(4, streams=2))
    assert first.dim_extend == 0 and torch.equal(first[:]["t"], last[:]["t"])
    with pytest.raises(AttributeError):
        first.dim_extend = 1
    for bad in (-1, 1.0, True, "0"):
        with pytest.raises(InvalidArgumentError, match="dim_extend"):
            ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), dim_extend=bad)


INDICES_1 = [
    (2, [2]),
    (np.int64(2), [2]),
    (torch.tensor(2), [2]),
    ([0, 2], [0, 2]),
    (torch.tensor([[0], [2]]), [0, 2]),
    (np.array([0, 2]), [0, 2]),
    (range(2), [0, 1]),
    ((torch.tensor([1, 3]),), [1, 3]),
    (torch.tensor([3, -1], dtype=torch.int32), [3]),
    (-1, []),
    ([], []),
]
INDICES_2 = [
    (torch.tensor([[0, 1], [1, 0]]), [1, 2]),
    (torch.tensor([1, 1]), [3]),
    ((torch.tensor([0, 1]), torch.tensor([1, 0])), [1, 2]),
    ((1, 0), [2]),
    ((np.int64(1), 0), [2]),
    ([[0, 1], [1, 0]], [1, 2]),
    (np.array([[0, 1], [-1, -1]]), [1]),
    (torch.tensor([[0, -1], [-1, 0]]), []),
    (torch.empty(0, 2, dtype=torch.int64), []),
]


@pytest.mark.parametrize(
    ("ndim", "index", "slots"), [(1, *case) for case in INDICES_1] + [(2, *case) for case in INDICES_2]
)
def test_forms_of_an_index(ndim, index, slots):
    buffer = prioritized(4, ndim)
    buffer.extend(rows(4) if ndim == 1 else rows(2, streams=2))
    buffer.update_priority(index, 5.0)
    assert raw(buffer) == [5.0 if slot in slots else 1.0 for slot in range(4)]
    every = torch.arange(4) if ndim == 1 else torch.cartesian_prod(torch.arange(2), torch.arange(2))
    buffer.update_priority(every, 2.0)
    buffer.mark_update(index)
    assert raw(buffer) == [5.0 if slot in slots else 2.0 for slot in range(4)]


@pytest.mark.parametrize(
    ("ndim", "index", "error"),
    [
        (1, 4, IndexRangeError),
        (1, [0, -2], IndexRangeError),
        (1, torch.zeros(2, 2, dtype=torch.int64), IndexRangeError),
        (1, torch.zeros(1, 1, 1, dtype=torch.int64), IndexRangeError),
        (1, [0.0], InvalidTypeError),
        (1, [True, False, True, False], InvalidTypeError),
        (1, slice(0, 2), InvalidTypeError),
        (1, None, InvalidTypeError),
        (1, "t", InvalidTypeError),
        (2, 1, IndexRangeError),
        (2, [0, 1, 2], IndexRangeError),
        (2, [[0, 2]], IndexRangeError),
        (2, [[2, 0]], IndexRangeError),
        (2, [[0, -2]], IndexRangeError),
        (2, (torch.tensor([0, 1]), torch.tensor([0])), IndexRangeError),
    ],
)
@pytest.mark.parametrize("call", ["update_priority", "mark_update"])
def test_what_is_no_index_changes_nothing(ndim, index, error, call):
    buffer = prioritized(4, ndim)
    buffer.extend(rows(4) if ndim == 1 else rows(2, streams=2))
    buffer.update_priority(torch.zeros(0, ndim, dtype=torch.int64) if ndim == 2 else [1], 3.0)
    before = raw(buffer)
    with pytest.raises(error):
        buffer.update_priority(index, 5.0) if call == "update_priority" else buffer.mark_update(index)
    assert raw(buffer) == before and buffer.sampler.priorities_dropped == 0


def test_without_priorities_updates_warn_and_marks_do_nothing():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=RandomSampler())
    buffer.extend(rows(4))
    buffer.mark_update([0, 1])
    with pytest.warns(UserWarning, match="a RandomSampler has no priorities, the update is ignored"):
        buffer.update_priority([0], 1.0)


def test_replaced_records_are_new_and_replaced_columns_are_not():
    buffer = prioritized(6)
    buffer.extend(rows(5))
    buffer.update_priority(range(5), [2.0, 3.0, 4.0, 5.0, 6.0])
    buffer[[3, 0, 3]] = rows(3, 50)
    assert raw(buffer) == [6, 3, 4, 6, 6] and buffer[3]["t"] == 52
    buffer["t"] = torch.arange(5)
    buffer["next", "done"] = torch.zeros(5, 1, dtype=torch.bool)
    assert raw(buffer) == [6, 3, 4, 6, 6] and buffer["t"].tolist() == [0, 1, 2, 3, 4]
    assert buffer.extend(rows(1)).tolist() == [5]


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (7, rows(1)[0], IndexRangeError),
        (0, rows(1)[0].exclude("t"), SchemaError),
        ([0, 1], rows(3), SchemaError),
        ("t", torch.zeros(5), SchemaError),
        ("other", torch.zeros(5), SchemaError),
        ("t", torch.zeros(4, dtype=torch.int64), (SchemaError, RuntimeError)),
    ],
)
def test_a_replacement_that_fails_changes_nothing(index, value, error):
    buffer = prioritized(6)
    buffer.extend(rows(5))
    buffer.update_priority([1], 3.0)
    before = fingerprint(buffer.state_dict())
    with pytest.raises(error):
        buffer[index] = value
    assert fingerprint(buffer.state_dict()) == before


def test_columns_need_tensordicts():
    for storage, data in ((LazyTensorStorage(4), torch.arange(4)), (ListStorage(4), [1, 2])):
        buffer = ReplayBuffer(storage=storage)
        buffer.extend(data)
        with pytest.raises(UnsupportedError, match="needs a buffer of TensorDicts"):
            buffer["t"] = torch.zeros(4)


def test_a_key_of_samples_is_left_out_of_writes():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(6), sampler=PrioritizedSampler(6, 1.0, 1.0), batch_size=3
    )
    buffer.extend(rows(4))
    batch = buffer.sample()
    assert {"index", "_weight", "priority_weight", "_generation"} <= set(batch.keys())
    buffer.extend(batch)
    assert set(buffer[:].keys(True, True)) == {"t", ("next", "done")}


@pytest.mark.parametrize("ndim", [2, 3])
def test_a_state_taken_before_the_first_write(ndim):
    """How many slots there are isn't known yet: nothing may be counted for the size asked for."""
    shape = (3,) if ndim == 2 else (3, 2)
    made = [prioritized(10, ndim), prioritized(10, ndim)]
    made[1].load_state_dict(made[0].state_dict())
    for buffer in made:
        buffer.update_priority(torch.empty(0, ndim, dtype=torch.int64), [])
        buffer.extend(torch.zeros(*shape, 9))
        assert buffer.storage.max_size == 12
        assert buffer.storage.generation(torch.arange(12)).min() >= 1
        buffer.storage.check_valid()


def test_emptying_keeps_the_schema_and_forgets_priorities_and_trajectories():
    buffer = prioritized(6)
    buffer.extend(rows(4))
    buffer.update_priority([0], 7.0)
    buffer.empty()
    buffer.extend(rows(3))
    assert raw(buffer) == [1.0, 1.0, 1.0]
    with pytest.raises(SchemaError):
        buffer.extend(rows(3).exclude("t"))
    slices = ReplayBuffer(storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=2, seed=0))
    slices.extend(rows(4))
    slices.sample(4)
    slices.empty()
    slices.extend(rows(3, 4))
    assert slices.sample(20)["t"].view(-1, 2).tolist() == [[5, 6]] * 10
