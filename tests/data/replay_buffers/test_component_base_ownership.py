"""A component belongs to one buffer, and a buffer works with any content of its storage."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import threading
from functools import partial

import pytest
import torch

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    WriterEnsemble,
)
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, UnsupportedError
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
    if name != "storage":  # buffers may share a storage, see below
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
class TestStorageChangedDirectly:
    """The buffer writes after the newest record in the storage, and no forgotten record returns."""

    def buffer(self, storage: type, sampler: object = None) -> ReplayBuffer:
        return ReplayBuffer(storage=storage(10), sampler=sampler)

    def test_next_write_after_a_clear_begins_at_slot_zero(self, storage):
        rb = self.buffer(storage)
        rb.extend(some(storage, range(8)))
        rb.storage.clear()
        assert rb.extend(some(storage, range(50, 51))).tolist() == [0]
        assert values(rb) == [50]
        assert set(torch.as_tensor(rb.sample(20)).tolist()) == {50}

    def test_next_write_follows_direct_writes(self, storage):
        rb = self.buffer(storage)
        fill(rb.storage, some(storage, range(4)))
        assert rb.extend(some(storage, range(50, 51))).tolist() == [4]
        assert values(rb) == [0, 1, 2, 3, 50]

    def test_direct_corrections_leave_the_cursor(self, storage):
        rb = self.buffer(storage)
        rb.extend(some(storage, range(13)))
        fill(rb.storage, some(storage, range(60, 62)), 6)
        assert rb.extend(some(storage, range(50, 51))).tolist() == [3]

    def test_next_write_follows_a_loaded_storage(self, storage):
        rb = self.buffer(storage)
        rb.extend(some(storage, range(2)))
        state = rb.storage.state_dict()
        rb.extend(some(storage, range(2, 10)))
        rb.storage.load_state_dict(state)
        assert rb.extend(some(storage, range(50, 51))).tolist() == [2]
        assert values(rb) == [0, 1, 50]

    def test_next_write_follows_a_full_loaded_storage(self, storage):
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


def test_loaded_epoch_continues_only_over_the_same_records():
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


# One storage in several buffers


def test_one_buffer_writes_a_shared_storage_and_another_reads():
    storage = LazyTensorStorage(10)
    writer = ReplayBuffer(storage=storage, batch_size=4, seed=0)
    reader = ReplayBuffer(
        storage=storage, sampler=SamplerWithoutReplacement(seed=0), batch_size=4, prefetch=2
    )
    writer.extend(torch.arange(6))
    assert sorted(torch.cat(list(reader)).tolist()) == [0, 1, 2, 3, 4, 5] and len(reader) == 6
    writer.extend(torch.arange(6, 12))
    assert sorted(torch.cat(list(reader)).tolist()) == list(range(2, 12))
    for write in (
        lambda: reader.extend(torch.arange(2)),
        lambda: reader.add(torch.tensor(1)),
        lambda: reader.__setitem__(0, torch.tensor(1)),
        lambda: reader.empty(),
        lambda: reader.load_state_dict(reader.state_dict()),
    ):
        with pytest.raises(UnsupportedError, match="is written through another ReplayBuffer"):
            write()
    writer.empty()
    with pytest.raises(EmptyBufferError):
        reader.sample()
    copied = copy.deepcopy(reader)
    assert copied.extend(torch.arange(3)).tolist() == [0, 1, 2] and len(writer) == 0
    del writer
    gc.collect()
    assert reader.extend(torch.arange(2)).tolist() == [0, 1], "once the writing one is gone another one may"


def test_first_buffer_that_writes_owns_the_storage():
    storage = LazyTensorStorage(10)
    first, second = (ReplayBuffer(storage=storage, batch_size=2) for _ in range(2))
    second.extend(torch.arange(3))
    with pytest.raises(UnsupportedError, match="write through that buffer"):
        first.extend(torch.arange(3))
    assert len(first) == 3
    second.set_storage(LazyTensorStorage(10))
    first.extend(torch.arange(3))
    assert len(first) == 6 and len(second) == 0
    with pytest.raises(InvalidArgumentError, match="belongs to another"):
        second.set_storage(storage)


def test_an_ensemble_over_the_storages_of_buffers():
    buffers = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        buffer.extend(torch.arange(4) + 10 * number)
    ensemble = ReplayBufferEnsemble(
        storages=StorageEnsemble(*(buffer._storage for buffer in buffers)),
        samplers=SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True),
        writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
        batch_size=400,
    )
    first, second = ensemble.sample()
    assert set(first.tolist()) == {0, 1, 2, 3} and set(second.tolist()) == {10, 11, 12, 13}
    buffers[1].extend(torch.arange(20, 26))
    assert ensemble.sample()[1].max() >= 20 and len(ensemble) == 14
    with pytest.raises(UnsupportedError, match="is written through another"):
        ensemble[0].extend(torch.arange(2))


def test_an_ensemble_over_the_writers_of_buffers():
    buffers = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(
        storages=StorageEnsemble(*(buffer._storage for buffer in buffers)),
        samplers=SamplerEnsemble(RandomSampler(), RandomSampler()),
        writers=WriterEnsemble(*(buffer._writer for buffer in buffers)),
        batch_size=4,
    )
    for buffer in buffers:
        buffer.extend(torch.arange(4))
        assert buffer.extend(torch.arange(3)).tolist() == [4, 5, 6]
    assert ensemble.sample().shape == (2, 2) and len(ensemble) == 14
    with pytest.raises(UnsupportedError, match="is written through another"):
        ensemble[0].extend(torch.arange(2))


def test_threads_over_one_storage_tear_no_row():
    storage = LazyTensorStorage(50)
    writer = ReplayBuffer(storage=storage)
    reader = ReplayBuffer(storage=storage, batch_size=64)
    wide = torch.arange(50)[:, None].expand(50, 2000).clone()
    writer.extend(wide)
    ended = threading.Event()

    def write() -> None:
        for turn in range(1, 60):
            writer.extend(wide + 50 * turn)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        batch = reader.sample()
        assert (batch == batch[:, :1]).all()
    thread.join()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"storage": ListStorage(5)}, "can't be sent to a process that is spawned"),
        (
            {"storage": LazyTensorStorage(5), "sampler": PrioritizedSampler(5, 1.0, 1.0)},
            "keeps its priorities in one",
        ),
    ],
)
def test_unsendable_buffer_raises_before_a_spawned_process_starts(parts, why):
    buffer = ReplayBuffer(**parts)
    buffer.extend(torch.arange(3))
    process = multiprocessing.get_context("spawn").Process(target=print, args=(buffer,))
    with pytest.raises(UnsupportedError, match=why):
        process.start()
    assert process.pid is None, "nothing was started"
    assert len(copy.deepcopy(buffer)) == 3


def test_queue_transfers_a_copy_of_a_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(torch.arange(3))
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(buffer)
    received = queue.get()
    buffer.extend(torch.arange(2))
    assert (len(buffer), received[:].tolist()) == (5, [0, 1, 2])
    queue.close()


@pytest.mark.slow
def test_buffer_with_delayed_parts_can_be_sent_to_a_spawned_process():
    buffer = ReplayBuffer(storage=partial(LazyTensorStorage, 5), delayed_init=True)
    process = multiprocessing.get_context("spawn").Process(target=len, args=(buffer,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
