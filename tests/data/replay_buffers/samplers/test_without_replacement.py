"""An epoch serves each slot once, also if records are added or overwritten during the epoch."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError
from tests.data.replay_buffers.oracle import fill


def filled(count: int, capacity: int = 100) -> LazyTensorStorage:
    storage = LazyTensorStorage(capacity)
    fill(storage, torch.arange(count))
    return storage


@given(
    size=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 15), min_size=1, max_size=20),
    shuffle=st.booleans(),
)
def test_an_epoch_serves_each_slot_once(size, sizes, shuffle):
    storage, sampler = filled(size), SamplerWithoutReplacement(shuffle=shuffle, seed=0)
    served: list[int] = []
    for batch_size in sizes:
        slots = sampler.draw(storage, batch_size).slots.tolist()
        sampler.running.check_valid()
        assert len(slots) == min(batch_size, size - len(served))
        served += slots
        assert len(set(served)) == len(served)
        assert sampler.ran_out == (len(served) == size)
        if not shuffle:
            assert served == list(range(len(served)))
        if sampler.ran_out:
            served = []


def test_rows_that_come_during_an_epoch_join_the_next():
    storage, sampler = filled(10), SamplerWithoutReplacement(seed=0)
    first = sampler.draw(storage, 4).slots.tolist()
    fill(storage, torch.arange(10, 15), 10)
    rest = sampler.draw(storage, 100).slots.tolist()
    assert sorted(first + rest) == list(range(10))
    assert sampler.ran_out
    assert sorted(sampler.draw(storage, 100).slots.tolist()) == list(range(15))


def test_rows_overwritten_during_an_epoch_are_served_once_with_their_new_content():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(seed=0), batch_size=5
    )
    buffer.extend(torch.arange(10))
    first = buffer.sample()
    buffer.extend(torch.arange(100, 110))
    second = buffer.sample()
    assert bool((first < 10).all())
    assert sorted((second - 100).tolist() + first.tolist()) == list(range(10))


@pytest.mark.parametrize("batch_size, batches", [(3, 3), (5, 2), (10, 1)])
def test_drop_last_leaves_out_the_rest(batch_size, batches):
    storage, sampler = filled(10), SamplerWithoutReplacement(drop_last=True, seed=0)
    for _ in range(3):
        for number in range(batches):
            assert len(sampler.draw(storage, batch_size).slots) == batch_size
            assert sampler.ran_out == (number == batches - 1)


def test_drop_last_needs_a_full_batch():
    sampler = SamplerWithoutReplacement(drop_last=True)
    with pytest.raises(InvalidArgumentError, match="only 10 transitions are stored"):
        sampler.draw(filled(10), 11)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_batch_size_refused_by_drop_last_leaves_the_epoch_unchanged(prefetch):
    def begun():
        sampler = SamplerWithoutReplacement(drop_last=True)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(6), sampler=sampler, batch_size=3, prefetch=prefetch, seed=0
        )
        buffer.extend(torch.arange(6))
        return buffer, buffer.sample()

    (buffer, _), (other, first) = begun(), begun()
    with (
        pytest.raises(InvalidArgumentError, match="no batch is left"),
        pytest.warns(match="batch_size=8 differs"),
    ):
        other.sample(8)
    second = other.sample()
    assert torch.cat([first, second]).sort().values.tolist() == list(range(6))
    assert torch.equal(second, buffer.sample()) and torch.equal(other.sample(), buffer.sample())


def test_clearing_ends_the_epoch():
    storage, sampler = filled(10), SamplerWithoutReplacement(seed=0)
    sampler.draw(storage, 10)
    storage.clear()
    sampler.follow(storage)
    assert not sampler.ran_out
    fill(storage, torch.arange(8))
    assert sorted(sampler.draw(storage, 100).slots.tolist()) == list(range(8))


def test_orders_differ_between_epochs():
    storage, sampler = filled(50), SamplerWithoutReplacement(seed=0)
    assert sampler.draw(storage, 50).slots.tolist() != sampler.draw(storage, 50).slots.tolist()


def test_a_redraw_keeps_the_slots():
    storage, sampler = filled(10), SamplerWithoutReplacement(seed=0)
    drawn = sampler.draw(storage, 4)
    again = sampler.redraw(storage, drawn, torch.ones(4, dtype=torch.bool))
    assert torch.equal(again.slots, drawn.slots)


def test_drawn_slots_dont_alias_the_order():
    storage, sampler = filled(10), SamplerWithoutReplacement(seed=0)
    sampler.draw(storage, 4).slots.fill_(3)
    sampler.running.check_valid()


@pytest.mark.parametrize(
    "change",
    [
        {"position": 11},
        {"position": -1},
        {"items": torch.arange(3)},
        {"size": None},
        {"rows": 9},
        {"generations": torch.ones(10, dtype=torch.int64)},
        {"items": [1]},
        {"items": torch.arange(10) + 1},
        {"items": torch.arange(10) - 1},
        {"items": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9, 9])},
        {"items": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 2**60])},
    ],
)
def test_a_broken_state_changes_nothing(change):
    storage, sampler = filled(10), SamplerWithoutReplacement(seed=0)
    first = sampler.draw(storage, 4).slots.tolist()
    with pytest.raises(SchemaError, match="load_state_dict"):
        state = sampler.state_dict()
        sampler.load_state_dict({**state, "running": {**state["running"], **change}})
    assert sorted(first + sampler.draw(storage, 100).slots.tolist()) == list(range(10))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_records_overwritten_by_masked_rows_leave_the_epoch(shuffle, prefetch):
    def steps(start: int, kept: bool) -> TensorDict:
        mask = torch.full((2, 4), kept)
        return TensorDict(
            {"x": torch.arange(start, start + 8).view(2, 4), "collector": {"mask": mask}}, [2, 4]
        )

    sampler = SamplerWithoutReplacement(shuffle=shuffle, seed=0)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(16, ndim=2), sampler=sampler, batch_size=3, prefetch=prefetch
    )
    buffer.extend(steps(0, True))
    buffer.extend(steps(8, True))
    served = buffer.sample()["x"].tolist()
    buffer.extend(steps(16, False))
    while not sampler.ran_out:
        fresh = buffer.sample()["x"].tolist()
        assert fresh and all(8 <= x < 16 for x in fresh)
        served += fresh
    assert len(set(served)) == len(served) and set(range(8, 16)) <= set(served)
    sampler.running.check_valid()


def test_redraw_leaves_out_rows_that_became_masked():
    storage, sampler = LazyTensorStorage(6, ndim=2), SamplerWithoutReplacement(shuffle=False)
    mask = torch.ones(6, 1, dtype=torch.bool)
    fill(storage, TensorDict({"collector": {"mask": mask}}, [6, 1]))
    drawn, stale = sampler.draw(storage, 3), torch.ones(3, dtype=torch.bool)
    fill(storage, TensorDict({"collector": {"mask": ~mask[:2]}}, [2, 1]))
    assert sampler.redraw(storage, drawn, stale).slots.tolist() == [2]
    fill(storage, TensorDict({"collector": {"mask": ~mask[:1]}}, [1, 1]), 2)
    assert sampler.redraw(storage, drawn, stale).slots.tolist() == [3, 4, 5]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("taken", [1, 2, 4])
def test_a_restored_epoch_loses_nothing_that_was_drawn_ahead_and_is_taken_back(shuffle, taken):
    def make() -> ReplayBuffer:
        sampler = SamplerWithoutReplacement(shuffle=shuffle, seed=0)
        return ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2, prefetch=3)

    buffer, other = make(), make()
    buffer.extend(torch.arange(10))
    served = [row for _ in range(taken) for row in buffer.sample().tolist()]
    other.load_state_dict(buffer.state_dict())
    for each in (buffer, other):
        rows = [*served]
        with pytest.warns(UserWarning, match="batch_size=3 differs"):
            rows += each.sample(3).tolist()
        while not each.sampler.ran_out:
            rows += each.sample().tolist()
        assert sorted(rows) == list(range(10))


@pytest.mark.parametrize(
    "made", [SamplerWithoutReplacement, partial(SliceSamplerWithoutReplacement, slice_len=2)]
)
@pytest.mark.parametrize("name", ["drop_last", "shuffle"])
def test_options_that_are_no_booleans_are_refused(made, name):
    with pytest.raises(InvalidTypeError, match=f"{name}: expected True or False, got 'x'"):
        made(**{name: "x"})


def as_pickle(buffer):
    return pickle.loads(pickle.dumps(buffer))


def as_state(buffer):
    other = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(seed=0), batch_size=4, prefetch=2
    )
    other.load_state_dict(buffer.state_dict())
    return other


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("copied", [as_pickle, as_state])
def test_emptying_a_restored_buffer_ends_the_epoch_that_was_restored(copied, ahead):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(seed=0), batch_size=4, prefetch=2
    )
    buffer.extend(torch.arange(10))
    if ahead:
        buffer.sample()
    else:
        with pytest.warns(UserWarning, match="batch_size=3 differs"):
            buffer.sample(3)
    other = copied(buffer)
    for each in (buffer, other):
        each.empty()
        each.extend(torch.arange(20, 30))
    rows = [
        each.sample().tolist() + each.sample().tolist() + each.sample().tolist() for each in (buffer, other)
    ]
    assert rows[1] == rows[0] and sorted(rows[0]) == [*range(20, 30)]
