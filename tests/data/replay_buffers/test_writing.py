"""Writes return their slots, inform the sampler, and leave a consistent buffer after an error."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.envs.transforms import Compose, MultiStepTransform
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.oracle import fingerprint
from tests.interrupts import interruptions


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


def test_writes_return_the_slots():
    one, two = ReplayBuffer(storage=LazyTensorStorage(5)), ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    assert one.extend(rows(3)).tolist() == [0, 1, 2]
    assert one.add(rows(1)[0]) == 3 and one.extend(rows(3)).tolist() == [4, 0, 1]
    assert one.extend(rows(7)).tolist() == [-1, -1, 4, 0, 1, 2, 3]
    assert two.extend(rows(2, streams=2)).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert two.add(rows(1, streams=2)[:, 0]).tolist() == [[2, 0], [2, 1]]
    assert two.extend(rows(1, streams=2)).dtype == torch.int64


class Holding:
    """A transform that withholds all records until `hold` is False."""

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


def test_dim_extend_sets_the_dimension_of_time():
    assert ReplayBuffer(storage=LazyTensorStorage(8, ndim=3)).dim_extend == 2
    first = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), dim_extend=0)
    first.extend(rows(4, streams=2).transpose(0, 1))
    last = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    last.extend(rows(4, streams=2))
    assert first.dim_extend == 0 and torch.equal(first[:]["t"], last[:]["t"].T)
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
def test_updates_accept_all_forms_of_an_index(ndim, index, slots):
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
def test_invalid_index_of_priorities_changes_nothing(ndim, index, error, call):
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


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_misspelled_key_names_the_similar_one(storage):
    rb = ReplayBuffer(storage=storage(10), batch_size=2)
    rb.extend(rows(4))
    with pytest.raises(MissingKeyError, match=r"there are .*; did you mean \('next', 'done'\)\?"):
        rb["next", "dnoe"]
    if storage is ListStorage:  # records of a list may differ
        return
    with pytest.raises(SchemaError, match=r"unexpected \['done'\].*; did you mean \('next', 'done'\)\?"):
        rb.extend(TensorDict({"t": torch.arange(2), "done": torch.zeros(2, 1, dtype=torch.bool)}, [2]))
    with pytest.raises(MissingKeyError, match=r"keys: .*; did you mean \('next', 'done'\)\?"):
        rb.sample(keys=[("nxt", "done")])
    with pytest.raises(MissingKeyError, match=r"there are \['t', \('next', 'done'\)\]$"):
        rb["reward"]


def test_columns_need_tensordicts():
    for storage, data in ((LazyTensorStorage(4), torch.arange(4)), (ListStorage(4), [1, 2])):
        buffer = ReplayBuffer(storage=storage)
        buffer.extend(data)
        with pytest.raises(UnsupportedError, match="only a tensor storage of TensorDicts has columns"):
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
    """The number of slots is still unknown, so no counter may assume the requested size."""
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


# Behaviour that other releases of this API have as well


@pytest.mark.parametrize("given", [None, True, False])
def test_priorities_in_the_data_are_taken(given):
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(10), batch_size=50, priority_key="p"
    )
    data = TensorDict({"x": torch.arange(2), "p": torch.tensor([0.0, 1000.0])}, [2])
    buffer.extend(data, update_priority=given)
    drawn = set(buffer.sample()["x"].tolist())
    assert drawn == ({0, 1} if given is False else {1})


def test_priorities_in_the_data_belong_to_its_rows():
    def filled(capacity: int, ndim: int, data: TensorDict, **options: Any) -> list[float]:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(capacity, ndim=ndim), **options
        )
        buffer.extend(data)
        assert (buffer["td_error"].reshape(-1) >= 0).all()
        buffer.sampler._priorities.sync(buffer.storage)
        return buffer.sampler._priorities.state_dict()["raw"].tolist()

    grid = torch.arange(1.0, 7.0).view(2, 3)
    both = TensorDict({"x": grid, "td_error": grid}, [2, 3])
    assert filled(6, 2, both) == [1, 4, 2, 5, 3, 6], "time first, as slots are numbered"
    assert filled(4, 2, both) == [3, 6, 2, 5], "the newest stay, each with its own"
    assert filled(6, 1, both.reshape(-1)) == [1, 2, 3, 4, 5, 6]
    assert filled(6, 1, both, transform=lambda data: data.reshape(-1)) == [1, 2, 3, 4, 5, 6]
    assert filled(2, 1, both) == [3, 6], "several of one record are reduced"
    assert filled(2, 1, both, reduction="sum") == [6, 15]
    masked = TensorDict(
        {"td_error": torch.arange(1.0, 5.0), "collector": {"mask": torch.tensor([True, False, True, True])}},
        [4],
    )
    assert filled(6, 1, masked) == [1, 3, 4], "rows that are no steps have none"
    with pytest.raises(InvalidArgumentError, match="priorit"):
        filled(6, 1, TensorDict({"td_error": torch.tensor([1.0, -1.0])}, [2]))


def test_writes_return_one_index_for_each_row():
    one, two = ReplayBuffer(storage=LazyTensorStorage(5)), ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    assert one.extend(rows(7)).tolist() == [-1, -1, 2, 3, 4, 0, 1]
    assert two.extend(rows(4, streams=2)).tolist()[:3] == [[-1, -1], [-1, -1], [1, 0]]
    objects = ReplayBuffer(storage=ListStorage(2))
    assert objects.extend(["a", "b", "c"]).tolist() == [-1, 1, 0]
    mask = torch.tensor([False, True, True])
    steps = TensorDict({"x": torch.arange(3), "collector": {"mask": mask}}, [3])
    masked = ReplayBuffer(storage=LazyTensorStorage(5))
    assert masked.extend(steps).tolist() == [-1, 0, 1] and masked.extend(steps[:1]).tolist() == [-1]
    assert masked.add(steps[0]) == -1 and masked.add(steps[1]) == 2
    prioritized = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(5))
    prioritized.update_priority(prioritized.extend(rows(7)), torch.arange(7.0))  # index -1 is skipped


def test_the_written_layout_is_that_of_indexing():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4)
    data = TensorDict({"x": torch.arange(60).view(2, 30), "y": torch.zeros(2, 30, 3)}, [2, 30])
    buffer.extend(data)
    x = data["x"]
    mask = torch.arange(60).view(2, 30) % 7 == 0
    for index in (
        slice(None),
        slice(0, 1),
        0,
        -1,
        (0, 3),
        (slice(None), slice(10, 20)),
        (0, slice(3, 4)),
        (slice(None), -1),
        ...,
        [1, 0],
        (slice(None), [3, 5]),
        ([0, 1], [7, 20]),
        (np.array([0, 1]), torch.tensor([7, 20])),
        torch.tensor([1]),
        torch.tensor([True, False]),
        mask,
    ):
        found = buffer[index]
        assert torch.equal(found["x"], x[index]) and found.batch_size == x[index].shape, index
        assert torch.equal(found["y"], data["y"][index])
    assert torch.equal(buffer["x"], x)
    buffer[:]["x"][1, 2] = -5  # a view of the storage
    assert buffer.storage[2, 1]["x"] == -5
    batch, info = buffer.sample(return_info=True)
    assert (buffer[info["index"]] == batch).all(), "coordinates have time first, as they were returned"
    trees = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    trees.extend((x, {"z": x.float()}))
    assert torch.equal(trees[:, 4:6][0], x[:, 4:6]) and torch.equal(trees[[1]][1]["z"], x[[1]].float())
    with pytest.raises(IndexRangeError):
        buffer[2]
    time_first = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), dim_extend=0)
    time_first.extend(data.transpose(0, 1))
    assert torch.equal(time_first[3:5]["x"], x.T[3:5])


def test_replacement_uses_the_written_layout():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    buffer.extend(TensorDict({"x": torch.zeros(2, 30)}, [2, 30]))
    buffer[:, 10:20] = TensorDict({"x": torch.arange(20.0).view(2, 10)}, [2, 10])
    buffer[0, 3:4] = TensorDict({"x": torch.full((1,), 7.0)}, [1])
    expected = torch.zeros(2, 30)
    expected[:, 10:20] = torch.arange(20.0).view(2, 10)
    expected[0, 3] = 7
    assert torch.equal(buffer["x"], expected)
    buffer["x"] = expected * 2
    assert torch.equal(buffer[:]["x"], expected * 2)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_replacement_with_a_new_key_makes_a_column(storage):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage(10), batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(6), "g": {"a": torch.ones(6)}}, [6]))
    buffer.update_priority(torch.arange(6), torch.arange(6.0))
    view = buffer[:]
    new = TensorDict({"x": torch.tensor([9]), "g": {"a": torch.ones(1), "b": torch.ones(1, 2)}}, [1])
    buffer[3:4] = new
    assert buffer["x"].tolist() == [0, 1, 2, 9, 4, 5] and view["x"].tolist() == [0, 1, 2, 9, 4, 5]
    assert buffer["g", "b"].sum(1).tolist() == [0, 0, 0, 2, 0, 0]
    buffer["flag"] = torch.ones(6, dtype=torch.bool)
    assert set(buffer.sample().keys(True, True)) >= {"x", "flag", ("g", "a"), ("g", "b")}
    assert buffer.sampler._priorities.state_dict()["raw"].tolist()[4:] == [4, 5], (
        "others keep their priorities"
    )
    with pytest.raises(SchemaError, match="missing"):
        buffer.extend(TensorDict({"x": torch.arange(2), "g": {"a": torch.ones(2)}}, [2]))
    with pytest.raises(SchemaError):
        buffer[0:1] = TensorDict({"x": torch.ones(1, dtype=torch.int64), "more": torch.ones(1)}, [1])
    copied = copy.deepcopy(buffer)
    assert (copied[:] == buffer[:]).all()


def test_counting_writes():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(rows(6))
    buffer.add(rows(1)[0])
    assert buffer.write_count == 7
    buffer.empty(empty_write_count=False)
    assert buffer.write_count == 7 and len(buffer) == 0
    buffer.empty()
    assert buffer.write_count == 0 and buffer.extend(rows(2)).tolist() == [0, 1] and buffer.write_count == 2


@pytest.mark.parametrize("counts_again", [True, False])
def test_loaded_write_count_continues(counts_again):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(rows(6))
    buffer.empty(empty_write_count=counts_again)
    buffer.extend(rows(2))
    again = ReplayBuffer(storage=LazyTensorStorage(10))
    again.load_state_dict(buffer.state_dict())
    assert again.write_count == buffer.write_count == (2 if counts_again else 8)
    with pytest.raises(SchemaError, match="_written_before"):
        again.load_state_dict({**buffer.state_dict(), "_written_before": 9})
    again.set_storage(LazyTensorStorage(10))
    assert again.write_count == 0 and again.extend(rows(3)).tolist() == [0, 1, 2] and again.write_count == 3


def steps(count: int, start: int = 0, dtype: torch.dtype = torch.float32) -> TensorDict:
    t = torch.arange(start, start + count)[:, None]
    after = {"reward": torch.ones(count, 1), "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict(
        {"observation": t.to(dtype), "next": {"observation": t.to(dtype) + 1, **after}}, [count]
    )


def n_step() -> TensorDictReplayBuffer:
    transform = Compose(MultiStepTransform(2, 0.9))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), transform=transform, batch_size=2)
    buffer.extend(steps(5))
    return buffer


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.extend(steps(3, 5, torch.float64)),
        lambda buffer: buffer.add(steps(1, 5, torch.float64)[0]),
        lambda buffer: buffer.__setitem__(slice(0, 3), steps(3, 5, torch.float64)),
    ],
    ids=["extend", "add", "setitem"],
)
def test_refused_write_keeps_the_steps_that_a_transform_holds(write):
    buffer = n_step()
    with pytest.raises(SchemaError):
        write(buffer)
    buffer.extend(steps(3, 5))
    assert buffer[:]["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_failure_of_a_later_transform_keeps_the_steps_that_an_earlier_one_holds():
    class Failing(Holding):
        def inv(self, data: Any) -> Any:
            if self.hold:
                raise ValueError("not now")
            return data

    buffer, failing = n_step(), Failing()
    buffer.insert_transform(0, failing)  # written data pass the transforms in reverse order
    with pytest.raises(ValueError, match="not now"):
        buffer.extend(steps(3, 5))
    failing.hold = False
    buffer.extend(steps(3, 5))
    assert buffer[:]["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [1, 3])
def test_interrupted_write_neither_loses_nor_repeats_held_steps(count):
    for buffer, place in interruptions(n_step, lambda buffer: buffer.extend(steps(count, 5)), most=60):
        written = 5 + (count if len(buffer) > 3 else 0)
        buffer.extend(steps(4, written))
        stored = buffer[:]["observation"].flatten().tolist()
        assert stored == [*range(written + 2)], place
