"""Consuming samplers draw each record a limited number of times."""

import copy
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    ConsumingSampler,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, SchemaError


def made(times=1, size=10, batch_size=3, **options):
    sampler = ConsumingSampler(times, seed=0)
    return ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=batch_size, **options)


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_each_record_is_drawn_as_often_as_given_and_once_per_batch(times, batch_size):
    buffer = made(times, batch_size=batch_size)
    buffer.extend(torch.arange(10))
    seen, last = Counter(), False
    while not last:
        batch = buffer.sample().tolist()
        assert len(set(batch)) == len(batch) <= batch_size
        seen.update(batch)
        last = buffer.sampler.ran_out
        assert len(buffer) == sum(seen[record] < times for record in range(10))
    assert seen == dict.fromkeys(range(10), times)
    with pytest.raises(EmptyBufferError, match=f"max_sample_count={times} times"):
        buffer.sample()
    assert len(buffer.storage) == 10, "used-up records keep their slots"


@pytest.mark.slow
def test_records_are_left_with_equal_probability():
    counts = torch.zeros(40)
    for seed in range(3000):
        buffer = made(size=40)
        buffer.set_seed(seed)
        if not seed:
            data = torch.arange(40)
        buffer.extend(data)
        counts[buffer.sample()] += 1
    assert (counts / 3000 - 3 / 40).abs().max() < 0.02


def test_a_slot_that_is_written_again_holds_a_new_record():
    buffer = made(size=4, batch_size=4)
    buffer.extend(torch.arange(4))
    buffer.sample()
    buffer.extend(torch.tensor([10, 11]))
    assert len(buffer) == 2
    assert sorted(buffer.sample().tolist()) == [10, 11]
    buffer[2] = torch.tensor(20)
    assert buffer.sample().tolist() == [20]
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(torch.arange(3))
    assert len(buffer) == 3


def test_another_column_makes_no_new_record():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=ConsumingSampler(), batch_size=4)
    buffer.extend(TensorDict({"a": torch.arange(4), "b": torch.zeros(4)}, [4]))
    buffer.sample()
    buffer["b"] = torch.ones(4)
    assert len(buffer) == 0


def test_epoch_is_the_remaining_records():
    buffer = made()
    buffer.extend(torch.arange(10))
    assert sorted(record for batch in buffer for record in batch.tolist()) == [*range(10)]
    buffer.extend(torch.arange(10, 14))
    assert sorted(record for batch in buffer for record in batch.tolist()) == [*range(10, 14)]


def test_lists_and_rows_that_are_no_steps():
    buffer = ReplayBuffer(storage=ListStorage(5), sampler=ConsumingSampler(), batch_size=9)
    buffer.extend(["a", "b", "c"])
    assert sorted(buffer.sample()) == ["a", "b", "c"]
    buffer = made(batch_size=9)
    mask = torch.tensor([True, False, True, False])
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=ConsumingSampler(), batch_size=9)
    buffer.extend(
        TensorDict({"t": torch.arange(8).view(2, 4), "collector": {"mask": mask.expand(2, 4)}}, [2, 4])
    )
    assert len(buffer) == 4
    assert sorted(buffer.sample()["t"].tolist()) == [0, 2, 4, 6]


def test_state_and_copies_keep_the_counts_of_uses():
    buffer = made(2)
    buffer.extend(torch.arange(10))
    buffer.sample()
    state, copied = buffer.state_dict(), copy.deepcopy(buffer)
    restored = made(2)
    restored.load_state_dict(state)
    rest = [batch.tolist() for batch in buffer]
    for other in (copied, restored):
        assert [batch.tolist() for batch in other] == rest
    for name, wrong in (("slots", torch.tensor([1, 1])), ("uses", torch.tensor([0, 2])), ("version", ["x"])):
        broken = {
            **state["_sampler"],
            "running": {"slots": torch.tensor([1, 2]), "uses": torch.tensor([0, 1])},
        }
        broken["running"] = {**broken["running"], "version": None, name: wrong}
        with pytest.raises(SchemaError, match=name):
            buffer.sampler.load_state_dict(broken)


def test_nothing_is_drawn_ahead():
    buffer = made(prefetch=3)
    buffer.extend(torch.arange(9))
    got = buffer.sample().tolist()
    assert len(buffer) == 6
    buffer.extend(torch.arange(9, 14))  # overwrites the slots 9, 0, 1, 2 and 3
    while len(buffer):
        got += buffer.sample().tolist()
    assert len(set(got)) == len(got), "no record came twice"
    assert {*range(4, 14)} <= {*got}, "and every one that was still stored came"


def test_redraw_keeps_the_rows_that_are_still_stored():
    sampler, storage = ConsumingSampler(seed=0), LazyTensorStorage(8)
    storage.set(range(8), torch.arange(8))
    draw = sampler.draw(storage, 4, generations=True)
    gone = draw.slots[:2]
    storage.set(gone, torch.arange(20, 22))
    again = sampler.redraw(storage, draw, torch.tensor([True, True, False, False]))
    assert again.slots[:2].tolist() == draw.slots[2:].tolist()
    assert len(set(again.slots.tolist())) == 4
    assert sampler.available(storage) == 4


def test_a_bad_count():
    with pytest.raises(InvalidArgumentError, match="max_sample_count"):
        ConsumingSampler(0)


@pytest.mark.parametrize("way", ["dumps", "state_dict"])
def test_a_restored_shared_buffer_draws_no_used_up_record_again(way, tmp_path):
    buffer, restored = made(2, shared=True), made(2, shared=True)
    restored.extend(torch.arange(50, 54))
    buffer.extend(torch.arange(10))
    seen = [row for _ in range(4) for row in buffer.sample().tolist()]
    if way == "dumps":
        buffer.dumps(tmp_path)
        restored.loads(tmp_path)
    else:
        restored.load_state_dict(buffer.state_dict())
    rest = [batch.tolist() for batch in restored]
    assert rest == [batch.tolist() for batch in buffer]
    assert Counter(seen + sum(rest, [])) == dict.fromkeys(range(10), 2)
