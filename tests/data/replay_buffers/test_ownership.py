"""Parts belong to one buffer, and a buffer goes on with whatever its storage holds."""

from __future__ import annotations

import gc

import pytest
import torch

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.data.replay_buffers.oracle import fill

PARTS = {
    "storage": lambda: LazyTensorStorage(10),
    "sampler": SamplerWithoutReplacement,
    "writer": RoundRobinWriter,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_buffer_is_refused(name):
    part = PARTS[name]()
    first = ReplayBuffer(**{name: part})
    with pytest.raises(InvalidArgumentError, match=f"{name}: this .* belongs to another ReplayBuffer"):
        ReplayBuffer(**{name: part})
    second = ReplayBuffer()
    mine = second.storage, second.sampler, second.writer
    with pytest.raises(InvalidArgumentError, match=f"{name}: this .* belongs to another ReplayBuffer"):
        getattr(second, f"set_{name}")(part)
    assert (second.storage, second.sampler, second.writer) == mine
    assert part.owner is first


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_was_given_up_is_free(name):
    part = PARTS[name]()
    first = ReplayBuffer(**{name: part})
    getattr(first, f"set_{name}")(PARTS[name]())
    assert part.owner is None
    second = ReplayBuffer(**{name: part})
    assert part.owner is second
    getattr(second, f"set_{name}")(part)
    assert part.owner is second


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_dead_buffer_is_free(name):
    part = PARTS[name]()
    first = ReplayBuffer(**{name: part})
    del first
    gc.collect()
    ReplayBuffer(**{name: part})


@pytest.mark.parametrize(
    "options",
    [
        {"dim_extend": -1},
        {"seed": -1},
        {"transform": 3},
        {"batch_size": 0},
        {"prefetch": -1},
        {"storage": 3},
        {"batch_size": None},
    ],
)
def test_a_buffer_that_could_not_be_made_takes_no_part(options):
    parts = {name: make() for name, make in PARTS.items()}
    parts["sampler"] = SamplerWithoutReplacement(drop_last=True)
    with pytest.raises((ValueError, TypeError, UnsupportedError)) as error:
        ReplayBuffer(**{**parts, "batch_size": 2, **options})
    assert error.value.__traceback__ is not None  # keeps the failed buffer alive, as a notebook would
    assert [part.owner for part in parts.values()] == [None] * 3
    parts["sampler"].set_seed(3)
    ReplayBuffer(**parts, batch_size=2)


def test_a_writer_cant_leave_its_buffers_storage():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(InvalidArgumentError, match="register_storage: .* another storage"):
        rb.writer.register_storage(LazyTensorStorage(10))
    rb.writer.register_storage(rb.storage)
    assert rb.extend(torch.arange(3)).tolist() == [0, 1, 2]


def values(rb: ReplayBuffer) -> list[int]:
    return torch.as_tensor(rb[:]).tolist()


def some(storage: type, numbers: range) -> object:
    return list(numbers) if storage is ListStorage else torch.tensor(numbers)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
class TestAStorageThatChangedByItself:
    """The buffer goes on behind the newest record that the storage holds; nothing forgotten comes back."""

    def buffer(self, storage: type, sampler: object = None) -> ReplayBuffer:
        return ReplayBuffer(storage=storage(10), sampler=sampler)

    def test_cleared(self, storage):
        rb = self.buffer(storage)
        rb.extend(some(storage, range(8)))
        rb.storage.clear()
        assert rb.extend(some(storage, range(50, 51))).tolist() == [0]
        assert values(rb) == [50]
        assert set(torch.as_tensor(rb.sample(20)).tolist()) == {50}

    def test_written(self, storage):
        rb = self.buffer(storage)
        fill(rb.storage, some(storage, range(4)))
        assert rb.extend(some(storage, range(50, 51))).tolist() == [4]
        assert values(rb) == [0, 1, 2, 3, 50]

    def test_corrected(self, storage):
        rb = self.buffer(storage)
        rb.extend(some(storage, range(13)))
        fill(rb.storage, some(storage, range(60, 62)), 6)
        assert rb.extend(some(storage, range(50, 51))).tolist() == [3]

    def test_loaded(self, storage):
        rb = self.buffer(storage)
        rb.extend(some(storage, range(2)))
        state = rb.storage.state_dict()
        rb.extend(some(storage, range(2, 10)))
        rb.storage.load_state_dict(state)
        assert rb.extend(some(storage, range(50, 51))).tolist() == [2]
        assert values(rb) == [0, 1, 50]

    def test_loaded_when_full(self, storage):
        rb, other = self.buffer(storage), self.buffer(storage)
        rb.extend(some(storage, range(13)))
        other.storage.load_state_dict(rb.storage.state_dict())
        assert other.extend(some(storage, range(50, 51))).tolist() == [3]

    def test_an_epoch_of_forgotten_records_ends(self, storage):
        for forget in ("clear", "load"):
            rb = self.buffer(storage, SamplerWithoutReplacement(shuffle=False))
            rb.extend(some(storage, range(2)))
            state = rb.storage.state_dict()
            rb.extend(some(storage, range(2, 10)))
            rb.sample(4)
            if forget == "clear":
                rb.storage.clear()
                rb.extend(some(storage, range(2)))
            else:
                rb.storage.load_state_dict(state)
            assert torch.as_tensor(rb.sample(4)).tolist() == [0, 1]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rows", [10, 1000])
@pytest.mark.parametrize("how", ["set_sampler", "constructor"])
def test_a_used_sampler_begins_anew_in_another_buffer(shuffle, rows, how):
    sampler = SamplerWithoutReplacement(shuffle=shuffle, seed=0)
    first = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler)
    first.extend(torch.arange(rows))
    first.sample(rows - 6)
    first.set_sampler(RandomSampler())
    if how == "constructor":
        rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler)
        rb.extend(torch.arange(100, 103))
    else:
        rb = ReplayBuffer(storage=LazyTensorStorage(5))
        rb.extend(torch.arange(100, 103))
        rb.set_sampler(sampler)
    assert sorted(rb.sample(4).tolist()) == [100, 101, 102]
    assert rb.sampler.ran_out


def test_another_storage_ends_the_epoch_even_if_it_holds_as_much():
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SamplerWithoutReplacement(shuffle=False))
    rb.extend(torch.arange(9))
    rb.sample(4)
    other = LazyTensorStorage(9)
    fill(other, torch.arange(100, 109))
    rb.set_storage(other)
    assert rb.sample(20).tolist() == list(range(100, 109))


def test_without_buffers_an_epoch_belongs_to_one_storage():
    first, second = LazyTensorStorage(9), LazyTensorStorage(9)
    fill(first, torch.arange(9))
    fill(second, torch.arange(3))
    sampler = SamplerWithoutReplacement(shuffle=False)
    assert sampler.draw(first, 4).slots.tolist() == [0, 1, 2, 3]
    assert sampler.draw(second, 4).slots.tolist() == [0, 1, 2]
    assert sampler.draw(first, 4).slots.tolist() == [0, 1, 2, 3]


def test_a_loaded_epoch_goes_on_only_where_it_fits():
    storage, small = LazyTensorStorage(9), LazyTensorStorage(9)
    fill(storage, torch.arange(9))
    fill(small, torch.arange(3))
    sampler = SamplerWithoutReplacement(shuffle=False)
    sampler.draw(storage, 2)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert sampler.draw(small, 9).slots.tolist() == [0, 1, 2]
    sampler.load_state_dict(state)
    assert sampler.draw(storage, 9).slots.tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_parts_show_their_class_without_an_address():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), sampler=RandomSampler(), writer=RoundRobinWriter())
    assert repr(buffer.sampler) == "RandomSampler()" and repr(buffer.writer) == "RoundRobinWriter()"
    assert " at 0x" not in repr(buffer)
